"""Train a language model: `torchrun --nproc-per-node N train.py --config FILE`.

`python train.py --config FILE` runs one process; `--help` lists every key.
"""

from torchtitan_lite.launcher.supervised import obey_launcher

if __name__ == "__main__":
    # First of all: the imports take a second, in which the launcher may die.
    obey_launcher()

import os
import sys

from torchtitan_lite.config import (
    check_against,
    differing_defaults,
    is_torchtitan_file,
    parse_command_line,
    read_toml,
)
from torchtitan_lite.errors import UserError
from torchtitan_lite.leaving import leave
from torchtitan_lite.log import configure_logging, logger, tell_once


def main(argv: list[str]) -> int:
    """Run the job that the command line asks for. Returns the exit status."""
    configure_logging()
    try:
        config, file = parse_command_line(argv)
        check_against(config, int(os.environ.get("WORLD_SIZE", "1")))
        if is_torchtitan_file(read_toml(file)):
            # Rank 0 alone logs at this level.
            for line in differing_defaults(config):
                logger.info("%s", line)
    except UserError as error:
        tell_once(error)
        return error.exit_status
    try:
        # Imported once the config is known to be right, so that a typo is told of at once.
        from torchtitan_lite.build import build
        from torchtitan_lite.device import detect_device
        from torchtitan_lite.last_export import export_last_save
        from torchtitan_lite.mesh import start_mesh
        from torchtitan_lite.preemption import StopRequest, stop_on_signals
        from torchtitan_lite.summary import last_words, say_goodbye
        from torchtitan_lite.trainer import train

        device = detect_device(config.job.device)
        stop = StopRequest()
        with (
            start_mesh(config.parallelism, config.comm, device, config.job.dump_folder) as mesh,
            build(config, mesh, stop) as built,
            stop_on_signals(stop),
        ):
            with last_words(built):
                finished = train(built.job)
            say_goodbye(built, config, argv, finished=finished)
        if finished and config.checkpoint.last_save_in_hf and mesh.is_leader:
            # The other ranks have left: they would wait too long.
            folder = built.data.tokenizer_files.folder
            export_last_save(config, built.job.checkpoints.root, folder)
    except UserError as error:
        logger.error("%s", error)
        return error.exit_status
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
