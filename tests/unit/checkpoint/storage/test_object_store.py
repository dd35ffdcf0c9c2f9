"""An unreliable object store: committed steps are complete, and failures are reported."""

import itertools
import json
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.harness.snapshots import content, read_safetensors
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.attempts import checksum_matches, manifest_bytes
from torchtitan_lite.checkpoint.storage.base import Storage, open_storage
from torchtitan_lite.checkpoint.storage.object_store import ObjectStore
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox
from torchtitan_lite.core.errors import CheckpointError, ConfigError
from torchtitan_lite.core.registry import register_storage


class FlakyFilesystem:
    """A filesystem that fails a share of the operations, before or after their effect."""

    def __init__(self, share: float, seed: int) -> None:
        self._fs = MemoryFileSystem()
        self._share, self._draws = share, random.Random(seed)
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._fs, name)
        if name == "invalidate_cache":
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            draw = self._draws.random()
            if draw < self._share / 2:
                self.failures += 1
                raise ConnectionError("injected before")
            result = real(*args, **kwargs)
            if draw < self._share:
                self.failures += 1
                raise TimeoutError("injected after")
            return result

        return call


class CachingFilesystem:
    """A filesystem that lists from its cache until that is invalidated, as clients of object stores
    do."""

    def __init__(self) -> None:
        self._fs = MemoryFileSystem()
        self._listed: dict[Any, Any] = {}

    def invalidate_cache(self) -> None:
        self._listed.clear()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._fs, name)
        if name not in ("ls", "find", "exists"):
            return real

        def call(path: str, **kwargs: Any) -> Any:
            if (name, path) not in self._listed:
                self._listed[name, path] = real(path, **kwargs)
            return self._listed[name, path]

        return call


class Killed(BaseException):
    """Stands for the end of the process."""


class KillingFilesystem:
    """A filesystem that kills its user at the n-th operation, before or after its effect."""

    def __init__(self, kill_at: int, *, after: bool) -> None:
        self._fs = MemoryFileSystem()
        self._left, self._after = kill_at, after

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._fs, name)
        if name == "invalidate_cache":
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise Killed
            result = real(*args, **kwargs)
            if self._left == 0:
                raise Killed
            return result

        return call


def _save(
    store: ObjectStore, step: int, token: str, world_size: int = 2, seed: int | None = None
) -> None:
    seed = step if seed is None else seed
    for rank in range(world_size):
        data = memoryview(content(rank, seed, 5000))
        file = f"rank-{rank:05d}.safetensors"
        (place,) = store.write(
            step, token, file, [PartBox("model.w", "U8", (1, 5000), 0, 5000)], [data]
        )
        box = {
            "offset": [rank, 0],
            "size": [1, 5000],
            "file": file,
            "bytes": [place.first, place.end],
            "xxh3": place.xxh3,
        }
        entry = {"dtype": "U8", "shape": [world_size, 5000], "layout": 0, "boxes": [box]}
        part = {"rank": rank, "rng": {}, "layouts": [{"shards": 2}], "tensors": {"model.w": entry}}
        attempts.put_part(store, step, token, rank, part)
    announced = attempts.announcements(store, step, token)
    parts = [attempts.read_part(store, announced, rank) for rank in range(world_size)]
    base = {"mesh": {}, "values": {"step": step}, "config": {}, "versions": {}}
    attempts.commit(store, step, token, parts, base)


def _parts(store: Storage, step: int, token: str) -> list[int]:
    """Return the ranks that have announced their parts."""
    return sorted(attempts.announcements(store, step, token).parts)


