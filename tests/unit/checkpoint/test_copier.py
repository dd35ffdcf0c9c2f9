"""Page-locking of snapshot memory. CUDA's runtime is a stand-in with its rules: memory is
registered once, and addresses stay registered until they are unregistered."""

import mmap
from collections.abc import Callable

import pytest
import torch

from tests.unit.checkpoint.conftest import SmallState, same
from tests.unit.conftest import RecordedStreams
from torchtitan_lite.checkpoint import copier as module
from torchtitan_lite.checkpoint.copier import Copier
from torchtitan_lite.checkpoint.save_plan import plan_save
from torchtitan_lite.distributed.mesh import Mesh

_ALREADY_REGISTERED, _NOT_REGISTERED, _OUT_OF_MEMORY = 712, 713, 2


class _Runtime:
    def __init__(self, max_slots: int = 100) -> None:
        self.registered: set[int] = set()
        self.has_error = False
        self._max_slots = max_slots

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        if address in self.registered:
            return self._error(_ALREADY_REGISTERED)
        if len(self.registered) == self._max_slots:
            return self._error(_OUT_OF_MEMORY)
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.registered:
            return self._error(_NOT_REGISTERED)
        self.registered.remove(address)
        return 0

    def clear_error(self) -> None:
        self.has_error = False

    def _error(self, code: int) -> int:
        self.has_error = True
        return code


def _on_gpu(runtime: _Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_runtime", lambda: runtime)
    monkeypatch.setattr(module, "clear_cuda_error", lambda: runtime.clear_error())


def _snapshot(slots: list[memoryview], mesh: Mesh) -> Copier:
    """Copy a state into the second slot, and check it."""
    state = SmallState()
    copier = Copier(plan_save(state.tensors(), mesh), slots, torch.device("cuda", 0))
    copier.start(1, state.tensors(), lambda: None)
    copier.wait()
    assert same(copier._targets[1], state.tensors())
    return copier


def _slots(mesh: Mesh) -> list[memoryview]:
    length = plan_save(SmallState().tensors(), mesh).slot_bytes
    return [memoryview(mmap.mmap(-1, length)) for _ in range(3)]


def test_memory_is_unlocked_at_the_end_and_can_be_locked_again(
    mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
    streams: RecordedStreams,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime, slots = _Runtime(), _slots(mesh)
    _on_gpu(runtime, monkeypatch)
    copier = None
    for _ in range(2):
        copier = _snapshot(slots, mesh)
        assert len(runtime.registered) == 3
        copier.close()
        assert not runtime.registered
    # It has nothing left to unlock.
    assert copier is not None
    with monkeypatch.context() as kept:
        kept.setattr(runtime, "clear_error", lambda: None)
        copier.close()
    assert not runtime.has_error and not caplog.records


def test_snapshots_work_without_locked_memory(
    mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
    streams: RecordedStreams,
    logged: pytest.LogCaptureFixture,
) -> None:
    runtime = _Runtime(max_slots=1)
    _on_gpu(runtime, monkeypatch)
    copier = _snapshot(_slots(mesh), mesh)
    assert not runtime.registered
    (record,) = logged.records
    assert "cannot be page-locked (CUDA error 2)" in record.getMessage()
    # torch would raise it at the next kernel launch.
    assert not runtime.has_error
    copier.close()


def test_an_error_of_unlocking_is_cleared(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, streams: RecordedStreams
) -> None:
    runtime = _Runtime()
    _on_gpu(runtime, monkeypatch)
    copier = _snapshot(_slots(mesh), mesh)
    runtime.registered.clear()
    copier.close()
    assert not runtime.has_error


def test_a_copy_follows_the_computation_and_is_complete_before_it_is_reported(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, streams: RecordedStreams
) -> None:
    _on_gpu(_Runtime(), monkeypatch)
    monkeypatch.setattr(
        module,
        "foreach_copy_",
        lambda outs, given, non_blocking: streams.log.append(f"copy on {streams.current().name}"),
    )
    state = SmallState()
    copier = Copier(plan_save(state.tensors(), mesh), _slots(mesh), torch.device("cuda", 0))
    copier.start(0, state.tensors(), lambda: streams.log.append("reported"))
    copier.close()
    assert streams.log == [
        "side waits for main",
        "copy on side",
        "host waits for side",
        "reported",
    ]


@pytest.mark.parametrize("end", [Copier.wait, Copier.close])
def test_an_error_of_a_copy_is_raised_once(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, end: Callable[[Copier], None]
) -> None:
    monkeypatch.setattr(module, "has_free_core", lambda: True)
    state = SmallState()
    copier = Copier(plan_save(state.tensors(), mesh), _slots(mesh), torch.device("cpu"))

    def fail() -> None:
        raise OSError("the region is lost")

    copier.start(0, state.tensors(), fail)
    with pytest.raises(OSError, match="the region is lost"):
        end(copier)
    copier.wait()
    copier.close()


def test_tensors_of_another_plan_are_rejected(mesh: Mesh) -> None:
    state, slots = SmallState(), _slots(mesh)
    copier = Copier(plan_save(state.tensors(), mesh), slots, torch.device("cpu"))
    fewer = {name: one for name, one in state.tensors().items() if name != "model.wide"}
    for given, problem in (
        (fewer, "they lack model.wide, and have none beside it"),
        (state.tensors() | {"x": torch.ones(1)}, "they lack none, and have x beside it"),
    ):
        with pytest.raises(ValueError, match=problem):
            copier.start(0, given, lambda: None)
    copier.start(0, state.tensors(), lambda: None)
    copier.close()
    assert same(copier._targets[0], state.tensors())


def test_chunks_are_of_a_minimum_size_and_cover_all_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 8)
    tensors = [torch.zeros(number, dtype=torch.uint8) for number in (3, 5, 1, 9, 2, 2)]
    assert module._chunks(tensors) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert module._chunks([]) == []


@pytest.mark.parametrize(("num_cores", "is_free"), [(2, False), (3, True)])
def test_a_core_is_free_beside_the_threads_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, is_free: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    assert module.has_free_core() is is_free
