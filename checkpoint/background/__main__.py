"""`python -m torchtitan_lite.checkpoint.background REGION`: the writer process of one rank.

The first line of standard input holds the settings. One order per line follows, as JSON:

- {"save": {"slot": k, "step": n, "token": t, "urgent": true, "writer_group": {...}}}; without a
  token, that of the first attempt, and without a group, as a single replica
- {"writer_group": {...}}: the replicas that write together what is written without an order
- {"abandon": n}
- {"stop": true, "free": false}

End of input without "stop" means that the trainer died.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from torchtitan_lite.checkpoint.background.channel import (
    WriterChannel,
    WriterSettings,
    ignore_stop_signals,
    own_output,
)
from torchtitan_lite.checkpoint.background.flush import max_wait_s
from torchtitan_lite.checkpoint.background.save import RankSave, log_to_stderr
from torchtitan_lite.checkpoint.background.writer import Writer, lower_priority
from torchtitan_lite.checkpoint.shared_memory.folder import RankLock
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.core.errors import CheckpointError


def main(region_path: str, files: Files | None = None) -> int:
    """Run a writer to its end and return the exit status. Tests pass `files`."""
    ignore_stop_signals()
    channel = WriterChannel(outgoing=own_output())
    order = channel.next_order()
    if order is None:
        return 0
    try:
        settings = WriterSettings.from_json(order)
        if settings.signals_fd >= 0:
            channel.listen_to_signals(settings.signals_fd)
        region = Region.open(Path(region_path), writable=True)
        lock = RankLock(region.path.parent, region.rank)
        # A writer of an earlier generation may still be flushing.
        if not lock.acquire(max_wait_s(settings.preemption_grace_s)):
            raise CheckpointError(f"Process {lock.owner()} holds {lock.path}.")
        lower_priority(settings.nice, io_idle=settings.io_idle)
        if settings.storages:
            import fsspec

            for scheme, filesystem in settings.storages.items():
                # Imported when a URL of the scheme is opened.
                fsspec.register_implementation(scheme, filesystem, clobber=True)
        storage = open_storage(str(region.description.get("root")), files)
        if region.rank == 0:
            _warn_of_torch(settings.storages)
        save = RankSave(region, storage)
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        channel.send(failed=-1, error=f"{type(error).__name__}: {error}")
        return 1
    Writer(save, settings, channel).run()
    return 0


def _warn_of_torch(storages: Mapping[str, str]) -> None:
    """Print once that the module of a registered filesystem, which opening the storage has
    imported, imports torch."""
    modules = {scheme: name.partition(":")[0] for scheme, name in storages.items()}
    for scheme, module in modules.items():
        if module in sys.modules and "torch" in sys.modules:
            log_to_stderr(
                f"The filesystem of {scheme}:// is defined in {module}, which imports torch: that "
                "costs each checkpoint writer some hundred MiB and many seconds. Define it in a "
                "module that does not."
            )
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
