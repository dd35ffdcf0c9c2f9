"""Lineage of a run's snapshots: which of those that still exist belong to the run's history.

A run that resumes from an older checkpoint, rolls back, or begins anew abandons the steps after it,
whose snapshots may survive on some machine. So each stretch of training that continues one state is
a *segment* with a number, which each snapshot records, and a file in the run's folder has the
segments of the history with their last steps. A later segment has a higher number.

Invariant: the file is written before the first snapshot of a segment, unless its disk fails.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import withholds_outputs
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh

_DAMAGED = b"?"
"""Content that permits no snapshot."""
_KEPT = 64
"""Number of newest segments that are kept."""


def lineage_name(replica: int) -> str:
    """Return the name of a replica's file in the run's folder."""
    return f"snapshot_lineage-{replica:03d}.json"


class SnapshotLineage:
    """Segments of one run's history. Every rank must call every method."""

    def __init__(self, path: Path, mesh: Mesh) -> None:
        self._path, self._mesh = path, mesh
        self.segment = 0
        """Number of the current segment."""
        self._unwritten = b""
        """Content of the file, if it is to be written."""
        self._failed_segment: int | None = None
        """Segment of which a failure to write it was logged."""

    def permitted(self) -> Mapping[int, int | None] | None:
        """Return the segments of the history, each with its last step, None for no limit; None if
        nothing is recorded, so that all snapshots count."""
        content = b""
        if self._mesh.is_leader:
            try:
                content = self._path.read_bytes() or _DAMAGED
            except FileNotFoundError:
                content = b""
            except OSError as error:
                content = _DAMAGED
                logger.warning("%s cannot be read: %s", self._path, error)
        content = broadcast_bytes(content)
        if not content:
            return None
        try:
            return {int(number): last for number, last in json.loads(content)}
        except (ValueError, TypeError, RecursionError) as error:
            # The same on all ranks. Without the history no snapshot can be trusted.
            logger.warning("%s is damaged, so snapshots are not used: %s", self._path, error)
            return {}

    def begin_segment(self, origin: tuple[int, int] | None) -> None:
        """Begin a segment that continues from a snapshot, `origin` = (segment, step), whose later
        steps are abandoned; or, with None, from a state that is no snapshot, which abandons all."""
        history = self.permitted() or {}
        # The time keeps numbers increasing if the file is lost.
        self.segment = self._mesh.broadcast_int(max(int(time.time()), max(history, default=0) + 1))
        if origin is None:
            history = {}
        else:
            segment, step = origin
            history = {earlier: last for earlier, last in history.items() if earlier < segment}
            history[segment] = step
        if not self._mesh.is_leader:
            return
        kept = [*history.items(), (self.segment, None)][-_KEPT:]
        self._unwritten = json.dumps(kept).encode()
        self.write_pending()

    def write_pending(self) -> None:
        """Write the file if it could not be written before. Logs the first error of a segment."""
        if not self._unwritten:
            return
        files = Files()
        try:
            files.write_file(self._path, self._unwritten)
            files.sync_folder(self._path.parent)
        except OSError as error:
            if self._failed_segment != self.segment:
                logger.warning(
                    "%s cannot be written: %s. It is tried again with each snapshot; until then, "
                    "a restart may use an abandoned one.",
                    self._path,
                    error,
                )
            self._failed_segment = self.segment
            return
        if not withholds_outputs():
            # Else once more with the next snapshot: a machine that is probably lost may write, too.
            self._unwritten = b""
