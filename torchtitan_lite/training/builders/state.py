"""Build the training state and its checkpoint manager, and restore the newest state."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from torchtitan_lite.checkpoint import CheckpointManager, FrozenBase, load_base, to_record
from torchtitan_lite.checkpoint.convert.hugging_face import save_assets
from torchtitan_lite.config import Config
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.supervised import announce
from torchtitan_lite.data import OpenedData
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.models import model_spec, recorded_dims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.optim import build_lr_scheduler, build_optimizer
from torchtitan_lite.training.train_state import TrainState, frozen_tensors

if TYPE_CHECKING:
    from torchtitan_lite.fault_tolerance.replica.semi_synchronous import Averaging


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """The training state, and where it comes from."""

    state: TrainState
    checkpoints: CheckpointManager
    averaging: "Averaging | None"
    """Averaging of semi-synchronous replicas."""
    restored_from: str | None
    """Location of the loaded checkpoint or snapshot; None for new weights."""

    @property
    def is_resumed(self) -> bool:
        """Whether the state is an earlier one of this run."""
        return self.restored_from is not None and not self.checkpoints.has_initial_load


def build_state(
    config: Config,
    spec: ModelSpec,
    model: nn.Module,
    data: OpenedData,
    mesh: Mesh,
    *,
    leases: Sequence[str] = (),
) -> RestoredState:
    """Build the state around this rank's `model`, and restore the newest one; saves require the
    `leases` of this process. Every rank must call it; the caller closes `checkpoints`. Raises as
    `CheckpointManager.restore` does."""
    checkpoint = config.checkpoint
    base = None
    if config.model.uses_lora:
        announce("loading frozen weights")
        base = _load_base(config, spec, model, mesh)
        # The rest of the state has another origin.
        checkpoint = checkpoint.model_copy(update={"initial_load_path": None})
    state = TrainState(
        model=model,
        optimizer=build_optimizer(
            config.optimizer, model, spec.no_decay, mesh.device, no_muon=spec.muon_exclusions
        ),
        lr_scheduler=build_lr_scheduler(
            config.lr_scheduler, config.optimizer, config.training.steps
        ),
        loader=data.loader,
        base=base,
    )
    fault_tolerance = config.fault_tolerance
    averaging = None
    if fault_tolerance.enable and fault_tolerance.semi_sync_method:
        # Imported here because importing torchft takes a second.
        from torchtitan_lite.fault_tolerance.replica.semi_synchronous import Averaging

        averaging = Averaging(fault_tolerance, model)
        state.outer = averaging
    checkpoints = CheckpointManager(
        checkpoint,
        dump_folder=Path(config.job.dump_folder),
        state=state,
        mesh=mesh,
        run_config=to_record(config),
        spec=spec,
        replica=fault_tolerance.replica,
        leases=leases,
        last_step=config.training.steps,
    )
    try:
        if config.checkpoint.enable and mesh.is_leader:
            save_assets(data.tokenizer_files.folder, checkpoints.root)
        announce("restoring")
        restored_from = checkpoints.restore()
        if averaging is not None and state.step == 0:
            # They may be pretrained.
            averaging.capture_initial_weights()
    except BaseException:
        checkpoints.close()
        raise
    return RestoredState(
        state=state, checkpoints=checkpoints, averaging=averaging, restored_from=restored_from
    )


def _load_base(config: Config, spec: ModelSpec, model: nn.Module, mesh: Mesh) -> FrozenBase:
    """Load the frozen weights under the adapters of this rank's `model`. Every rank must call
    it."""
    path, base = config.checkpoint.initial_load_path, model_spec(config.model)
    assert path is not None
    loaded = load_base(
        path,
        frozen_tensors(model),
        base,
        mesh,
        dims=recorded_dims(config.model),
        scale=config.lora.scale,
    )
    num_params, num_frozen = (
        either.cost(config.training.seq_len).num_params for either in (spec, base)
    )
    logger.info(
        "Adapters have %s of %s parameters.", f"{num_params - num_frozen:,}", f"{num_params:,}"
    )
    return loaded
