"""Processes of a subscriber that fail, or hold different versions."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.serving.publish.subscriber import _FAILED, _together
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

    monkeypatch.setattr(hooks, "Publisher", Recorded)
    for name in ("published_tensors", "describe_model", "recorded_dims"):
        monkeypatch.setattr(hooks, name, lambda *given: None)
    config: Any = SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(tmp_path)),
        fault_tolerance=SimpleNamespace(enable=False),
        publish=SimpleNamespace(at_start=at_start),
        model=None,
    )
    state: Any = SimpleNamespace(step=4, model=None)
    unused: Any = None
    with ExitStack() as stack:
        hook: Any = hooks._publish_hook(
            RunContext(
                config=config,
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
