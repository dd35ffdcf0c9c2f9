"""`python -m torchtitan_lite.checkpoint.background REGION`: the writer process of one rank.

The first line on standard input is the settings. Orders follow, a line of JSON each:
{"save": {"slot": k, "step": n}}, {"abandon": n}, {"stop": true, "free": false}. The end of the
input without "stop" means that the trainer died. Layer: above the rest of background/.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.checkpoint.background.channel import Channel
from torchtitan_lite.checkpoint.background.grace import longest_s
from torchtitan_lite.checkpoint.background.priority import give_way
from torchtitan_lite.checkpoint.background.save import RankSave
from torchtitan_lite.checkpoint.background.settings import WriterSettings
from torchtitan_lite.checkpoint.background.writer import Writer
from torchtitan_lite.checkpoint.memory.lock import RankLock
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.storage import open_storage
from torchtitan_lite.errors import CheckpointError


def main(region_path: str, files: Files | None = None) -> int:
    """Run a writer to its end and return the exit status. `files` is for tests."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # They are meant for the trainer: the writer goes when that has gone and all is saved.
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(outgoing=_own_output())
    given = channel.next_line()
    if given is None:
        return 0
    try:
        settings = WriterSettings.from_json(given)
        if settings.signals_fd >= 0:
            channel.listen_to_signals(settings.signals_fd)
        region = Region.open(Path(region_path), writable=True)
        lock = RankLock(region.path.parent, region.rank)
        # A writer of an earlier start may still be flushing.
        if not lock.acquire(longest_s(settings.preemption_grace_s)):
            raise CheckpointError(f"Process {lock.owner()} holds {lock.path}.")
        give_way(settings.nice, io_idle=settings.io_idle)
        storage = open_storage(str(region.description.get("root")), files)
        save = RankSave(region, storage)
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        channel.say(failed=-1, error=f"{type(error).__name__}: {error}")
        return 1
    Writer(save, settings, channel).run()
    return 0


def _own_output() -> int:
    """The descriptor of what the trainer reads, for nobody else: what any library prints goes to
    standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    # What was printed before may have left a line without its end.
    with suppress(BrokenPipeError):
        # A trainer that has ended already is noticed when its orders end.
        os.write(own, b"\n")
    return own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
