"""Subscribers: they receive versions of the weights of a live run into their own tensors.

Invariant: targets hold one version, and never a mix, also after an error or if the publisher dies:
everything is pinned, and what comes from a server is received completely, before a target changes.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint import DTYPES
from torchtitan_lite.core.errors import LayoutError, PublishError
from torchtitan_lite.distributed.redistribute import Layout, TensorSpec, layout_from_json
from torchtitan_lite.distributed.redistribute.execution.read_plan import HeldBlock, held_blocks
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.serving.publish.publication import Publication, open_publication
from torchtitan_lite.serving.publish.sources import Content, PinnedPart, Received, VersionGone

_WHOLE = Layout.on_holder(0)
_NO_VERSION = -1
"""Less than any version: 0 is that of initial weights."""
_FAILED = -2
"""Less than any other integer that processes agree about."""
_NUM_DIGESTS = 1 << 48
Agree = Callable[[int], int]
"""Collective that returns the smallest of all processes' integers."""


@dataclass(frozen=True)
class Target:
    """Memory that receives a published tensor, or a part of it."""

    name: str
    """Name of the published tensor, that of the parameter in the trainer."""
    tensor: torch.Tensor
    """Receives this process's shard, in its own dtype; may be a view, such as rows of a fused
    projection. A DTensor has its layout with it. Nothing else may change it between versions: what
    a version has in common with the one before is not received again."""
    layout: Layout | None = None
    """Layout of the tensor over the subscriber's processes, which its holders number. Unset: that
    of the DTensor, or the whole tensor."""
    holder: int = 0
    """This process in `layout`."""
    row: int | None = None
    """Receive only this element of dim 0, such as one expert; `layout` is that of the element."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A version that the targets hold now."""

    version: int
    num_bytes: int
    """Bytes of changed blocks, as published."""
    num_bytes_unchanged: int
    """Bytes of blocks that the targets held already."""
    num_bytes_received: int
    """Bytes received for the changed blocks: fewer if deltas are received instead."""
    seconds: float


@dataclass(frozen=True)
class _Read:
    """A block of a target, and where it is."""

    rank: int
    name: str
    source: tuple[slice, ...]
    into: torch.Tensor
    num_bytes: int


