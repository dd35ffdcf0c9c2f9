"""The weights of every architecture reach a model of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.hugging_face import family_rows, make_folder, make_model, our_model
from tests.unit.serving.publish.conftest import Publish
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config
from torchtitan_lite.serving.publish import Subscriber, hugging_face_targets
from torchtitan_lite.serving.publish.publisher import describe_model, published_tensors

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


@pytest.mark.parametrize("family", family_rows())
def test_a_model_of_transformers_receives_every_weight(
    family: str, publish: Publish, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "hf", family)
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    ours = our_model(folder)
    publisher = publish(published_tensors(ours), describe_model(spec, {}))
    theirs: Any = make_model(family)
    expected = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    for tensor in theirs.state_dict().values():
        tensor.zero_()
    with Subscriber(str(tmp_path)) as subscriber:
        targets = hugging_face_targets(subscriber, theirs.state_dict())
        subscription = subscriber.subscribe(targets)
        assert publisher.publish(1, published_tensors(ours))
        assert subscription.update(timeout_s=60) is not None
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
