"""Write docs/models.md, the table of architectures and of the tests that prove them, or check it.

python -m tests.models_page [--check]

The table is what pytest collects: a test proves a variant if it has the variant among its
parameters.
"""

import argparse
import contextlib
import io
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hugging_face import FAMILIES, has_experts, make_model
from tests.harness.ranks import REPOSITORY
from torchtitan_lite.models import hugging_face_dims

PAGE = REPOSITORY / "docs" / "models.md"
_TEXT = Path(__file__).with_name("models_page.md")


@dataclass(frozen=True)
class _Proof:
    """A column of the table: a test, and the mesh that it must have as a parameter."""

    title: str
    file: str
    test: str
    mesh: str | None = None


_TRAINS = ("tests/parity/test_hugging_face.py", "test_every_folder_trains_on_every_mesh")
_CONVERSION = "tests/unit/checkpoint/convert/hugging_face/test_conversion.py"
_PROOFS = (
    _Proof(
        "logits, loss, gradients",
        "tests/unit/models/test_hugging_face.py",
        "test_logits_loss_and_gradients_equal_those_of_transformers",
    ),
    _Proof("folder in and out", _CONVERSION, "test_a_round_trip_is_byte_identical"),
    _Proof("FSDP 2", *_TRAINS, "fsdp-2"),
    _Proof("TP 2", *_TRAINS, "tp-2"),
    _Proof("PP 2", *_TRAINS, "pp-2"),
    _Proof("CP 2", *_TRAINS, "cp-2"),
    _Proof("EP 2", *_TRAINS, "ep-2"),
    _Proof("text", _TRAINS[0], "test_every_folder_generates_as_transformers"),
    _Proof(
        "published",
        "tests/unit/serving/publish/test_architectures.py",
        "test_a_model_of_transformers_receives_every_weight",
    ),
    _Proof("adapters", "tests/parity/test_lora.py", "test_peft_loads_exported_adapters"),
)


class _Collection:
    """A plugin of pytest that keeps what is collected."""

    def __init__(self) -> None:
        self.proven: dict[_Proof, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            file, _, name = item.nodeid.partition("::")
            parameters: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            for proof in _PROOFS:
                is_mesh = proof.mesh is None or parameters.get("mesh") == proof.mesh
                if (file, name.partition("[")[0]) == (proof.file, proof.test) and is_mesh:
                    self.proven[proof].add(parameters["family"])


def page_text() -> str:
    """Return the page."""
    # Of transformers, about the special tokens of tiny models.
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    collection = _Collection()
    files = sorted({proof.file for proof in _PROOFS})
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(["--collect-only", "-q", "--capture=no", *files], plugins=[collection])
    if status:
        raise SystemExit(f"pytest could not collect {', '.join(files)}.")
    variants: dict[str, list[str]] = defaultdict(list)
    families: dict[str, str] = {}
    for name in FAMILIES:
        model = make_model(name)
        model.config.architectures = [type(model).__name__]
        values = model.config.to_dict()
        variants[values["model_type"]].append(name)
        families[values["model_type"]] = hugging_face_dims(values)[0]
    titles = ["`model_type`", "family", "variants", *(proof.title for proof in _PROOFS)]
    lines = [titles, ["---"] * len(titles)]
    for model_type, names in sorted(variants.items()):
        cells = [_cell(names, proof, collection.proven[proof]) for proof in _PROOFS]
        lines.append([f"`{model_type}`", f"`{families[model_type]}`", str(len(names)), *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = _TEXT.read_text(encoding="utf-8").format(
        num_types=len(variants), num_variants=len(FAMILIES), conversion=_CONVERSION
    )
    return text + table


def _cell(names: Sequence[str], proof: _Proof, proven: set[str]) -> str:
    if proof.mesh is not None and proof.mesh.startswith("ep") and not any(map(has_experts, names)):
        return "no experts"
    num_proven = sum(name in proven for name in names)
    return "yes" if num_proven == len(names) else f"{num_proven} of {len(names)}"


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/models.md.")
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    options = parser.parse_args()
    text = page_text() + "\n"
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/models.md is not up to date: run `make docs`.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