@pytest.fixture
def root() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.mark.parametrize("seed", range(3))
def test_a_failure_of_one_in_twenty_operations_has_no_effect(root: str, seed: int) -> None:
    flaky = FlakyFilesystem(0.05, seed)
    store = ObjectStore(root, flaky, first_wait_s=1e-4)  # type: ignore[arg-type]
    for step in range(1, 11):
        _save(store, step, "a-0")
        if step > 3:
            store.delete(step - 3)
    assert flaky.failures > 5
    assert store.steps() == [8, 9, 10]
    for step in store.steps():
        assert checksum_matches(bytes(store.read(f"step-{step}/manifest.json")))
        for rank in (0, 1):
            raw = bytes(store.read(f"step-{step}/a-0/rank-{rank:05d}.safetensors"))
            assert read_safetensors(raw)["model.w"][2] == content(rank, step, 5000)
    assert bytes(store.read("step-9/a-0/rank-00001.safetensors", 4096, 4100)) == content(1, 9, 4)


def _manifest(store: ObjectStore, step: int) -> dict[str, Any]:
    return json.loads(bytes(store.read(f"step-{step}/manifest.json")))


def test_a_store_that_never_responds_fails_with_its_name(root: str) -> None:
    store = ObjectStore(root, FlakyFilesystem(1.0, 0), first_wait_s=1e-4)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=rf"{root} failed 8 times, at last with"):
        attempts.put_part(store, 1, "a-0", 0, {})


class ClientErrors:
    """A filesystem whose client raises exceptions other than OSError."""

    def __init__(self, error: Exception) -> None:
        self._error, self.calls = error, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            raise self._error

        return call


@pytest.mark.parametrize(
    "error", [ValueError("no region"), KeyError("ETag"), TypeError("None"), ImportError("no ssl")]
)
def test_client_exceptions_become_os_errors_with_the_operation(root: str, error: Exception) -> None:
    store = ObjectStore(root, ClientErrors(error), first_wait_s=1e-4)  # type: ignore[arg-type]
    named = rf"in {root} failed with {type(error).__name__}: "
    for what, action in {
        "listing": store.steps,
        "reading step-1/x": lambda: store.read("step-1/x"),
        "looking at step-1/x": lambda: store.size("step-1/x"),
        "making": lambda: attempts.put_part(store, 1, "a-0", 0, {}),
        "listing step-1": lambda: attempts.abandon(store, 1, "a-0"),
        "removing step-1/manifest.json": lambda: store.delete(1),
    }.items():
        with pytest.raises(OSError, match=rf"{what}.* {named}"):
            action()


def test_a_step_without_a_manifest_is_not_listed_and_is_removed(root: str) -> None:
    store = ObjectStore(root)
    _save(store, 1, "a-0")
    attempts.put_part(store, 2, "a-0", 0, {"rank": 0})
    attempts.put_part(store, 3, "b-0", 0, {"rank": 0})
    assert store.steps() == [1]
    attempts.recover(store, "b")
    assert _parts(store, 2, "a-0") == []
    assert _parts(store, 3, "b-0") == [0]
    attempts.remove_stale_attempts(store, 4)
    assert _parts(store, 3, "b-0") == []
    assert store.steps() == [1]


def test_objects_of_other_processes_are_seen_in_spite_of_cached_listings(root: str) -> None:
    other, store = ObjectStore(root), ObjectStore(root, CachingFilesystem())  # type: ignore[arg-type]
    for step in (1, 2):
        _save(other, step, "a-0")
        assert store.steps() == list(range(1, step + 1))
    for rank in (0, 1):
        attempts.put_part(other, 3, "a-0", rank, {"rank": rank})
        assert _parts(store, 3, "a-0") == list(range(rank + 1))
    for attempt in ("b-0", "b-1"):
        attempts.put_part(other, 3, attempt, 0, {"rank": 0})
        attempts.abandon(store, 3, attempt)
        assert _parts(other, 3, attempt) == []


def test_a_lost_file_fails_the_commit(root: str) -> None:
    store = ObjectStore(root)
    entry = {"dtype": "U8", "shape": [1], "layout": 0}
    box = {"offset": [0], "size": [1], "file": "rank-00000.safetensors", "bytes": [0, 1]}
    manifest = {"tensors": {"w": {**entry, "boxes": [box]}}, "data": "a-0"}
    with pytest.raises(OSError, match=r"is missing rank-00000\.safetensors"):
        store.commit(1, "a-0", manifest_bytes(manifest))
    assert store.steps() == []


