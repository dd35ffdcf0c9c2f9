"""Make a checkpoint of ours from a torch DCP checkpoint with torchtitan's names.

python -m scripts.convert_from_dcp DCP_DIR OUT_DIR --config FILE [--section.key value ...]

The configuration says which model it is: [model] name and flavor. OUT_DIR may be the checkpoint
folder of a new run, or any other that checkpoint.initial_load_path then names with its step.
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lite.checkpoint.interchange.dcp_folder import DcpFolder
from torchtitan_lite.checkpoint.interchange.from_dcp import convert_from_dcp
from torchtitan_lite.checkpoint.storage.storage import open_storage
from torchtitan_lite.config import parse_command_line
from torchtitan_lite.errors import UserError
from torchtitan_lite.log import configure_logging, logger
from torchtitan_lite.models import model_spec


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    configure_logging()
    options, rest = _parser().parse_known_args(argv)
    try:
        config, _ = parse_command_line(rest)
        done = convert_from_dcp(
            DcpFolder(options.dcp_dir),
            open_storage(options.out_dir),
            model_spec(config.model),
            run_config=config.model_dump(),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    kind = "weights only" if done.model_only else f"step {done.step}"
    print(f"{done.where}: {done.num_tensors} tensors, {kind}.")
    if done.left_out:
        print(
            f"Not taken over: {', '.join(done.left_out)}. Learning rate and optimizer follow the "
            "configuration, and the data begins anew."
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_from_dcp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("dcp_dir", type=Path, help="the folder that holds .metadata")
    parser.add_argument("out_dir", help="folder or URL in which step-N is written")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
