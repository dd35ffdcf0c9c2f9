"""The publisher of a rank: copies its part of the weights into shared memory every few steps, and
serves it to other machines if configured.

Invariant: a version is complete on a rank once its checksums are stored, and the newest complete
one is never overwritten. Training waits for the copy; for the checksums and deltas only if the next
version is due before they are computed; and for subscribers only if configured.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from torchtitan_lite.checkpoint import (
    Copier,
    RunIdentity,
    SavePlan,
    layouts_json,
    local_tensors,
    model_tensors,
    plan_save,
)
from torchtitan_lite.checkpoint.shared_memory import (
    PUBLISHED,
    RankLock,
    Region,
    RegionDescription,
    SlotState,
    remove_unpublished,
    shared_memory_folder,
    slot_lock_path,
    unpublish,
)
from torchtitan_lite.config.tables.publish import PublishConfig
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.host_collectives import (
    all_gather_bytes,
    all_gather_ints,
)
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.network import address_of_interface
from torchtitan_lite.distributed.on_all_ranks import first_message, run_on_all_ranks
from torchtitan_lite.distributed.rpc.state_server import FramedState, StateServer
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.serving.publish.deltas import DeltaHistory
from torchtitan_lite.serving.publish.hugging_face import HUGGING_FACE, hugging_face_to_json
from torchtitan_lite.serving.publish.pins import SlotLock
from torchtitan_lite.serving.publish.sources import (
    INDEX_VERSION,
    PUBLISHED_FILE,
    PURPOSE,
    STATUS_VERSION,
)

_POLL_S = 0.01
_EARLIER_END_S = 30.0
"""Time within which the process of an earlier generation must have ended."""
_HAS_SLOT, _HAS_PROBLEM = 1, 2
"""Flags of a rank, which the ranks exchange before each version."""
_BETWEEN_REQUESTS_S = 0.3
"""Time after a request of another machine during which it may send the next one."""
_STATUS_BYTES = 128
_VERSION_BYTES = 24
"""Bytes of a version as JSON."""
_DIGEST_BYTES = 48
"""Bytes of a checksum as JSON, beside the name."""
_HEADER_BYTES = 4096
"""A version's header has a multiple of these bytes."""


