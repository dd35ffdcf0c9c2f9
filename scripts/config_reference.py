"""Write `docs/configuration.md` from the configuration's schema.

python -m scripts.config_reference           write it
python -m scripts.config_reference --check   exit 1 if it is out of date
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lite.config import Config
from torchtitan_lite.config.reference import markdown

REFERENCE = Path("docs/configuration.md")


def main() -> None:
    """Run the command, in the top folder of a checkout."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date")
    check = parser.parse_args().check
    if check and not is_current(REFERENCE):
        sys.exit(f"{REFERENCE} is out of date: run python -m scripts.config_reference")
    if not check:
        REFERENCE.write_text(markdown(Config), encoding="utf-8")


def is_current(page: Path) -> bool:
    """Whether the page equals the one generated from the schema."""
    return page.is_file() and page.read_text(encoding="utf-8") == markdown(Config)


if __name__ == "__main__":
    main()
