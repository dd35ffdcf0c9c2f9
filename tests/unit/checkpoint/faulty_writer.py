"""Checkpoint writers and trainers that crash at a chosen operation, and a disk that loses data that
was not synced.

`python -m tests.unit.checkpoint.faulty_writer` runs such a writer or trainer.
"""

import copy
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.checkpoint.storage.files import Files

OPERATIONS = (
    *("create", "pwrite", "pwritev", "truncate", "fsync", "rename", "unlink", "mkdir", "rmdir"),
)


class CrashingFiles(Files):
    """Kills its process at the `crash_at`-th operation, counted from 1. If that is a write, half of
    it is done before. The number of operations is written to the file `count`, if given."""

    def __init__(self, crash_at: int, count: Path | None = None) -> None:
        self._crash_at, self._done, self._count_in = crash_at, 0, count

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        if self._done + 1 == self._crash_at:
            os.pwrite(descriptor, memoryview(content)[: len(content) // 8192 * 4096], offset)
        self._count()
        super().pwrite(descriptor, content, offset)

    def _count(self) -> None:
        self._done += 1
        if self._count_in is not None:
            self._count_in.write_text(str(self._done))
        if self._done == self._crash_at:
            os.kill(os.getpid(), signal.SIGKILL)


class SlowFiles(Files):
    """Prolongs each of the first `number` writes by `seconds`."""

    def __init__(self, seconds: float, number: int = 1 << 30) -> None:
        self._seconds, self._remaining = seconds, number

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        self._wait()
        super().pwrite(descriptor, content, offset)

    def pwritev(self, descriptor: int, contents: Sequence[memoryview], offset: int) -> None:
        self._wait()
        super().pwritev(descriptor, contents, offset)

    def _wait(self) -> None:
        if self._remaining > 0:
            self._remaining -= 1
            time.sleep(self._seconds)


def _crashing(name: str) -> Any:
    original = getattr(Files, name)

    def method(self: CrashingFiles, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return original(self, *args, **kwargs)

    return method


for _name in OPERATIONS:
    if _name != "pwrite":
        setattr(CrashingFiles, _name, _crashing(_name))


class CrashingRegion(Region):
    """Kills its process halfway through the `crash_at`-th store into the file. The number of stores
    is written to the file `count`."""

    crash_at, done, count = 0, 0, Path()

    def _store(self, offset: int, content: bytes) -> None:
        CrashingRegion.done += 1
        CrashingRegion.count.write_text(str(CrashingRegion.done))
        if CrashingRegion.done == CrashingRegion.crash_at:
            super()._store(offset, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super()._store(offset, content)


@dataclass
class _Folder:
    names: dict[str, "_Folder | _File"] = field(default_factory=dict)
    durable: dict[str, "_Folder | _File"] = field(default_factory=dict)


@dataclass
class _File:
    content: bytes = b""
    durable: bytes | None = None


class RecordingFiles(Files):
    """Files below `root`, and a log of the operations on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple[Any, ...]] = []
        self._open: dict[int, Path] = {}

    def create(self, path: Path, *, direct: bool = False) -> int:
        descriptor = super().create(path, direct=direct)
        self._open[descriptor] = path
        self.log.append(("create", path))
        return descriptor

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        super().pwrite(descriptor, content, offset)
        self.log.append(("write", self._open[descriptor], bytes(content), offset))

    def pwritev(self, descriptor: int, contents: Sequence[memoryview], offset: int) -> None:
        super().pwritev(descriptor, contents, offset)
        joined = b"".join(bytes(content) for content in contents)
        self.log.append(("write", self._open[descriptor], joined, offset))

    def truncate(self, descriptor: int, length: int) -> None:
        super().truncate(descriptor, length)
        self.log.append(("truncate", self._open[descriptor], length))

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        if descriptor in self._open:
            self.log.append(("fsync", self._open[descriptor]))

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._open.pop(descriptor, None)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.log.append(("sync_folder", path))

    def rename(self, path: Path, target: Path) -> None:
        super().rename(path, target)
        self.log.append(("rename", path, target))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.log.append(("unlink", path))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.log.append(("mkdir", path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self.log.append(("unlink", path))


class PowerLossDisk:
    """Replays a log of operations and simulates the disk's content after a power loss."""

    def __init__(self, root: Path) -> None:
        self._base = root
        self._top = _Folder()

    def replay(self, operation: tuple[Any, ...]) -> None:
        kind, path, *rest = operation
        if kind == "sync_folder":
            synced = self._folder(path)
            synced.durable = dict(synced.names)
            return
        folder, name = self._folder(path.parent), path.name
        if kind == "create":
            folder.names[name] = _File()
        elif kind == "mkdir":
            folder.names[name] = _Folder()
        elif kind == "unlink":
            del folder.names[name]
        elif kind == "rename":
            target = rest[0]
            self._folder(target.parent).names[target.name] = folder.names.pop(name)
        else:
            file = folder.names[name]
            assert isinstance(file, _File)
            if kind == "write":
                data, offset = rest
                grown = file.content.ljust(offset, b"\0")
                file.content = grown[:offset] + data + grown[offset + len(data) :]
            elif kind == "truncate":
                file.content = file.content[: rest[0]].ljust(rest[0], b"\0")
            else:
                file.durable = file.content

    def after_crash(self, target: Path, share_kept: float, seed: int) -> None:
        """Write into `target` the content after a power loss, if this share of the unsynced data
        reached the disk."""
        rng = random.Random(seed)
        self._put(self._top, target, share_kept, rng)

    def _put(self, folder: _Folder, target: Path, share: float, rng: random.Random) -> None:
        target.mkdir(exist_ok=True)
        names = folder.names if rng.random() < share else folder.durable
        for name, entry in copy.copy(names).items():
            if isinstance(entry, _Folder):
                self._put(entry, target / name, share, rng)
            elif rng.random() < share:
                (target / name).write_bytes(entry.content)
            else:
                lost = bytes(len(entry.content))
                (target / name).write_bytes(lost if entry.durable is None else entry.durable)

    def _folder(self, path: Path) -> _Folder:
        folder = self._top
        for part in path.relative_to(self._base).parts:
            entry = folder.names[part]
            assert isinstance(entry, _Folder)
            folder = entry
        return folder


def _writer(files: Files, region: str) -> int:
    from torchtitan_lite.checkpoint.background.__main__ import main

    return main(region, files)


def _trainer(base: str, root: str, victim: str, crash_at: int) -> None:
    """Save twice with two writers and print the committed steps. `victim` is "trainer", or the rank
    of the writer that crashes. With the prefix "flush-", the writers flush the second save after
    the trainer's death; with "alone-", one of them does because the leader's writer is dead too.
    The operations of the victim are counted in `base/count-VICTIM`."""
    mode, _, victim = victim.rpartition("-")
    import tests.harness.snapshots as snapshots

    if victim == "trainer":
        CrashingRegion.crash_at, CrashingRegion.count = crash_at, Path(base) / "count-trainer"
        snapshots.Region = CrashingRegion
    run = snapshots.Trainers(Path(base), root, 2, run_id="ab" * 16, large_elements=3000)
    command = [sys.executable, "-m", "tests.unit.checkpoint.faulty_writer", "writer"]
    for rank, region in enumerate(run.regions):
        crash = [str(crash_at if victim == str(rank) else 0), f"{base}/count-{rank}"]
        settings = snapshots.WriterSettings(keep_latest_k=1, preemption_grace_s=20, others_s=0.2)
        writer = snapshots.WriterProcess(region.path, settings, [*command, *crash])
        writer.start()
        print(json.dumps({"writer": writer.pid}), flush=True)
        run.writers.append(writer)
    for writer in run.writers:
        writer.wait_for("ready", 100)
    for step in (1, 2):
        run.snapshot(step, step)
        for region in run.regions:
            region.store_digests(step, {"model.large": "0" * 16})
            region.confirm(step)
        flushes = step == 2 and mode in ("flush", "alone")
        if flushes and mode == "alone":
            leader = run.writers[0]._process
            assert leader is not None
            leader.kill()
            leader.wait()
        if victim.isdigit():
            # The victim saves first and creates the folders, so that it always does the same number
            # of operations.
            first = run.writers[int(victim)]
            if flushes:
                snapshots.orphan(first)
            else:
                first.save(step, step)
            while first.alive and not list(Path(root).glob(f"*step-{step}*")):
                time.sleep(0.002)
        if flushes:
            os.kill(os.getpid(), signal.SIGKILL)
        for rank, writer in enumerate(run.writers):
            if str(rank) != victim:
                writer.save(step, step)
        while all(writer.alive for writer in run.writers):
            responses = run.writers[0].wait_for("committed", 0.05)
            if any("committed" in response for response in responses):
                print(json.dumps({"committed": step}), flush=True)
                break
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "writer":
        sys.exit(_writer(CrashingFiles(int(sys.argv[2]), Path(sys.argv[3])), sys.argv[4]))
    if sys.argv[1] == "slow":
        sys.exit(_writer(SlowFiles(float(sys.argv[2]), int(sys.argv[3])), sys.argv[4]))
    _trainer(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