def _stored(store: ObjectStore, step: int, world_size: int = 2) -> int:
    """Return the seed of a step's contents, after checking that all of them are present and
    consistent."""
    manifest = _manifest(store, step)
    folder = "/".join(filter(None, (f"step-{step}", manifest.get("data"))))
    raw = [bytes(store.read(f"{folder}/rank-{rank:05d}.safetensors")) for rank in range(world_size)]
    parts = [read_safetensors(one)["model.w"][2] for one in raw]
    (seed,) = (
        seed
        for seed in range(20)
        if parts == [content(rank, seed, 5000) for rank in range(world_size)]
    )
    return seed


@pytest.mark.parametrize("after", [False, True])
def test_killed_while_a_step_is_saved_again(after: bool) -> None:
    """One of both versions is complete, and nothing else remains after the next start."""
    actual = []
    for kill_at in itertools.count(1):
        root = f"memory://{secrets.token_hex(8)}"
        store = ObjectStore(root)
        _save(store, 1, "a-0", seed=11)
        dying = ObjectStore(root, KillingFilesystem(kill_at, after=after))  # type: ignore[arg-type]
        with suppress(Killed):
            _save(dying, 1, "b-0", seed=12)
            break
        assert store.steps() == [1], kill_at
        actual.append(_stored(store, 1))
        attempts.recover(store, "c")
        assert _stored(store, 1) == actual[-1], kill_at
        assert len(store._find(1)) == 3, (kill_at, store._find(1))
    assert actual == sorted(actual) and set(actual) == {11, 12} and len(actual) > 10


def test_attempts_at_one_step_do_not_interfere(root: str) -> None:
    store = ObjectStore(root)
    data = memoryview(content(0, 9, 5000))
    boxes = [PartBox("model.w", "U8", (1, 5000), 0, 5000)]
    store.write(1, "b-0", "rank-00000.safetensors", boxes, [data])
    # Not announced yet, and of the current generation of the run.
    attempts.recover(store, "b")
    attempts.put_part(store, 1, "b-0", 0, {"rank": 0})
    _save(store, 1, "a-0", seed=11)
    assert _parts(store, 1, "b-0") == [0]
    # Writes and deletions of an orphan of an earlier generation do not affect committed steps.
    store.write(1, "0-0", "rank-00001.safetensors", boxes, [data])
    attempts.abandon(store, 1, "0-0")
    attempts.abandon(store, 1, "a-0")
    assert _stored(store, 1) == 11
    _save(store, 1, "b-0", seed=12)
    assert store.steps() == [1] and _stored(store, 1) == 12
    assert [path.partition("/")[0] for path in store._find(1)] == ["b-0", "b-0", "manifest.json"]


def test_objects_that_a_later_save_does_not_need_are_removed(root: str) -> None:
    store = ObjectStore(root)
    _save(store, 1, "a-0")
    attempts.put_part(store, 1, "b-0", 0, {"rank": 0})
    attempts.put_failure(store, 1, "a-0", 1, "late word")
    _save(store, 2, "a-0")
    attempts.put_part(store, 2, "b-0", 0, {"rank": 0})
    attempts.remove_stale_attempts(store, 2)
    assert len(store._find(1)) == 3 and _stored(store, 1) == 1
    assert _parts(store, 2, "b-0") == [0]
    # An unreadable manifest does not tell which objects belong to it: nothing is removed.
    attempts.put_part(store, 1, "b-0", 0, {"rank": 0})
    store._put("step-1/manifest.json", b"{")
    attempts.recover(store, "c")
    attempts.abandon(store, 1, "a-0")
    assert len(store._find(1)) == 4


