"""The Python API: what a script or a notebook needs to train, to extend a run, and to use what it
has trained. Documented in docs/python_api.md."""

from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.preemption import StopRequest, stop_on_signals
from torchtitan_lite.core.registry import (
    register_dataset,
    register_hook,
    register_loss,
    register_metrics_sink,
    register_model,
    register_online_dataset,
    register_optimizer,
    register_storage,
)
from torchtitan_lite.data.online import OnlineDataset, OnlineSample
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh
from torchtitan_lite.nn.spec import Microbatch, TokenLoss
from torchtitan_lite.serving.inference import (
    GeneratedText,
    LoadedModel,
    SavedTensor,
    generate,
    load_model,
    saved_tensors,
)
from torchtitan_lite.training.builders import Built, build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.hooks import HookContext
from torchtitan_lite.training.metrics import Event, SinkContext, StepRecord
from torchtitan_lite.training.run_config import load_config
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

__all__ = [
    "Built",
    "Config",
    "Event",
    "GeneratedText",
    "HookContext",
    "LoadedModel",
    "Mesh",
    "Microbatch",
    "OnlineDataset",
    "OnlineSample",
    "ParallelismConfig",
    "SavedTensor",
    "SinkContext",
    "StepRecord",
    "StepReport",
    "StopRequest",
    "TokenLoss",
    "TrainState",
    "build",
    "check_against",
    "detect_device",
    "generate",
    "load_config",
    "load_model",
    "register_dataset",
    "register_hook",
    "register_loss",
    "register_metrics_sink",
    "register_model",
    "register_online_dataset",
    "register_optimizer",
    "register_storage",
    "saved_tensors",
    "start_mesh",
    "stop_on_signals",
    "train",
]
