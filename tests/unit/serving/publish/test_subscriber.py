"""Processes of a subscriber that fail, or hold different versions."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.tensor import Replicate

from tests.unit.serving.publish.conftest import Publish
from torchtitan_lite.core.errors import LayoutError, PublishError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, TensorSpec
from torchtitan_lite.serving.publish import Target, publisher
from torchtitan_lite.serving.publish.subscriber import _FAILED, _reads_of, _together
from torchtitan_lite.training.builders import hooks
from torchtitan_lite.training.builders.run_context import RunContext


def test_a_failure_reaches_the_other_processes() -> None:
    told: list[int] = []

    def agree(own: int) -> int:
        told.append(own)
        return own

    def fail() -> int:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        _together(agree, fail)
    assert told == [_FAILED]
    assert _together(agree, lambda: 7) == 7
    with pytest.raises(PublishError, match="Another process of the subscriber failed"):
        _together(lambda own: _FAILED, lambda: 7)


@pytest.mark.parametrize("at_start", [False, True])
def test_the_first_version_is_published_at_the_start(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    steps: list[int] = []

    class Recorded:
        def __init__(self, *given: object, **named: object) -> None: ...

        def publish(self, step: int, tensors: object) -> None:
            steps.append(step)

        def after_step(self, step: int, tensors: object) -> None:
            steps.append(step)

        def close(self) -> None: ...

    monkeypatch.setattr(publisher, "Publisher", Recorded)
    for module, name in (
        (publisher, "published_tensors"),
        (publisher, "describe_model"),
        (hooks, "recorded_dims"),
    ):
        monkeypatch.setattr(module, name, lambda *given: None)
    config: Any = SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(tmp_path)),
        fault_tolerance=SimpleNamespace(enable=False, replica=None),
        publish=SimpleNamespace(at_start=at_start),
        model=None,
    )
    state: Any = SimpleNamespace(step=4, model=None)
    unused: Any = None
    with ExitStack() as stack:
        hook: Any = hooks._publish_hook(
            RunContext(
                config=config,
                identity=unused,
                spec=unused,
                mesh=mesh,
                folder=tmp_path,
                faults=unused,
                phases=unused,
                stack=stack,
            ),
            state,
        )
        assert steps == ([4] if at_start else [])
        for committed in (False, True):
            hook(state, SimpleNamespace(committed=committed))
    assert steps == [4] * (1 + at_start)


def test_versions_have_their_interval_and_the_checksums_of_their_tensors(
    publish: Publish, port: int
) -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.arange(3)}
    publisher = publish(tensors, address="127.0.0.1", port=port, every_steps=2)
    assert [publisher.after_step(step, tensors) for step in (1, 2, 3)] == [False, True, False]
    publisher._finish_last()
    ((step, slot),) = publisher._region.complete_slots().items()
    assert step == 2 and publisher._region.values(slot)["digests"] == {
        name: xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("row", [-1, 0, 2, 3])
def test_a_target_is_one_of_the_elements(row: int) -> None:
    spec = TensorSpec(Layout(HolderMesh.ranks(1), [Replicate()]), (3, 4), torch.float32)
    target = Target("experts", torch.zeros(4), row=row)
    if 0 <= row < 3:
        (read,) = _reads_of(target, spec, 0)
        assert read.source[0] == slice(row, row + 1)
    else:
        with pytest.raises(LayoutError, match=f"experts has 3 elements and no {row}"):
            _reads_of(target, spec, 0)
