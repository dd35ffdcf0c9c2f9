"""Subscribers hold one version, and never a mix, whichever side is killed at whatever time; a
publisher never waits for a dead or slow subscriber."""

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, Shard

from benchmarks.processes import free_port
from tests.harness import launch
from tests.harness.ranks import FORK_SERVER
from tests.unit.serving.publish.conftest import received
from torchtitan_lite.checkpoint import RunIdentity
from torchtitan_lite.checkpoint.shared_memory.folder import (
    SHARED_MEMORY,
    shared_memory_folder,
    slot_lock_path,
)
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.publish import PublishConfig
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.serving.publish import Subscriber, Subscription, Target, Update
from torchtitan_lite.serving.publish.publisher import Publisher
from torchtitan_lite.serving.publish.sources import PinnedPart

SECRET = "0123456789abcdef0123456789abcdef"
RUN_ID = "0123456789abcdef" * 2
_RANKS = 2
_SHAPES = {"a": (2 * _RANKS, 3), "b": (128 * _RANKS, 1024), "c": (128 * _RANKS, 1024)}
_NUM_PARTS = 8
"""Parts of "c" on each rank. A version changes one: servers send it as a delta."""

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


_NUM_STARTS = 8
"""Starts of the publisher that values distinguish."""


def _publish(
    folder: Path,
    rank: int,
    store: str,
    first: int,
    port: int,
    start: int,
    changing: Collection[str],
) -> None:
    """Publish versions from `first` on: all numbers of the tensors `changing` are those of version
    and start, of "c" those of a part. Serve them if `port` is not 0."""
    dist.init_process_group("gloo", store=FileStore(store, _RANKS), rank=rank, world_size=_RANKS)
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        axis = mesh.device_mesh["dp_shard"]
        local = {
            name: torch.zeros(rows // _RANKS, columns) for name, (rows, columns) in _SHAPES.items()
        }
        tensors = {
            name: DTensor.from_local(tensor, axis, [Shard(0)]) for name, tensor in local.items()
        }
        publisher = Publisher(
            PublishConfig(
                enable=True,
                address="127.0.0.1" if port else None,
                port=port,
                deltas=port > 0,
            ),
            tensors,
            mesh,
            identity=RunIdentity(RUN_ID, generation_id=str(start)),
            folder=folder,
            model={},
            secret=SECRET,
        )
        for version in range(first, 1 << 40):
            for name in changing:
                part = local["c"].chunk(_NUM_PARTS)[version % _NUM_PARTS]
                changed = part if name == "c" else local[name]
                changed.fill_(version * _NUM_STARTS + start % _NUM_STARTS)
            publisher.after_step(version, tensors)
            # As a step of training would, leave the processor to others.
            time.sleep(0.003)


@contextmanager
def _publishing(
    folder: Path,
    first: int,
    port: int,
    start: int = 0,
    changing: Collection[str] = tuple(_SHAPES),
) -> Iterator[list[BaseProcess]]:
    store = str(folder / f"store-{time.monotonic_ns()}")
    processes = [
        FORK_SERVER.Process(
            target=_publish, args=(folder, rank, store, first, port, start, changing)
        )
        for rank in range(_RANKS)
    ]
    for process in processes:
        process.start()
    try:
        yield list(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(params=["memory", "server"])
def port(request: pytest.FixtureRequest) -> int:
    """The port of the first rank's server; 0 for shared memory."""
    return 0 if request.param == "memory" else free_port()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The output folder of a run whose shared memory is freed at the end."""
    yield tmp_path
    shared = shared_memory_folder(RUN_ID)
    for path in shared.iterdir():
        path.unlink()
    shared.rmdir()


def _source(folder: Path, port: int) -> str:
    return f"http://127.0.0.1:{port}" if port else str(folder)


def _subscribe(folder: Path, port: int) -> tuple[Subscription, dict[str, torch.Tensor]]:
    tensors = {name: torch.zeros(shape) for name, shape in _SHAPES.items()}
    subscriber = Subscriber(_source(folder, port), secret=SECRET, timeout_s=60)
    return subscriber.subscribe(Target(name, one) for name, one in tensors.items()), tensors


def _version_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the version that the tensors hold; they must hold one."""
    values = {float(value) for name in ("a", "b") for value in tensors[name].unique()}
    assert len(values) == 1, f"a mix of versions: {sorted(values)}"
    newest = int(values.pop())
    version = newest // _NUM_STARTS
    # The last versions changed one part of "c" each; those before the start none.
    parts = tensors["c"].unflatten(0, (_RANKS, _NUM_PARTS, -1))
    found = []
    for before in range(min(_NUM_PARTS, version)):
        (value,) = parts[:, (version - before) % _NUM_PARTS].unique().tolist()
        found.append(value)
    count = found.index(0) if 0 in found else len(found)
    assert count > 0 and not any(found[count:]), f"a mix of versions: {found}"
    assert found[:count] == [newest - before * _NUM_STARTS for before in range(count)]
    return version


def _receive(folder: str, port: int) -> None:
    """Receive and check versions until this process is killed."""
    subscription, tensors = _subscribe(Path(folder), port)
    while True:
        if (update := subscription.update(timeout_s=60)) is not None:
            assert _version_of(tensors) == update.version


@pytest.mark.parametrize("num_kills", [3, pytest.param(100, marks=pytest.mark.matrix)])
@pytest.mark.timeout(900)
def test_a_killed_publisher_leaves_whole_versions(num_kills: int, port: int, folder: Path) -> None:
    draws = random.Random(num_kills)
    version, num_updates, num_bytes_saved = 0, 0, 0
    subscription, tensors = None, {}

    def receive(seconds: float) -> None:
        nonlocal version, num_updates, num_bytes_saved
        assert subscription is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (update := subscription.update()) is not None:
                assert _version_of(tensors) == update.version > version
                version, num_updates = update.version, num_updates + 1
                num_bytes_saved += update.num_bytes - update.num_bytes_received

    for number in range(num_kills):
        # A run that resumes publishes the numbers of lost steps again, with other values.
        first = max(1, version - draws.randrange(8))
        with _publishing(folder, first, port, number) as processes:
            if subscription is None:
                subscription, tensors = _subscribe(folder, port)
            before = num_updates
            deadline = time.monotonic() + 60
            # The network must save bytes once, whatever the order of the processes.
            must_save = bool(port) and number == num_kills - 1
            while num_updates == before or (must_save and not num_bytes_saved):
                assert time.monotonic() < deadline and all(one.is_alive() for one in processes)
                receive(0.01)
            receive(draws.random() * 0.1)
            os.kill(processes[draws.randrange(_RANKS)].pid or 0, signal.SIGKILL)
            receive(0.02)
        receive(0.01)
    assert subscription is not None and num_updates > num_kills
    assert bool(num_bytes_saved) == bool(port)
    subscription.subscriber.close()


@pytest.mark.parametrize("num_kills", [3, pytest.param(100, marks=pytest.mark.matrix)])
@pytest.mark.timeout(900)
def test_killed_and_stuck_subscribers_do_not_stop_the_publisher(
    num_kills: int, port: int, folder: Path
) -> None:
    draws = random.Random(num_kills)
    with _publishing(folder, 1, port) as processes:
        own, tensors = _subscribe(folder, port)

        def advance(by: int) -> None:
            first = own.version or 0
            deadline = time.monotonic() + 60
            while (own.version or 0) < first + by:
                assert time.monotonic() < deadline and all(one.is_alive() for one in processes)
                if own.update(timeout_s=1) is not None:
                    assert _version_of(tensors) == own.version

        advance(3)
        for number in range(num_kills):
            victim = FORK_SERVER.Process(target=_receive, args=(str(folder), port))
            victim.start()
            time.sleep(0.2 + draws.random() * 0.1)
            assert victim.is_alive()
            # Every third one is suspended for a while, perhaps while it holds a version.
            if number % 3 == 0:
                os.kill(victim.pid or 0, signal.SIGSTOP)
                advance(3)
            victim.kill()
            victim.join()
            assert victim.exitcode == -signal.SIGKILL
            advance(2)
        own.subscriber.close()


def test_a_publisher_skips_versions_while_all_slots_are_read(folder: Path) -> None:
    with _publishing(folder, 1, 0):
        own, _ = _subscribe(folder, 0)
        subscriber = own.subscriber
        (first, second) = subscriber.publication.ranks
        pins: dict[int, list[PinnedPart]] = {}
        deadline = time.monotonic() + 60
        # Of three slots two: the publisher never overwrites its newest version.
        while len(pins) < 2:
            assert time.monotonic() < deadline
            newest = subscriber.newest()
            if newest is None or newest in pins:
                continue
            with suppress(PublishError):
                one = first.pin(newest)
                try:
                    pins[newest] = [one, second.pin(newest)]
                except PublishError:
                    one.release()
        time.sleep(0.5)
        last = subscriber.newest()
        time.sleep(0.5)
        assert subscriber.newest() == last
        wanted = [("a", (slice(0, 1), slice(0, 1)))]
        held = [received(parts[0], wanted)[0] for parts in pins.values()]
        assert [int(block) // _NUM_STARTS for block in held] == list(pins)
        for part in (part for parts in pins.values() for part in parts):
            part.release()
        launch.wait_until(lambda: (subscriber.newest() or 0) > (last or 0), 30)


def test_strangers_and_wrong_sources_are_rejected(folder: Path) -> None:
    with pytest.raises(PublishError, match="publishes no weights"):
        Subscriber(str(folder), timeout_s=0)
    port = free_port()
    with _publishing(folder, 1, port):
        own, _ = _subscribe(folder, port)
        with pytest.raises(PublishError, match="another TORCHTITAN_LITE_TOKEN"):
            Subscriber(_source(folder, port), secret="f" * 32, timeout_s=0)
        for targets, problem in (
            ([Target("d", torch.zeros(1))], "publishes no tensor 'd'"),
            ([Target("a", torch.zeros(3, 3))], r"has shape \[3, 3\]"),
            ([Target("a", torch.zeros(3), row=9)], "4 elements and no 9"),
        ):
            with pytest.raises(Exception, match=problem):
                own.subscriber.subscribe(targets)
        own.subscriber.close()


def test_only_changed_parts_are_received(port: int, folder: Path) -> None:
    with _publishing(folder, 5, port, changing=["a"]):
        own, tensors = _subscribe(folder, port)
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        first, second = (own.update(timeout_s=60) for _ in range(2))
        assert first is not None and second is not None and second.version > first.version
        assert (first.num_bytes, first.num_bytes_unchanged) == (sum(sizes.values()), 0)
        assert (second.num_bytes, second.num_bytes_unchanged) == (
            sizes["a"],
            sizes["b"] + sizes["c"],
        )
        assert tensors["a"].eq(second.version * _NUM_STARTS).all()
        assert not tensors["b"].any() and not tensors["c"].any()
        own.subscriber.close()


class _Faulty(torch.Tensor):
    """A tensor whose memory cannot be written while it is set so."""

    is_faulty = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and cls.is_faulty:
            raise RuntimeError("out of memory")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_after_a_failed_copy_the_targets_hold_no_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _publishing(folder, 1, 0):
        own, tensors = _subscribe(folder, 0)
        tensors["b"] = tensors["b"].as_subclass(_Faulty)
        targets = [Target(name, one) for name, one in tensors.items()]
        own = own.subscriber.subscribe(targets)
        assert own.update(timeout_s=60) is not None
        monkeypatch.setattr(_Faulty, "is_faulty", True)
        with pytest.raises(RuntimeError, match="out of memory"):
            own.update(timeout_s=60)
        assert own.version is None
        monkeypatch.setattr(_Faulty, "is_faulty", False)
        update = own.update(timeout_s=60)
        assert update is not None and update.num_bytes_unchanged == 0
        assert _version_of(tensors) == update.version
        own.subscriber.close()


class _Processes:
    """Two processes of a subscriber, each a thread; the one that fails is the first."""

    def __init__(self, subscriptions: list[Subscription]) -> None:
        self._subscriptions = subscriptions
        self._barrier = threading.Barrier(len(subscriptions), timeout=20)
        self._numbers = [0] * len(subscriptions)

    def update(self, before: Callable[[], None] = lambda: None) -> list[Future[Update | None]]:
        """Update in all processes; `before` is that of the first."""

        def one(process: int) -> Update | None:
            def agree(number: int) -> int:
                self._numbers[process] = number
                self._barrier.wait()
                smallest = min(self._numbers)
                self._barrier.wait()
                return smallest

            return self._subscriptions[process].update(
                timeout_s=60, agree=agree, before=before if process == 0 else lambda: None
            )

        with ThreadPoolExecutor(len(self._numbers)) as pool:
            return [pool.submit(one, process) for process in range(len(self._numbers))]


@pytest.mark.parametrize("stage", ["newest", "before", "copy"])
def test_an_error_of_one_process_is_raised_in_all(stage: str, folder: Path) -> None:
    with _publishing(folder, 1, 0):
        (first, _), (second, tensors) = (_subscribe(folder, 0) for _ in range(2))
        fails, before = first, lambda: None
        if stage == "newest":
            fails = first.subscriber.subscribe(first.targets)
            fails.subscriber = Subscriber(str(folder))
            fails.subscriber.close()
        elif stage == "before":

            def before() -> None:
                raise OSError("no memory")
        else:
            # All numbers in one place, which torch does not write.
            wrong = Target("a", torch.zeros(1, 1).expand(_SHAPES["a"]))
            fails = first.subscriber.subscribe([wrong])
        failed, other = _Processes([fails, second]).update(before)
        assert type(failed.exception()) in (ValueError, OSError, RuntimeError)
        with pytest.raises(PublishError, match="Another process of the subscriber failed"):
            other.result()
        assert second.version is None
        updates = [one.result() for one in _Processes([first, second]).update()]
        assert updates[0] is not None and updates[1] is not None
        assert updates[0].version == updates[1].version == _version_of(tensors)
        for subscription in (first, second):
            subscription.subscriber.close()


def _publish_with_faults(folder: Path, rank: int, store: str) -> None:
    """Publish 12 versions; the second rank cannot open its locks, and then fails to copy."""
    path = folder / f"log-{rank}"
    logging.getLogger("torchtitan_lite").addHandler(logging.FileHandler(path))
    dist.init_process_group("gloo", store=FileStore(store, _RANKS), rank=rank, world_size=_RANKS)
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        tensors = {"a": DTensor.from_local(torch.ones(2, 3), mesh.device_mesh["dp_shard"])}
        config = PublishConfig(enable=True)
        publisher = Publisher(
            config,
            tensors,
            mesh,
            identity=RunIdentity(RUN_ID, generation_id="0"),
            folder=folder,
            model={},
            secret=SECRET,
        )
        locks = [slot_lock_path(shared_memory_folder(RUN_ID), rank, slot) for slot in range(3)]
        published = []
        for version in range(1, 13):
            if rank == 1 and version in (3, 6):
                for lock in locks:
                    if version == 3:
                        lock.unlink()
                        lock.mkdir()
                    else:
                        lock.rmdir()
            unknown = {"b": torch.ones(1)} if rank == 1 and version == 9 else {}
            published.append(publisher.publish(version, tensors | unknown))
        (folder / f"published-{rank}").write_text(str(published))
        publisher.close()
    dist.destroy_process_group()


def test_an_error_of_one_rank_neither_blocks_nor_ends_training(folder: Path) -> None:
    processes = [
        FORK_SERVER.Process(target=_publish_with_faults, args=(folder, rank, str(folder / "store")))
        for rank in range(_RANKS)
    ]
    shared_memory_folder(RUN_ID)
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
        shared_memory_folder(RUN_ID)
    expected = [not 3 <= version < 6 for version in range(1, 13)]
    assert (folder / "published-0").read_text() == str(expected)
    expected[9 - 1] = False
    assert (folder / "published-1").read_text() == str(expected)
    lines = (folder / "log-0").read_text().splitlines()
    warnings = [line for line in lines if "is not published" in line]
    assert len(warnings) == 2
    assert "Version 3 is not published: rank 1: IsADirectoryError" in warnings[0]
    assert "Version 9 is not published: rank 1: ValueError" in warnings[1]
    assert "they lack none, and have b beside it" in warnings[1]
    assert (folder / "log-1").read_text() == ""