@dataclass
class Subscription:
    """Targets that receive versions. Create it with `Subscriber.subscribe`."""

    subscriber: "Subscriber"
    targets: Sequence[Target]
    version: int | None = None
    """The version that the targets hold; None before the first update, and after a failed copy."""
    problem: str = ""
    """Reason why this process did not receive the last version that it has tried to; "" if it
    did."""
    _reads: list[_Read] = field(default_factory=list)
    _planned: Publication | None = None
    _seen: int = _NO_VERSION
    """The newest version that this process has seen; others may have seen an older one."""
    _digests: dict[tuple[int, str], str] = field(default_factory=dict)
    """Checksums of the parts that the targets hold."""

    def update(
        self,
        *,
        timeout_s: float | None = None,
        agree: Agree | None = None,
        before: Callable[[], None] | None = None,
    ) -> Update | None:
        """Receive the newest version into the targets, if it is newer than the one they hold, and
        return it. Without a newer one, wait up to `timeout_s`, by default not at all, and return
        None.

        Several processes that must hold the same version pass `agree`, a collective that returns
        the smallest of all processes' integers: they agree about the version, that all have pinned
        it, and that all have received it. `before`, which contains no collective then, is called
        when the targets are about to change.

        Raises PublishError, and the errors of `before`. An error of one process is raised in all of
        them: its own there, PublishError in the others. The next update begins again.
        """
        deadline = time.monotonic() + (timeout_s or 0.0)
        held, num_retries = _NO_VERSION if self.version is None else self.version, 0
        while True:
            version = _together(agree, self._newest)
            if version > held:
                update = self._receive(version, agree, before)
                if update is not None:
                    return update
            if not _together(agree, lambda: int(time.monotonic() < deadline)):
                return None
            # One that another process or a rank lacks is about to be complete.
            num_retries = num_retries + 1 if self._seen > held else 0
            left_s = max(0.0, deadline - time.monotonic())
            self.subscriber.publication.wait(left_s, num_retries)

    def _newest(self) -> int:
        newest = self.subscriber.newest()
        self._seen = _NO_VERSION if newest is None else newest
        return self._seen

    @torch.no_grad()
    def _receive(
        self, version: int, agree: Agree | None, before: Callable[[], None] | None
    ) -> Update | None:
        """Receive a version; None if it is gone for any process."""
        started = time.perf_counter()
        publication = self.subscriber.publication
        # After a restart of the run, two generations may have a version of the same number.
        digest = xxhash.xxh3_64_intdigest(publication.generation_id.encode()) % _NUM_DIGESTS
        smallest = _together(agree, lambda: digest)
        largest = _NUM_DIGESTS - _together(agree, lambda: _NUM_DIGESTS - digest)
        if smallest != largest:
            return None
        with ExitStack() as stack:
            pins: list[_Pinned] = []

            def pin() -> int:
                self._plan(publication)
                self.problem = ""
                try:
                    pins.append(self._pinned(publication, version, stack))
                except VersionGone as error:
                    self.problem = str(error)
                return len(pins)

            if not _together(agree, pin):
                return None
            (pinned,) = pins
            if before is not None:
                _together(agree, lambda: before() or 0)
            # If a copy fails in any process, the targets hold no version.
            self.version, self._digests = None, {}
            _together(agree, lambda: _copy(pinned))
        self.version, self._digests = version, pinned.digests
        return Update(
            version=version,
            num_bytes=sum(read.num_bytes for read in pinned.reads),
            num_bytes_unchanged=pinned.num_bytes_unchanged,
            num_bytes_received=pinned.num_bytes_received,
            seconds=time.perf_counter() - started,
        )

    def _plan(self, publication: Publication) -> None:
        """Plan the reads, once for a publication."""
        if self._planned is publication:
            return
        tensors = self.subscriber.tensors
        reads: list[_Read] = []
        for index, target in enumerate(self.targets):
            spec = tensors.get(target.name)
            if spec is None:
                raise PublishError(
                    f"{publication.where} publishes no tensor {target.name!r}. It publishes "
                    f"{', '.join(list(tensors)[:3])} and others."
                )
            reads += _reads_of(target, spec, index)
        # Each rank is asked for all its blocks at once.
        self._reads = sorted(reads, key=attrgetter("rank"))
        self._planned, self._digests = publication, {}

    def _pinned(self, publication: Publication, version: int, stack: ExitStack) -> "_Pinned":
        """Pin a version until `stack` closes, and receive what comes from servers, which may die.
        Raises VersionGone."""

        def pin(rank: int, _: Callable[[], bool]) -> PinnedPart:
            part = publication.ranks[rank].pin(version)
            stack.callback(part.release)
            return part

        numbers = sorted({read.rank for read in self._reads})
        parts = dict(zip(numbers, publication.map_ranks(pin, numbers), strict=True))
        digests = {
            (read.rank, read.name): parts[read.rank].digests[read.name] for read in self._reads
        }
        changed = {key for key, digest in digests.items() if self._digests.get(key) != digest}
        reads = [read for read in self._reads if (read.rank, read.name) in changed]
        total = sum(read.num_bytes for read in self._reads)
        wanted = {rank: list(some) for rank, some in groupby(reads, attrgetter("rank"))}

        def receive(rank: int, is_cancelled: Callable[[], bool]) -> Received:
            blocks = [(read.name, read.source) for read in wanted[rank]]
            names = {name for name, _ in blocks if (rank, name) in self._digests}
            # Single elements of tensors of other types, such as quantized ones, cannot be set.
            names -= {read.name for read in wanted[rank] if type(read.into) is not torch.Tensor}
            held = {name: self._digests[rank, name] for name in names}
            return parts[rank].receive(blocks, held, is_cancelled)

        received = publication.map_ranks(receive, list(wanted))
        return _Pinned(
            digests=digests,
            reads=reads,
            contents=[content for rank_blocks in received for content in rank_blocks.contents],
            num_bytes_unchanged=total - sum(read.num_bytes for read in reads),
            num_bytes_received=sum(rank_blocks.num_bytes for rank_blocks in received),
        )


@dataclass(frozen=True, kw_only=True)
class _Pinned:
    """A pinned version, as far as it differs from the one that the targets hold."""

    digests: dict[tuple[int, str], str]
    reads: Sequence[_Read]
    contents: Sequence[Content]
    """Content of each read: received, or in the publisher's shared memory."""
    num_bytes_unchanged: int
    num_bytes_received: int


def _copy(pinned: _Pinned) -> int:
    """Copy the contents into the targets."""
    for read, content in zip(pinned.reads, pinned.contents, strict=True):
        if isinstance(content, torch.Tensor):
            read.into.copy_(content)
        else:
            for delta in content:
                delta.apply_to(read.into, read.source)
    return 0


def _together(agree: Agree | None, action: Callable[[], int]) -> int:
    """Return the smallest result of all processes' `action`, which returns at least -1 and contains
    no collective. Raises in all processes if it fails in one."""
    try:
        own = action()
    except Exception:
        if agree is not None:
            agree(_FAILED)
        raise
    smallest = own if agree is None else agree(own)
    if smallest == _FAILED:
        raise PublishError("Another process of the subscriber failed. Its own error says why.")
    return smallest


