"""The Python API: what a script needs to train, and to extend a run. Documented in
docs/python_api.md. Layer: the top."""

from torchtitan_lite.builders import Built, build
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.config.constraints import check_against
from torchtitan_lite.data.online import OnlineDataset, OnlineSample
from torchtitan_lite.device import detect_device
from torchtitan_lite.hooks import HookContext
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.metrics import Event, SinkContext, StepRecord
from torchtitan_lite.preemption import StopRequest, stop_on_signals
from torchtitan_lite.registry import (
    register_dataset,
    register_hook,
    register_loss,
    register_metrics_sink,
    register_model,
    register_online_dataset,
)
from torchtitan_lite.spec import Microbatch, TokenLoss
from torchtitan_lite.train_state import TrainState
from torchtitan_lite.trainer import StepReport, train

__all__ = [
    "Built",
    "Config",
    "Event",
    "HookContext",
    "Mesh",
    "Microbatch",
    "OnlineDataset",
    "OnlineSample",
    "SinkContext",
    "StepRecord",
    "StepReport",
    "StopRequest",
    "TokenLoss",
    "TrainState",
    "build",
    "check_against",
    "detect_device",
    "load_config",
    "register_dataset",
    "register_hook",
    "register_loss",
    "register_metrics_sink",
    "register_model",
    "register_online_dataset",
    "start_mesh",
    "stop_on_signals",
    "train",
]
