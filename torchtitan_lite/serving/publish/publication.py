"""What a run publishes: the parts of all its ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from torchtitan_lite.checkpoint.shared_memory import (
    PUBLISHED,
    RegionDescription,
    existing_run_folder,
    region_files,
)
from torchtitan_lite.core.errors import DamagedSnapshot, PublishError
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint, StateConnection
from torchtitan_lite.serving.publish.sources import (
    INDEX_VERSION,
    POLL_S,
    PURPOSE,
    RETRY_S,
    Announcement,
    RankSource,
    ServerSource,
    SharedMemorySource,
    read_served_header,
)

_ANSWER_S = 30.0
"""Time limit for each answer of a server."""
_MAX_CONNECTIONS = 16
"""Servers that are asked at the same time."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Publication:
    """All ranks of a run that publishes."""

    where: str
    ranks: tuple[RankSource, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """Model and configuration as published by the first rank."""
        return self.ranks[0].description.config

    @property
    def generation_id(self) -> str:
        return self.ranks[0].description.generation_id

    def wait(self, timeout_s: float, num_retries: int) -> None:
        """Block until there may be another version, at most `timeout_s`; if `num_retries` is not 0,
        shortly, because so often not all had the newest one that is known."""
        if num_retries:
            time.sleep(min(timeout_s, RETRY_S, POLL_S * 2 ** min(num_retries - 1, 10)))
        else:
            self.ranks[0].wait(timeout_s)

    def map_ranks(
        self, action: Callable[[int, Callable[[], bool]], _T], ranks: Sequence[int]
    ) -> list[_T]:
        """Return the results of `action` for some ranks. Servers are asked at the same time. If one
        fails, or this is interrupted, the function that `action` also gets tells the others that
        they are cancelled; the error is raised once none is running."""
        cancelled = Event()
        if len(ranks) < 2 or not self.ranks[0].is_remote:
            return [action(rank, cancelled.is_set) for rank in ranks]

        def run(rank: int) -> _T:
            if cancelled.is_set():
                raise CancelledError
            return action(rank, cancelled.is_set)

        futures: list[Future[_T]] = []
        try:
            with ThreadPoolExecutor(min(len(ranks), _MAX_CONNECTIONS), "subscriber") as pool:
                try:
                    futures += [pool.submit(run, rank) for rank in ranks]
                    done = wait(futures, return_when=FIRST_EXCEPTION).done
                    # Before the others are cancelled, so that it is none of their errors.
                    error = next(filter(None, (finished.exception() for finished in done)), None)
                finally:
                    cancelled.set()
            if error is not None:
                raise error
            return [future.result() for future in futures]
        finally:
            # An error refers to this frame: it must not keep what was received.
            del futures[:]
            done = error = None

    def newest(self) -> int | None:
        """Return the newest version that every rank has, as far as known; None if there is none."""
        if self.ranks[0].is_remote:
            # What its first rank has; a rank that has it not yet does not let it be pinned.
            return max(self.ranks[0].versions(), default=None)
        common = set(self.ranks[0].versions())
        for rank in self.ranks[1:]:
            common &= set(rank.versions())
        return max(common, default=None)

    def is_current(self) -> bool:
        """Return whether the run still publishes here, as far as known."""
        return all(rank.is_current() for rank in self.ranks)

    def close(self) -> None:
        """Close connections, and unmap memory."""
        for rank in self.ranks:
            rank.close()


def open_publication(source: str, secret: str) -> Publication:
    """Open what a run publishes: `source` is its output folder, or the URL of its first rank.

    Ranks of this machine are read in shared memory. Raises PublishError if nothing is published.
    """
    if source.startswith("http://"):
        return _served(source, secret)
    try:
        announcement = Announcement.read(Path(source).expanduser())
    except (OSError, KeyError) as error:
        raise PublishError(
            f"{source} publishes no weights: {error!r}. Start its run with --publish.enable, or "
            "give the URL of its first rank."
        ) from None
    folder = existing_run_folder(announcement.run_id)
    files = {} if folder is None else region_files(folder, PUBLISHED)
    sources: list[SharedMemorySource] = []
    with suppress(DamagedSnapshot, FileNotFoundError):
        sources = [SharedMemorySource(file, announcement) for file in files.values()]
    # An earlier start, of more ranks or on this machine alone, may have been killed.
    sources = [
        region
        for region in sources
        if region.description.generation_id == announcement.generation_id
    ]
    world_size = sources[0].description.world_size if sources else 0
    if sources and len(sources) == world_size:
        return Publication(where=str(folder), ranks=tuple(sources))
    if announcement.url is not None:
        return _served(announcement.url, secret)
    raise PublishError(
        f"The run of {source} has published nothing yet, or has ended: {len(sources)} of "
        f"{world_size or 'its'} ranks are in the shared memory of this machine."
    )


def _served(url: str, secret: str) -> Publication:
    first = PeerEndpoint(url, secret, PURPOSE, _ANSWER_S)
    with closing(StateConnection(first, INDEX_VERSION)) as connection:
        index = read_served_header(connection)
    try:
        ranks = tuple(
            ServerSource(
                PeerEndpoint(str(rank["url"]), secret, PURPOSE, _ANSWER_S),
                RegionDescription.from_dict(rank["description"], slot_bytes=rank["slot_bytes"]),
            )
            for rank in index["ranks"]
        )
        if not ranks:
            raise KeyError("ranks")
    except (KeyError, TypeError, DamagedSnapshot) as error:
        raise PublishError(f"{url} sent an invalid index: {error!r}") from None
    return Publication(where=url, ranks=ranks)
