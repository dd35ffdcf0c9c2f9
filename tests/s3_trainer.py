"""A trainer that saves to an object store after each step until it is killed.

`python -m tests.s3_trainer DUMP_FOLDER ROOT`
"""

import sys
import time
from pathlib import Path

import torch

from tests.unit.checkpoint.conftest import SmallState
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.schema.checkpoint import CheckpointConfig
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig

CPU = torch.device("cpu")


def manager_of(dump_folder: Path, root: str, state: SmallState, mesh: Mesh) -> CheckpointManager:
    """Of a run whose checkpoints lie at `root`."""
    config = CheckpointConfig(enable=True, interval=1, folder=root, ram_interval=0)
    return CheckpointManager(config, dump_folder=dump_folder, state=state, mesh=mesh, run_config={})


def take_step(manager: CheckpointManager, state: SmallState) -> None:
    """As the trainer does."""
    manager.apply_signals(manager.local_signals(CPU).cpu())
    state.take_step()
    manager.after_step()


def main(dump_folder: Path, root: str) -> None:
    """Steps without end."""
    state = SmallState()
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        manager = manager_of(dump_folder, root, state, mesh)
        while True:
            take_step(manager, state)
            time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
