"""`torchtitan-lite convert from-dcp` and `to-dcp`. Layer: below cli."""

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtitan_lite.checkpoint.foreign import refuse_foreign
from torchtitan_lite.checkpoint.interchange.dcp_folder import DcpFolder
from torchtitan_lite.checkpoint.interchange.from_dcp import convert_from_dcp
from torchtitan_lite.checkpoint.interchange.to_dcp import convert_to_dcp
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.storage import open_storage, split_storage
from torchtitan_lite.config import Config, parse_command_line, recorded_config
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import UserError
from torchtitan_lite.log import configure_logging, logger
from torchtitan_lite.models import model_spec
from torchtitan_lite.optim import WarmupStableDecay, build_optimizer, build_schedule


def from_dcp(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Make a checkpoint from a torch DCP checkpoint, of the model that the configuration in
    `others` names. Returns the exit status."""
    configure_logging()
    try:
        config, _ = parse_command_line(others)
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


def to_dcp(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Make a torch DCP checkpoint with torchtitan's names. Returns the exit status."""
    configure_logging()
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
