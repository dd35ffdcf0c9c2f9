"""Make a torch DCP checkpoint with torchtitan's names from one of ours.

python -m scripts.convert_to_dcp CHECKPOINT OUT_DIR [--torchtitan 0.3]

CHECKPOINT is a step's folder (".../step-1000"), which says itself of which model it is.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import nn

from torchtitan_lite.checkpoint.foreign import refuse_foreign
from torchtitan_lite.checkpoint.interchange.keys import RELEASES
from torchtitan_lite.checkpoint.interchange.to_dcp import convert_to_dcp
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.storage import split_storage
from torchtitan_lite.config import Config, recorded_config
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import UserError
from torchtitan_lite.log import configure_logging, logger
from torchtitan_lite.models import model_spec
from torchtitan_lite.optim import WarmupStableDecay, build_optimizer, build_schedule


def main(argv: list[str]) -> int:
    """Entry of the command. Returns the exit status."""
    configure_logging()
    options = _parser().parse_args(argv)
    try:
        storage, name = split_storage(options.checkpoint)
        refuse_foreign(storage, name)
        source = StoredSnapshot(storage, name)
        config = recorded_config(source.manifest.config, source.where)
        number = convert_to_dcp(
            source,
            options.out_dir,
            model_spec(config.model),
            release=options.torchtitan,
            param_group=_param_group(source, config),
        )
    except (UserError, OSError) as error:
        logger.error("%s", error)
        return 1
    print(f"{options.out_dir}: {number} tensors, as torchtitan {options.torchtitan} names them.")
    return 0


def _param_group(source: StoredSnapshot, config: Config) -> dict[str, Any]:
    """What torch's optimizer keeps of every parameter, with the learning rate of the next step.
    torchtitan has one weight decay for all."""
    optimizer = build_optimizer(
        config.optimizer, nn.Linear(1, 1, bias=False), (), detect_device("cpu")
    )
    (group,) = optimizer.inner.param_groups
    saved = source.saved.values.get("lr_scheduler")
    schedule = (
        WarmupStableDecay(**saved)
        if saved
        else build_schedule(config.lr_scheduler, config.optimizer, config.training.steps)
    )
    settings = {option: value for option, value in group.items() if option != "params"}
    lr = schedule.lr(source.saved.step)
    return settings | {"lr": lr, "initial_lr": schedule.peak_lr}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_to_dcp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help='a step\'s folder, such as ".../step-1000"')
    parser.add_argument("out_dir", type=Path, help="a folder that holds no checkpoint yet")
    parser.add_argument(
        "--torchtitan",
        choices=RELEASES,
        default=RELEASES[-1],
        help="whose names to use (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