def test_a_step_of_format_2_is_kept_and_replaced(root: str) -> None:
    """Its files are stored next to the manifest."""
    store = ObjectStore(root)
    _save(store, 1, "a-0", seed=11)
    manifest = _manifest(store, 1)
    del manifest["data"]
    manifest["version"] = 2
    for rank in (0, 1):
        name = f"rank-{rank:05d}.safetensors"
        store._put(f"step-1/{name}", bytes(store.read(f"step-1/a-0/{name}")))
    store._put("step-1/manifest.json", json.dumps(manifest).encode())
    store._put("step-1/a-0.rank-00000.json", b"{}")
    attempts.recover(store, "c")
    files = ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert store._find(1) == ["manifest.json", *files] and _stored(store, 1) == 11
    _save(store, 1, "b-0", seed=12)
    assert store._find(1) == [*(f"b-0/{file}" for file in files), "manifest.json"]
    assert _stored(store, 1) == 12
    store.delete(1)
    assert store.steps() == [] and store._find(1) == []


def test_a_manifest_of_another_attempt_is_not_committed(root: str) -> None:
    store = ObjectStore(root)
    _save(store, 1, "a-0")
    text = json.dumps(_manifest(store, 1)).encode()
    for rank in range(2):
        attempts.put_part(store, 1, "b-0", rank, {})
        store._put(f"step-1/b-0/rank-{rank:05d}.safetensors", b"")
    with pytest.raises(OSError, match="names attempt a-0, not .*b-0"):
        store.commit(1, "b-0", text)


def test_the_announcements_of_a_step_without_files_are_removed(root: str) -> None:
    """All of its tensors are empty."""
    store = ObjectStore(root)
    attempts.put_part(store, 1, "a-0", 0, {})
    base = {"mesh": {}, "values": {}, "config": {}, "versions": {}}
    part = {"rank": 0, "rng": {}, "layouts": [], "tensors": {}}
    attempts.commit(store, 1, "a-0", [part], base)
    assert store._find(1) == ["manifest.json"]


def test_a_token_that_readers_reject_is_not_written(root: str) -> None:
    for token in ("../a", "a/b", "rank-00000.json", "", "a" * 200, "a\n"):
        with pytest.raises(ValueError, match="cannot name an attempt"):
            attempts.put_part(open_storage(root), 1, token, 0, {"rank": 0})


def test_a_url_of_an_unknown_filesystem_says_what_to_install() -> None:
    with pytest.raises(CheckpointError, match="Install the missing package"):
        open_storage("nowhere://bucket")


def test_a_commit_of_another_process_is_seen_in_spite_of_a_cached_answer(root: str) -> None:
    other, store = ObjectStore(root), ObjectStore(root, CachingFilesystem())  # type: ignore[arg-type]
    attempts.put_part(other, 1, "a-0", 0, {"rank": 0})
    assert store.steps() == []
    _save(other, 1, "a-0")
    assert store.steps() == [1]


class _BreakingFile:
    """A filesystem whose first file fails when it is closed, after all its content."""

    def __init__(self) -> None:
        self._fs = MemoryFileSystem()
        self.num_opened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    @contextmanager
    def open(self, path: str, mode: str) -> Iterator[Any]:
        self.num_opened += 1
        with self._fs.open(path, mode) as file:
            yield file
        if self.num_opened == 1:
            raise ConnectionError("injected")


def test_a_file_that_is_written_again_has_the_checksums_of_its_boxes_once(root: str) -> None:
    data = memoryview(content(0, 1, 5000))
    boxes = [PartBox("w", "U8", (5000,), 0, 5000)]
    filesystem = _BreakingFile()
    store = ObjectStore(root, filesystem, first_wait_s=0.0)  # type: ignore[arg-type]
    (place,) = store.write(1, "a-0", "rank-00000.safetensors", boxes, [data])
    assert filesystem.num_opened == 2 and place.end - place.first == 5000


@pytest.mark.parametrize("protocol", ["other", ("other", "others")])
def test_a_storage_is_registered_under_a_scheme_of_its_protocol(
    protocol: str | tuple[str, ...],
) -> None:
    filesystem = type("OtherFileSystem", (AbstractFileSystem,), {"protocol": protocol})
    with pytest.raises(ConfigError, match='registered for "another://", but its protocol is'):
        register_storage("another", filesystem)
