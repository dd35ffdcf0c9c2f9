"""Weight transfer engine for vLLM: its workers subscribe to a run that publishes its weights.

vLLM finds it as a plugin (`torchtitan_lite.serving.vllm_plugin`). Each worker receives the weights
under their names in transformers, and loads its part of them as from a checkpoint. Interface:
vllm.distributed.weight_transfer.base.WeightTransferEngine of vLLM 0.32.

Invariant: the model changes only after a version has been received completely; an error before
leaves it as it was. After an error of vLLM's loader, the next update loads all weights again.
"""

# pyright: reportMissingImports=false

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.serving.publish.hugging_face import empty_state_dict, hugging_face_targets
from torchtitan_lite.serving.publish.subscriber import Subscriber, Subscription

# vLLM configures the output of its own loggers only.
_logger = logging.getLogger("vllm.torchtitan_lite")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Arguments of `init_weight_transfer_engine`."""

    source: str
    """Output folder of the run, or the URL of its first rank, for which the environment variable
    TORCHTITAN_LITE_TOKEN is the secret."""
    timeout_s: float = 60.0
    """Time to wait for the run to start."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of `update_weights`."""

    timeout_s: float = 0.0
    """Time to wait for a version that is newer than the one in use. Without one, the weights
    stay."""


class PublishedWeightsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the newest version when vLLM asks for an update, the same one on all workers of
    vLLM's world, which must update together. Each worker holds all weights in host memory, as they
    are published."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _subscription: Subscription | None = None
    _weights: dict[str, torch.Tensor]
    version: int | None = None
    """The version in use; None before the first update."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the run. Raises PublishError."""
        self.shutdown()
        secret = os.environ.get(TOKEN, "")
        subscriber = Subscriber(init_info.source, secret=secret, timeout_s=init_info.timeout_s)
        try:
            self._weights = empty_state_dict(subscriber)
            targets = hugging_face_targets(subscriber, self._weights)
            self._subscription = subscriber.subscribe(targets)
        except BaseException:
            subscriber.close()
            raise

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` prepares the model once it has a version."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Update the weights. The base class waits for an accelerator, and so raises on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the newest version, and load it into the model. Raises PublishError, and the
        errors of vLLM's loader, after which the model is incomplete."""
        if self._subscription is None:
            raise PublishError("Call init_weight_transfer_engine before update_weights.")
        update = self._subscription.update(timeout_s=update_info.timeout_s, agree=_smallest)
        if update is not None:
            _logger.info(
                "Weights of version %d: received %.1f MiB in %.3f s.",
                update.version,
                update.num_bytes_received / 2**20,
                update.seconds,
            )
        elif self._subscription.version in (None, self.version):
            _logger.info("No version of the weights is newer than %s.", self.version)
            return
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(self._weights.items())
        finally:
            # Without it, the next update would count what this one has loaded.
            finalize_layerwise_reload(self.model, self.model_config)
        self.version = self._subscription.version

    def shutdown(self) -> None:
        """Close the connection, and free the weights in host memory."""
        if self._subscription is not None:
            self._subscription.subscriber.close()
        self._subscription, self._weights, self.version = None, {}, None


def _smallest(value: int) -> int:
    """Return the smallest value of all workers."""
    group = get_world_group()
    if group.world_size == 1:
        return value
    smallest = torch.tensor(value, device="cpu")
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group.cpu_group)
    return int(smallest)
