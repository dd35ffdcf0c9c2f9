"""Subscribers of another model than the published one are rejected by the first difference."""

import re
from pathlib import Path

import pytest
import torch

from tests.unit.serving.publish.conftest import Publish
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, HuggingFaceModel
from torchtitan_lite.serving.publish import Subscriber, Target, hugging_face_targets
from torchtitan_lite.serving.publish.hugging_face import (
    HUGGING_FACE,
    hugging_face_config,
    hugging_face_to_json,
)
from torchtitan_lite.serving.publish.subscriber import ModelChanged

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
_MODEL = {
    HUGGING_FACE: hugging_face_to_json(
        HuggingFaceModel(
            config={"model_type": "small"},
            keys=(
                HuggingFaceKey(
                    name="layers.*.w", forms=(HuggingFaceForm(key="model.layers.*.weight"),)
                ),
            ),
            ignored=(),
            differences=lambda config: [],
        )
    )
}


def _layers(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.w": torch.full((2, 3), float(layer)) for layer in range(count)}


def _module(count: int) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.weight": torch.zeros(2, 3) for layer in range(count)}


def test_a_module_of_another_model_is_rejected_by_name(publish: Publish, tmp_path: Path) -> None:
    publisher = publish(_layers(2), _MODEL)
    with Subscriber(str(tmp_path)) as subscriber:
        for module, problem in (
            (_module(1), r"lacks layers\.1\.w, and has nothing beside"),
            (_module(3), r"lacks nothing, and has model\.layers\.2\.weight beside"),
            (_module(1) | {"x": torch.ones(1)}, r"lacks layers\.1\.w, and has x beside"),
        ):
            with pytest.raises(
                PublishError, match=f"publishes another model: the one here {problem}"
            ):
                hugging_face_targets(subscriber, module)
        module = _module(2)
        subscription = subscriber.subscribe(hugging_face_targets(subscriber, module))
        assert publisher.publish(1, _layers(2))
        update = subscription.update(timeout_s=60)
        assert update is not None and update.version == 1
        assert module["model.layers.1.weight"].eq(1).all()
        assert hugging_face_config(subscriber) == {"model_type": "small", "dtype": "float32"}


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        (None, "is unknown to transformers"),
        ({"config": [], "keys": []}, r"without a config\.json"),
        (
            {"config": {}, "keys": [{"name": "a"}]},
            r"its model wrongly: KeyError\('forms'\)",
        ),
    ],
)
def test_invalid_descriptions_are_rejected(
    described: object, problem: str, publish: Publish, tmp_path: Path
) -> None:
    publish(_layers(1), {HUGGING_FACE: described})
    with Subscriber(str(tmp_path)) as subscriber, pytest.raises(PublishError, match=problem):
        hugging_face_targets(subscriber, {})


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"layers.0.w": torch.zeros(2, 4)}, "layers.0.w is torch.float32 [2, 4], and was torch"),
        (_layers(3), "layers.2.w is torch.float32 [2, 3], and was absent"),
        (_layers(1), "layers.1.w is absent, and was torch.float32 [2, 3]"),
        ({"x": torch.zeros(2, 3)}, "layers.0.w is absent, and was torch.float32 [2, 3]"),
        ({"layers.0.w": torch.zeros(2, 3).double()}, "layers.0.w is torch.float64 [2, 3], and"),
    ],
)
def test_a_run_that_restarts_with_another_model_is_rejected(
    tensors: dict[str, torch.Tensor], problem: str, publish: Publish, tmp_path: Path
) -> None:
    first = publish(_layers(2))
    with Subscriber(str(tmp_path)) as subscriber:
        target = torch.zeros(2, 3)
        subscription = subscriber.subscribe([Target("layers.0.w", target)])
        first.close()
        assert subscription.update() is None
        second = publish(tensors)
        assert second.publish(1, tensors)
        with pytest.raises(ModelChanged, match=re.escape(f"its restart: {problem}")):
            subscription.update(timeout_s=10)
        # The same model is found again.
        second.close()
        third = publish(_layers(2))
        assert third.publish(2, _layers(2) | {"layers.0.w": torch.full((2, 3), 7.0)})
        assert subscription.update(timeout_s=60) is not None
        assert target.eq(7).all()
