"""Writers and trainers that die at a chosen operation, and a disk that forgets what was not synced.

`python -m tests.writer_faults` is such a writer or trainer.
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

from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.storage.files import Files

OPERATIONS = (
    *("create", "pwrite", "pwritev", "truncate", "fsync", "rename", "unlink", "mkdir", "rmdir"),
)


class DyingFiles(Files):
    """Kills its process at the n-th operation, counting from 1; half of the writes before it.
    How many there were stands in the file `count`, if it is given."""

    def __init__(self, dies_at: int, count: Path | None = None) -> None:
        self._dies_at, self._done, self._count_in = dies_at, 0, count

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        if self._done + 1 == self._dies_at:
            os.pwrite(descriptor, memoryview(content)[: len(content) // 8192 * 4096], offset)
        self._count()
        super().pwrite(descriptor, content, offset)

    def _count(self) -> None:
        self._done += 1
        if self._count_in is not None:
            self._count_in.write_text(str(self._done))
        if self._done == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


class SlowFiles(Files):
    """The first writes take so many seconds longer."""

    def __init__(self, seconds: float, number: int = 1 << 30) -> None:
        self._seconds, self._left = seconds, number

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        self._wait()
        super().pwrite(descriptor, content, offset)

    def pwritev(self, descriptor: int, contents: Sequence[memoryview], offset: int) -> None:
        self._wait()
        super().pwritev(descriptor, contents, offset)

    def _wait(self) -> None:
        if self._left > 0:
            self._left -= 1
            time.sleep(self._seconds)


def _dying(name: str) -> Any:
    real = getattr(Files, name)

    def method(self: DyingFiles, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return real(self, *args, **kwargs)

    return method


for _name in OPERATIONS:
    if _name != "pwrite":
        setattr(DyingFiles, _name, _dying(_name))


class DyingRegion(Region):
    """Kills its process half-way through the n-th store into the file. How many there were stands
    in the file `count`."""

    dies_at, done, count = 0, 0, Path()

    def _store(self, offset: int, content: bytes) -> None:
        DyingRegion.done += 1
        DyingRegion.count.write_text(str(DyingRegion.done))
        if DyingRegion.done == DyingRegion.dies_at:
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
    """Real files below `root`, and a log of what was done to them."""

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


class ForgetfulDisk:
    """Replays a log, and shows what a machine that lost its power may find."""

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
        """Put into `target` what is found when this share of what was not synced has reached the
        disk by chance."""
        draws = random.Random(seed)
        self._put(self._top, target, share_kept, draws)

    def _put(self, folder: _Folder, target: Path, share: float, draws: random.Random) -> None:
        target.mkdir(exist_ok=True)
        names = folder.names if draws.random() < share else folder.durable
        for name, entry in copy.copy(names).items():
            if isinstance(entry, _Folder):
                self._put(entry, target / name, share, draws)
            elif draws.random() < share:
                (target / name).write_bytes(entry.content)
            else:
                lost = bytes(len(entry.content))
                (target / name).write_bytes(lost if entry.durable is None else entry.durable)

    def _folder(self, path: Path) -> _Folder:
        found = self._top
        for part in path.relative_to(self._base).parts:
            entry = found.names[part]
            assert isinstance(entry, _Folder)
            found = entry
        return found


def _writer(files: Files, region: str) -> int:
    from torchtitan_lite.checkpoint.background.__main__ import main

    return main(region, files)


def _trainer(base: str, root: str, victim: str, dies_at: int) -> None:
    """Two saves with two writers; prints what was committed. `victim` is "trainer", or the rank
    of the writer that dies; after "flush-" the second save is left to the flush, after "alone-" to
    that of one writer, the leader's being dead. What the victim did is counted in
    `base/count-VICTIM`."""
    how, _, victim = victim.rpartition("-")
    import tests.snapshots as snapshots

    if victim == "trainer":
        DyingRegion.dies_at, DyingRegion.count = dies_at, Path(base) / "count-trainer"
        snapshots.Region = DyingRegion
    run = snapshots.Trainers(Path(base), root, 2, run_id="ab" * 16, large_elements=3000)
    mine = [sys.executable, "-m", "tests.writer_faults", "writer"]
    for rank, region in enumerate(run.regions):
        dying = [str(dies_at if victim == str(rank) else 0), f"{base}/count-{rank}"]
        settings = snapshots.WriterSettings(keep_latest_k=1, preemption_grace_s=20, others_s=0.2)
        writer = snapshots.WriterProcess(region.path, settings, [*mine, *dying])
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
        flushes = step == 2 and how in ("flush", "alone")
        if flushes and how == "alone":
            leader = run.writers[0]._process
            assert leader is not None
            leader.kill()
            leader.wait()
        if victim.isdigit():
            # Always first, so that it makes the folders: the number of its operations is the same.
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
            said = run.writers[0].wait_for("committed", 0.05)
            if any("committed" in response for response in said):
                print(json.dumps({"committed": step}), flush=True)
                break
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "writer":
        sys.exit(_writer(DyingFiles(int(sys.argv[2]), Path(sys.argv[3])), sys.argv[4]))
    if sys.argv[1] == "slow":
        sys.exit(_writer(SlowFiles(float(sys.argv[2]), int(sys.argv[3])), sys.argv[4]))
    _trainer(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
