"""`python -m torchtitan_lite.cli.resize_check MESH -- ARGUMENTS`: print why replicas that were
started with ARGUMENTS cannot move to MESH (`RunMesh.to_text`) in their processes.

The launcher runs it, because the launcher does not import torch. It prints `{"refusal": TEXT}`,
with an empty text if they can.
"""

import json
import sys
from collections.abc import Callable, Sequence

from torchtitan_lite.cli.train_options import checked_config
from torchtitan_lite.config import check_live_resize, check_resize_arguments
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh
from torchtitan_lite.training.run_config import parse_command_line


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    mesh, arguments = RunMesh.from_text(argv[0]), argv[2:]

    def check() -> None:
        check_resize_arguments(mesh.arguments)
        config, _ = parse_command_line(arguments)
        resized, _ = checked_config([*arguments, *mesh.arguments], mesh.num_ranks)
        check_live_resize(config, resized, is_joint=True)

    print_refusal(check)
    return 0


def print_refusal(check: Callable[[], None]) -> None:
    """Print the text of the ConfigError that `check` raises, for `resize.refusal_in`."""
    refusal = ""
    try:
        check()
    except ConfigError as error:
        refusal = str(error)
    print(json.dumps({"refusal": refusal}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