class Subscriber:
    """A connection to a run that publishes its weights."""

    def __init__(self, source: str, *, secret: str = "", timeout_s: float = 60.0) -> None:
        """`source` is the output folder of the run, or the URL of its first rank, for which
        `secret` is the run's TORCHTITAN_LITE_TOKEN. Waits up to `timeout_s` for the run to start.
        Raises PublishError."""
        self._source, self._secret = source, secret
        self._has_ended = False
        """Whether `publication` is known not to be current, and is closed."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.publication = open_publication(source, secret)
                break
            except PublishError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)
        self.tensors = _tensors_of(self.publication)

    def close(self) -> None:
        """Close the connections. Tensors keep what they hold."""
        self.publication.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def where(self) -> str:
        """Location, for messages."""
        return self.publication.where

    @property
    def config(self) -> Mapping[str, Any]:
        """Description of the model: `model` as in a config, and `hugging_face`, its names."""
        return self.publication.config

    def newest(self) -> int | None:
        """Return the newest complete version; None if there is none yet, or the run has ended. A
        run that was restarted is found again."""
        if not self._has_ended:
            with suppress(PublishError):
                version = self.publication.newest()
                if self.publication.is_current():
                    return version
            if not self.publication.is_current():
                # While it is mapped, its memory is not free for the run that restarts.
                self.publication.close()
                self._has_ended = True
        try:
            self._reopen()
            return self.publication.newest()
        except ModelChanged:
            raise
        except PublishError:
            # It is being restarted, or has ended.
            return None

    def subscribe(self, targets: Iterable[Target]) -> Subscription:
        """Prepare to receive versions into `targets`. Raises PublishError and LayoutError if they
        do not fit what is published."""
        subscription = Subscription(self, list(targets))
        subscription._plan(self.publication)
        return subscription

    def _reopen(self) -> None:
        publication = open_publication(self._source, self._secret)
        with ExitStack() as stack:
            stack.callback(publication.close)
            tensors = _tensors_of(publication)
            for name in sorted({*self.tensors, *tensors}):
                now, before = _kind_of(tensors.get(name)), _kind_of(self.tensors.get(name))
                if now != before:
                    raise ModelChanged(
                        f"{publication.where} publishes another model since its restart: {name} "
                        f"is {now}, and was {before}."
                    )
            stack.pop_all()
        self.publication.close()
        self.publication, self.tensors, self._has_ended = publication, tensors, False


class ModelChanged(PublishError):
    """A run that publishes another model than before."""


def _kind_of(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _tensors_of(publication: Publication) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for rank in publication.ranks:
        about = rank.description
        layouts = [layout_from_json(description) for description in about.layouts]
        for held in about.tensors:
            spec = TensorSpec(layouts[held.layout], held.shape, DTYPES[held.dtype])
            if specs.setdefault(held.name, spec) != spec:
                raise PublishError(f"{publication.where}: ranks disagree about {held.name}.")
    return dict(sorted(specs.items()))


def _reads_of(target: Target, spec: TensorSpec, target_index: int) -> list[_Read]:
    """Return the blocks of a target. Replicas of a block are read from one holder, another one for
    each `target_index` of a target. Raises LayoutError if the target does not fit."""
    layout, shape, tensor = spec.layout, spec.shape, target.tensor
    first: tuple[slice, ...] = ()
    if target.row is not None:
        if not 0 <= target.row < shape[0]:
            raise LayoutError(f"{target.name} has {shape[0]} elements and no {target.row}.")
        layout, index = layout.of_element(shape, target.row)
        first, shape = (slice(index, index + 1),), shape[1:]
    wanted, holder = target.layout, target.holder
    if isinstance(tensor, DTensor):
        wanted = wanted or Layout.from_dtensor(tensor, strided="order")
        holder = torch.distributed.get_rank()
        tensor = local_tensor(tensor)
    wanted = (wanted or _WHOLE).with_num_dims(len(shape))
    expected = wanted.local_shape(shape, holder)
    if tuple(tensor.shape) != expected:
        raise LayoutError(
            f"The target of {target.name} has shape {list(tensor.shape)}; its shard in {wanted} "
            f"has {list(expected)} of {list(shape)}."
        )
    return [
        _read(target.name, tensor, block, first, target_index, spec.dtype.itemsize)
        for block in held_blocks(layout, wanted, tuple(shape), holder)
    ]


def _read(
    name: str,
    tensor: torch.Tensor,
    block: HeldBlock,
    first: tuple[slice, ...],
    index: int,
    itemsize: int,
) -> _Read:
    rank = block.holders[index % len(block.holders)]
    assert isinstance(rank, int)
    into = tensor.detach()[block.target]
    return _Read(
        rank=rank,
        name=name,
        source=(*first, *block.source),
        into=into.unsqueeze(0) if first else into,
        num_bytes=into.numel() * itemsize,
    )