class Publisher:
    """Publishes this rank's part. Every rank of the run has one, and calls it alike."""

    def __init__(
        self,
        config: PublishConfig,
        tensors: Mapping[str, torch.Tensor],
        mesh: Mesh,
        *,
        identity: RunIdentity,
        folder: Path,
        model: Mapping[str, Any],
        secret: str,
    ) -> None:
        """`tensors` are parameters and buffers by name, `identity` is equal on all ranks, `folder`
        is for the file that tells where the run publishes, and `model` describes the model. Every
        rank must call it. Raises CheckpointError on all ranks, and leaves nothing, if there is too
        little memory, the address cannot be used, or another process publishes the part of this
        rank."""
        self._config, self._mesh = config, mesh
        self._published_file = folder / PUBLISHED_FILE
        self._server: StateServer | None = None
        self._deltas = DeltaHistory(config.keep_versions) if config.deltas else None
        self._finishing: Future[None] | None = None
        self._is_skipping = False
        """Whether the last call warned, or would have."""
        self._last_version = -1
        """The last one that all ranks had a slot for."""
        self._problem = ""
        """Error of this rank since the last call; "" if there is none."""
        with ExitStack() as stack:
            self._open(stack, tensors, identity, model, secret)
            self._resources = stack.pop_all()

    def _open(
        self,
        stack: ExitStack,
        tensors: Mapping[str, torch.Tensor],
        identity: RunIdentity,
        model: Mapping[str, Any],
        secret: str,
    ) -> None:
        """Acquire what `stack` releases. The arguments are those of the publisher."""
        config, mesh = self._config, self._mesh
        dtype = None if config.dtype is None else getattr(torch, config.dtype)
        plan = plan_save(tensors, mesh, dtype)
        about = _describe(plan, mesh, identity, model)
        names = sum(len(name) + _DIGEST_BYTES for name in plan.placed)

        def create() -> Region:
            shared = shared_memory_folder(identity.run_id)
            _lock(stack, shared, mesh.rank)
            region = Region.create(
                shared,
                mesh.rank,
                about.to_dict(),
                plan.slot_bytes,
                values_bytes=names + 4096,
                num_slots=config.keep_versions + 1,
                kind=PUBLISHED,
            )
            stack.callback(region.close)
            for slot in range(region.num_slots):
                # Readers do not create it.
                slot_lock_path(shared, mesh.rank, slot).touch(0o600)
            return region

        self._region = run_on_all_ranks(create)
        slots = [self._region.data(slot) for slot in range(self._region.num_slots)]
        self._copier = Copier(plan, slots, mesh.device.torch_device)
        stack.callback(self._copier.close)
        self._held = about.tensors
        self._pool = ThreadPoolExecutor(1, "publish")
        stack.callback(self._pool.shutdown)
        self._generation_id = identity.generation_id
        url = ""
        if config.address is not None:

            def serve() -> StateServer:
                server = _open_server(config, secret, is_first=mesh.rank == 0)
                stack.callback(server.close)
                return server

            self._server = run_on_all_ranks(serve)
            url = self._server.url
        described = {"url": url, "description": about.to_dict(), "slot_bytes": plan.slot_bytes}
        everyone = all_gather_bytes(json.dumps(described).encode())
        if mesh.rank == 0:
            self._offer_index([json.loads(text) for text in everyone])
            stack.callback(self._published_file.unlink, missing_ok=True)
        self._offer_status([])
        where = {**asdict(identity), "url": url or None}
        run_on_all_ranks(lambda: self._announce(where))

    def after_step(self, step: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Publish the weights as version `step` if it is due, and return whether this rank has
        published it. Every rank must call it. The weights may change afterwards.

        An error of a rank is not raised: no subscriber sees the version, and a later call warns
        once, until a version is published again.
        """
        if step % self._config.every_steps:
            return False
        return self.publish(step, tensors)

    def publish(self, step: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """As `after_step`, whether or not the version is due. After a rollback, versions that were
        published before it are skipped."""
        if step <= self._last_version:
            self._warn(
                f"Version {step} is not published again after a rollback: subscribers keep version "
                f"{self._last_version} until training has passed it."
            )
            return False
        self._finish_last()
        slot, lock = None, None
        try:
            slot, lock = self._wait_for_slot()
        except Exception as error:
            self._problem = self._problem or self._describe_error(step, error)
        try:
            is_free = self._agree(slot is not None, step)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        if not is_free or slot is None or lock is None:
            if lock is not None:
                lock.release()
            return False
        self._last_version = step
        try:
            old = self._region.slots()[slot]
            if self._server is not None and old.state == SlotState.COMPLETE:
                self._server.withdraw(old.step)
            self._region.begin(slot, step)
            self._copier.start(slot, local_tensors(tensors), lambda: None)
            self._copier.wait()
            self._finishing = self._pool.submit(self._complete, slot, lock)
        except Exception as error:
            lock.release()
            self._problem = self._describe_error(step, error)
            return False
        return True

    def _agree(self, has_slot: bool, step: int) -> bool:
        """Return whether all ranks have a slot: they publish a version, or none. Warns of errors
        since the last call, and of a version that is skipped."""
        flags = all_gather_ints(_HAS_SLOT * has_slot + _HAS_PROBLEM * bool(self._problem))
        is_free = all(flag & _HAS_SLOT for flag in flags)
        warning = ""
        if any(flag & _HAS_PROBLEM for flag in flags):
            warning = first_message(self._problem)
            self._problem = ""
        elif not is_free:
            warning = (
                f"Version {step} is not published: subscribers still read all older ones. Raise "
                f"publish.keep_versions ({self._config.keep_versions}) or publish.every_steps "
                f"({self._config.every_steps})."
            )
        self._warn(warning)
        return is_free

    def _warn(self, warning: str) -> None:
        """Log a warning, unless the last call did; "" is none."""
        if warning and not self._is_skipping and self._mesh.is_leader:
            logger.warning("%s", warning)
        self._is_skipping = bool(warning)

    def _describe_error(self, version: int, error: Exception) -> str:
        return f"Version {version} is not published: rank {self._mesh.rank}: {error!r}"

    def close(self) -> None:
        """Complete the last version, and remove what is published. Subscribers that read it keep
        the memory until they have finished."""
        self._finish_last()
        if self._problem and not self._is_skipping:
            logger.warning("%s", self._problem)
        self._resources.close()

    def _finish_last(self) -> None:
        """Wait for the checksums of the last version, and keep an error as the problem."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None and (error := finishing.exception()) is not None:
            self._problem = f"The last version is not published: rank {self._mesh.rank}: {error!r}"

    def _wait_for_slot(self) -> tuple[int | None, SlotLock | None]:
        """Return as `_free_slot`, after a wait if configured."""
        slot, lock = self._free_slot()
        if self._config.when_in_use == "wait":
            deadline = time.monotonic() + self._config.max_wait_s
            while slot is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                slot, lock = self._free_slot()
        return slot, lock

    def _free_slot(self) -> tuple[int | None, SlotLock | None]:
        """Return a slot that is neither the newest version nor being read, locked."""
        slots = self._region.slots()
        newest = max(self._region.complete_slots(), default=None)
        for slot in sorted(range(len(slots)), key=lambda slot: slots[slot].step):
            state, version = slots[slot].state, slots[slot].step
            if state == SlotState.COMPLETE and version == newest:
                continue
            if self._server is not None and self._server.idle_s(version) < _BETWEEN_REQUESTS_S:
                continue
            path = slot_lock_path(self._region.path.parent, self._region.rank, slot)
            lock = SlotLock(path, exclusive=True)
            if lock.try_acquire():
                return slot, lock
        return None, None

    def _complete(self, slot: int, lock: SlotLock) -> None:
        """Store the checksums, which makes the version visible, and serve it."""
        try:
            data = self._region.data(slot)
            digests = {
                held.name: xxhash.xxh3_64_hexdigest(data[held.offset : held.offset + held.bytes])
                for held in self._held
            }
            self._region.complete(slot, {"digests": digests})
        finally:
            lock.release()
        if self._server is not None:
            self._serve(self._server, self._region.complete_slots(), digests)

    def _serve(
        self, server: StateServer, slots: Mapping[int, int], digests: Mapping[str, str]
    ) -> None:
        """Serve the newest version. `slots` are those of the complete ones, newest first, and
        `digests` its checksums."""
        version, slot = next(iter(slots.items()))
        data = self._region.data(slot)
        about = {"generation_id": self._generation_id, "version": version, "digests": digests}
        encoded: list[bytes] = []
        if self._deltas is not None:
            self._add_deltas(self._deltas, slots, digests)
            about["deltas"] = self._deltas.chains(digests, len(data))
            encoded = self._deltas.encoded()
        header = json.dumps(about).encode()
        # Most have one length, as those of a status do.
        header = header.ljust(-(-len(header) // _HEADER_BYTES) * _HEADER_BYTES)
        state = FramedState(header, data, *encoded)
        server.offer(version, state, keep=[INDEX_VERSION, STATUS_VERSION, *slots])
        self._offer_status(list(slots))

    def _add_deltas(
        self, deltas: DeltaHistory, slots: Mapping[int, int], digests: Mapping[str, str]
    ) -> None:
        """Add the deltas to the newest version from the one before, which is not overwritten before
        the next call of `publish` has waited for this. After an error, subscribers receive
        shards."""
        if len(slots) < 2:
            return
        (version, slot), (_, base) = list(slots.items())[:2]
        old, new = self._region.data(base), self._region.data(slot)
        try:
            deltas.add(self._held, old, new, self._region.values(base)["digests"], digests)
        except Exception as error:
            rank = self._mesh.rank
            self._problem = f"Version {version} is served without deltas: rank {rank}: {error!r}"

    def _announce(self, where: Mapping[str, Any]) -> None:
        """Write where the run publishes."""
        # What no rank of this generation has locked is of one that was killed.
        remove_unpublished(self._region.path.parent)
        if self._mesh.rank == 0:
            partial = self._published_file.with_suffix(".part")
            partial.write_text(json.dumps(where) + "\n", encoding="utf-8")
            partial.replace(self._published_file)

    def _offer_index(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Serve where all ranks are, and what they hold."""
        if self._server is not None:
            index = json.dumps({"ranks": list(ranks)}).encode()
            self._server.offer(INDEX_VERSION, FramedState(index))

    def _offer_status(self, versions: Sequence[int]) -> None:
        """Serve the versions that this rank has completed."""
        if self._server is None:
            return
        status = json.dumps(
            {"generation_id": self._generation_id, "versions": list(versions)}
        ).encode()
        # All have one length: a client reads the length first, maybe of an earlier one.
        status = status.ljust(_STATUS_BYTES + _VERSION_BYTES * self._region.num_slots)
        state = _ServedStatus(status, self._server, max(versions, default=None))
        self._server.offer(STATUS_VERSION, state, keep=[INDEX_VERSION, *versions])


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model by name, a tied one once."""
    return {name.removeprefix("model."): tensor for name, tensor in model_tensors(model).items()}


def describe_model(spec: ModelSpec, dims: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model for subscribers: family and dimensions, and names in transformers."""
    known = spec.hugging_face
    return {
        "model": {"name": spec.name, "flavor": spec.flavor, "dims": dict(dims)},
        HUGGING_FACE: None if known is None else hugging_face_to_json(known),
    }


class _ServedStatus(FramedState):
    """A status; its readers are about to read the newest version."""

    def __init__(self, status: bytes, server: StateServer, newest: int | None) -> None:
        super().__init__(status)
        self._server, self._newest = server, newest

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        if self._newest is not None:
            self._server.touch(self._newest)
        yield from super().read(start, stop)


def _lock(stack: ExitStack, folder: Path, rank: int) -> None:
    """Acquire the lock of a rank's publisher until `stack` closes, which then removes what the rank
    has published. Raises PublishError if another process holds it."""
    lock = RankLock(folder, rank, PUBLISHED)
    if not lock.acquire(_EARLIER_END_S):
        raise PublishError(
            f"Process {lock.owner() or 'of an unknown number'} already publishes the weights of "
            f"rank {rank}: it holds {lock.path}. Wait until it ends, or end it."
        )

    def remove() -> None:
        # What cannot be removed now, the next start of the run removes.
        with suppress(OSError):
            unpublish(folder, rank)
        lock.release()
        # Other ranks and snapshots may still use it.
        with suppress(OSError):
            folder.rmdir()

    stack.callback(remove)


def _describe(
    plan: SavePlan, mesh: Mesh, identity: RunIdentity, model: Mapping[str, Any]
) -> RegionDescription:
    return RegionDescription(
        run_id=identity.run_id,
        generation_id=identity.generation_id,
        rank=mesh.rank,
        world_size=mesh.world_size,
        root="",
        is_leader=mesh.is_leader,
        mesh={},
        config=model if mesh.rank == 0 else {},
        versions={},
        layouts=layouts_json(plan.layouts),
        tensors=plan.held_tensors(),
        file_layouts=(),
        file_name=plan.tensor_file_name,
        boxes=(),
    )


def _open_server(config: PublishConfig, secret: str, *, is_first: bool) -> StateServer:
    assert config.address is not None
    try:
        address = address_of_interface(config.address)
        listener = None
        if is_first and config.port:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, config.port), family=family)
        return StateServer(address, secret, PURPOSE, listener=listener)
    except (OSError, ValueError) as error:
        raise PublishError(
            f"publish.address {config.address!r}, port {config.port if is_first else 0}, cannot "
            f"be used: {str(error).rstrip('.')}. Give an interface of this machine, or its address."
        ) from None
