"""An object store that fails now and then: what is committed is whole, and failures are loud."""

import random
import secrets
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.snapshots import content, read_safetensors
from torchtitan_lite.checkpoint.storage.manifest_json import (
    build_manifest,
    checksum,
    manifest_bytes,
)
from torchtitan_lite.checkpoint.storage.object_store import ObjectStore
from torchtitan_lite.checkpoint.storage.part_file import PartBox
from torchtitan_lite.checkpoint.storage.storage import open_storage
from torchtitan_lite.errors import CheckpointError


class Flaky:
    """A filesystem of which a share of the operations fails, before or after their effect."""

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


def _save(store: ObjectStore, step: int, token: str, world_size: int = 2) -> None:
    parts = []
    for rank in range(world_size):
        store.begin(step, token)
        data = memoryview(content(rank, step, 5000))
        file = f"rank-{rank:05d}.safetensors"
        (place,) = store.write_part(
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
        part = {"rank": rank, "rng": {}, "layouts": [{"cut": 2}], "tensors": {"model.w": entry}}
        store.put_part(step, token, rank, part)
    assert store.parts_present(step, token) == set(range(world_size))
    for rank in range(world_size):
        parts.append(store.read_part(step, token, rank))
    base = {"mesh": {}, "values": {"step": step}, "config": {}, "versions": {}}
    store.commit(step, token, manifest_bytes(build_manifest(step, parts, base)))


@pytest.fixture
def root() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.mark.parametrize("seed", range(3))
def test_one_in_twenty_operations_fails_and_nothing_shows(root: str, seed: int) -> None:
    flaky = Flaky(0.05, seed)
    store = ObjectStore(root, flaky, first_wait_s=1e-4)  # type: ignore[arg-type]
    for step in range(1, 11):
        _save(store, step, "a-0")
        if step > 3:
            store.delete(step - 3)
    assert flaky.failures > 5
    assert store.steps() == [8, 9, 10]
    for step in store.steps():
        manifest = _manifest(store, step)
        assert manifest["xxh3"] == checksum(manifest)
        for rank in (0, 1):
            raw = bytes(store.read(f"step-{step}/rank-{rank:05d}.safetensors"))
            assert read_safetensors(raw)["model.w"][2] == content(rank, step, 5000)
    assert bytes(store.read("step-9/rank-00001.safetensors", 4096, 4100)) == content(1, 9, 4)


def _manifest(store: ObjectStore, step: int) -> dict[str, Any]:
    import json

    return json.loads(bytes(store.read(f"step-{step}/manifest.json")))


def test_a_store_that_never_answers_fails_with_its_name(root: str) -> None:
    store = ObjectStore(root, Flaky(1.0, 0), first_wait_s=1e-4)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=rf"{root} failed 8 times, at last with"):
        store.put_part(1, "a-0", 0, {})


def test_parts_of_another_attempt_are_not_taken(root: str) -> None:
    store = open_storage(root)
    store.put_part(4, "a-0", 0, {"rank": 0})
    store.put_failure(4, "a-1", 1, "full")
    assert store.parts_present(4, "a-0") == {0}
    assert store.parts_present(4, "b-0") == set()
    assert store.failures(4, "a-1") == {1: "full"}
    assert store.failures(4, "a-0") == {}
    store.abandon(4, "a-0")
    assert store.parts_present(4, "a-0") == set()
    assert store.failures(4, "a-1") == {1: "full"}


def test_a_step_without_a_manifest_is_none_and_goes(root: str) -> None:
    store = ObjectStore(root)
    _save(store, 1, "a-0")
    store.put_part(2, "a-0", 0, {"rank": 0})
    store.put_part(3, "b-0", 0, {"rank": 0})
    assert store.steps() == [1]
    store.recover("b")
    assert store.parts_present(2, "a-0") == set()
    assert store.parts_present(3, "b-0") == {0}
    store.tidy(4)
    assert store.parts_present(3, "b-0") == set()
    assert store.steps() == [1]


def test_a_lost_file_fails_the_commit(root: str) -> None:
    store = ObjectStore(root)
    entry = {"dtype": "U8", "shape": [1], "layout": 0}
    box = {"offset": [0], "size": [1], "file": "rank-00000.safetensors", "bytes": [0, 1]}
    manifest = {"tensors": {"w": {**entry, "boxes": [box]}}}
    with pytest.raises(OSError, match=r"has lost rank-00000\.safetensors"):
        store.commit(1, "a-0", manifest_bytes(manifest))
    assert store.steps() == []


def test_a_url_of_no_known_filesystem_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="Install what is missing"):
        open_storage("nowhere://bucket")
