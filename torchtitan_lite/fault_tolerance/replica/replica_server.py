"""Coordinator of one replica, in the process of rank 0: collects the requests and votes of the
ranks, asks the lighthouse for quorums, sends heartbeats, and watches the links to the other
replicas.

It takes the place of torchft's ManagerServer (0.2.0), which listens on all interfaces and
accepts unauthenticated calls, among them one that ends the process. Donors are assigned as there.

Invariants: all ranks of a replica receive the same quorum and the same outcome of a vote; a quorum
is broken at most once, and never one that is not the last.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torchtitan_lite.core.errors import ReplicaError, RpcError, RpcStatus
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.rpc.client import AsyncRpcClient, RpcClient
from torchtitan_lite.distributed.rpc.protocol import Identity
from torchtitan_lite.distributed.rpc.server import CallError, Handler, RpcServer, Service
from torchtitan_lite.fault_tolerance.lighthouse.member import Member
from torchtitan_lite.fault_tolerance.replica.lighthouse_link import (
    HEARTBEAT_INTERVAL_S,
    AgreedQuorum,
    LighthouseLink,
    wait_until_it_answers,
    wait_until_settled,
)

SERVICE = "torchtitan_lite.Replica"
"""Service with the calls Quorum, Vote and Watch of the ranks, and Ping of other replicas."""
_PING_INTERVAL_S = 1.0
_PING_TIMEOUT_S = 2.0
_LINK_TIMEOUT_S = 5.0
"""Time without an answer after which a replica counts as unreachable."""
_FORGET_S = 600.0
"""Time after which an unreachable replica is no longer pinged: its process may never return."""
_SILENT_S = 3.0
"""The same, after a collective has failed, and if it does not answer at once either."""
_PROBE_S = 1.0
_WATCH_S = 20.0
_WATCH_RETRY_S = 1.0
_VOTE_RETRY_S = 0.1


@dataclass(frozen=True)
class ReplicaIdentity:
    """Facts that a replica states about itself in every quorum."""

    run_id: str
    replica_id: str
    """ "NAME:FINGERPRINT:UUID"."""
    store_address: str
    """HOST:PORT of its TCPStore."""
    world_size: int


class ReplicaServer:
    """Server of one replica, at a free port of `host`."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        lighthouse: Callable[[], LighthouseLink],
        *,
        secret: str,
        host: str,
    ) -> None:
        """`lighthouse` is called on the event loop."""
        self._identity, self._make_link, self._secret = identity, lighthouse, secret
        bracketed = f"[{host}]" if ":" in host else host
        self._server = RpcServer(
            f"{bracketed}:0", self._services, name="coordinator", on_stop=self._end
        )
        self._requests: dict[int, tuple[dict[str, Any], asyncio.Future[Any]]] = {}
        self._votes: dict[int, tuple[dict[str, Any], asyncio.Future[Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._quorum: AgreedQuorum | None = None
        self._broken: str | None = None
        """Reason why the last quorum is broken; None if it is not."""
        self._unreachable: set[str] = set()
        self._answered_s: dict[str, float] = {}
        """Time of the last answer of each member of the last quorum to a ping."""
        self._connected_since_s: float | None = None
        self._last_outcome: tuple[int, bool] | None = None
        """Number and outcome of the last vote."""

    def connected_s(self) -> float:
        """Return for how long the lighthouse has answered without interruption."""
        since_s = self._connected_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def address(self) -> str:
        """ "HOST:PORT"."""
        return self._server.address

    def start(self, timeout_s: float) -> None:
        """Start, and block until the lighthouse answers. Raises ReplicaError."""
        try:
            self._server.start()
        except RpcError as error:
            raise ReplicaError(str(error)) from None
        try:
            self._server.run(
                wait_until_it_answers(self._link, self._identity.replica_id, timeout_s)
            )
            self._server.run_on_loop(self._watch_links)
        except ReplicaError:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop; pending calls fail. Idempotent."""
        self._server.stop()

    def _services(self) -> Sequence[Service]:
        self._link = self._make_link()
        self._answered = asyncio.Event()
        self._changed = asyncio.Condition()
        self._has_ended = False
        calls: dict[str, Handler] = {
            "Quorum": self._quorum_call,
            "Vote": self._vote,
            "Watch": self._watch,
            "Ping": self._ping,
        }
        purpose = _purpose(self._identity.replica_id)
        return [Service(Identity(SERVICE, self._secret, purpose), calls)]

    def _watch_links(self) -> None:
        self._spawn(self._send_heartbeats())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        # Otherwise the server would wait for the calls of watchers.
        self._has_ended = True
        async with self._changed:
            self._changed.notify_all()
        for task in list(self._tasks):
            task.cancel()
        with suppress(Exception):
            await self._link.close()

    async def _quorum_call(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._collect(self._requests, request, self._form_quorum)

    async def _vote(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._last_outcome is not None and self._last_outcome[0] == request["vote"]:
            return {"commit": self._last_outcome[1]}
        return await self._collect(self._votes, request, self._count_votes)

    def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        return {}

    async def _watch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Wait until the quorum "quorum_id" is broken, and return why; empty after a while, or if
        the coordinator ends."""
        watched = request["quorum_id"]

        def is_over() -> bool:
            is_broken = self._broken is not None
            return is_broken or self._has_ended or not self._is_current(watched)

        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_over), _WATCH_S)
        return {"reason": (self._broken or "") if self._is_current(watched) else ""}

    async def _collect(
        self,
        round_: dict[int, tuple[dict[str, Any], "asyncio.Future[Any]"]],
        request: dict[str, Any],
        finish: Callable[[list[tuple[dict[str, Any], "asyncio.Future[Any]"]]], Any],
    ) -> dict[str, Any]:
        """Wait until all ranks have sent their requests and return the answer to this one."""
        rank = request["rank"]
        if type(rank) is not int or not 0 <= rank < self._identity.world_size:
            raise CallError(RpcStatus.INVALID_ARGUMENT, f"Rank {rank!r} is out of range.")
        future = asyncio.get_running_loop().create_future()
        if rank in round_:
            # A repeated request: no caller waits for the earlier one any more.
            round_[rank][1].cancel()
        round_[rank] = (request, future)
        if len(round_) == self._identity.world_size:
            complete = [round_[local_rank] for local_rank in sorted(round_)]
            round_.clear()
            self._spawn(finish(complete))
        try:
            return await future
        finally:
            if rank in round_ and round_[rank][1] is future:
                del round_[rank]

    async def _count_votes(self, votes: list[tuple[dict[str, Any], "asyncio.Future[Any]"]]) -> None:
        numbers = {request["vote"] for request, _ in votes}
        # The ranks vote on the same step, or none commits.
        commit = len(numbers) == 1 and all(request["commit"] is True for request, _ in votes)
        self._last_outcome = (max(numbers), commit)
        for _, future in votes:
            if not future.done():
                future.set_result({"commit": commit})

    async def _form_quorum(
        self, requests: list[tuple[dict[str, Any], "asyncio.Future[Any]"]]
    ) -> None:
        try:
            quorum = await self._request_from_lighthouse(requests)
        except Exception as error:
            if not isinstance(error, RpcError):
                logger.exception("A request for a quorum failed")
            for _, future in requests:
                if not future.done():
                    future.set_exception(
                        CallError(RpcStatus.FAILED_PRECONDITION, str(error) or repr(error))
                    )
            return
        if quorum is None:
            return
        await self._adopt(quorum)
        for rank, (_, future) in enumerate(requests):
            if not future.done():
                future.set_result(quorum_for_rank(quorum, self._identity.replica_id, rank))

    async def _request_from_lighthouse(
        self, requests: list[tuple[dict[str, Any], "asyncio.Future[Any]"]]
    ) -> AgreedQuorum | None:
        """Return the next quorum; None if no rank waits for it any more. Raises RpcError."""
        asked = [request for request, _ in requests]
        member = Member(
            run_id=self._identity.run_id,
            replica_id=self._identity.replica_id,
            address=self.address,
            store_address=self._identity.store_address,
            step=min(request["step"] for request in asked),
            world_size=self._identity.world_size,
            state_urls=tuple(request["state_url"] for request in asked),
            token=max(request["token"] for request in asked),
            shrink_only=any(request["shrink_only"] for request in asked),
            commit_failures=max(request["commit_failures"] for request in asked),
        )
        if member.commit_failures:
            await self._probe_silent_members()
        while True:
            try:
                return await self._link.quorum(member, self._unreachable)
            except RpcError as error:
                if error.is_final:
                    raise
                if all(future.done() for _, future in requests):
                    return None
                logger.warning("No quorum: %s", error)
            await wait_until_settled(self._answered)

    async def _probe_silent_members(self) -> None:
        """Find out which members of the last quorum cannot be reached, so that the next one does
        not wait for them to connect."""
        members = () if self._quorum is None else self._quorum.members
        now_s = time.monotonic()
        silent = [
            member
            for member in members
            if now_s - self._answered_s.get(member.replica_id, now_s) >= _SILENT_S
        ]

        async def probe(member: Member) -> None:
            client = self._client_of(member)
            try:
                await client.call("Ping", {}, _PROBE_S)
            except RpcError:
                self._unreachable.add(member.replica_id)
            finally:
                await client.close()

        await asyncio.gather(*map(probe, silent))

    async def _adopt(self, quorum: AgreedQuorum) -> None:
        if self._is_current(quorum.quorum_id):
            return
        async with self._changed:
            self._quorum, self._broken = quorum, None
            self._changed.notify_all()
        peers = [
            member for member in quorum.members if member.replica_id != self._identity.replica_id
        ]
        self._answered_s = {peer.replica_id: time.monotonic() for peer in peers}
        for member in peers:
            self._unreachable.discard(member.replica_id)
            self._spawn(self._ping_regularly(quorum.quorum_id, member, len(peers)))

    async def _break(self, quorum_id: int, reason: str) -> None:
        """Break the quorum, so that the ranks abort what waits for the other replicas."""
        if not self._is_current(quorum_id) or self._broken is not None:
            return
        logger.warning("Quorum broken: %s", reason)
        async with self._changed:
            self._broken = reason
            self._changed.notify_all()

    async def _send_heartbeats(self) -> None:
        while True:
            started_s = time.monotonic()
            try:
                before = self._quorum
                last = await self._link.heartbeat(self._identity.replica_id, self._unreachable)
                self._answered.set()
                if self._connected_since_s is None:
                    self._connected_since_s = started_s
                if last.dead - {self._identity.replica_id}:
                    names = ", ".join(sorted(dead_id.partition(":")[0] for dead_id in last.dead))
                    await self._break(last.quorum_id, f"{names} sends no heartbeats any more")
                if not last.is_member and before is not None:
                    # For example, this process was suspended. The call that it waits for does not
                    # arrive. A quorum that was formed meanwhile is not meant.
                    await self._break(before.quorum_id, "the others continued without this replica")
            except RpcError:
                # A request for a quorum reports it. Training continues meanwhile.
                self._connected_since_s = None
            except Exception:
                # Without heartbeats the replica would be dead to the others.
                logger.exception("A heartbeat failed")
            elapsed_s = time.monotonic() - started_s
            await asyncio.sleep(max(0.0, HEARTBEAT_INTERVAL_S - elapsed_s))

    async def _ping_regularly(self, quorum_id: int, member: Member, num_members: int) -> None:
        """Ping a member of a quorum until there is another quorum and it answers again, and report
        it as unreachable while it does not."""
        client = self._client_of(member)
        interval_s = max(_PING_INTERVAL_S, num_members / 10)
        answered_s, num_failed = time.monotonic(), 0
        try:
            while self._is_current(quorum_id) or member.replica_id in self._unreachable:
                if time.monotonic() - answered_s >= _FORGET_S:
                    self._unreachable.discard(member.replica_id)
                    return
                try:
                    await client.call("Ping", {}, _PING_TIMEOUT_S)
                    answered_s, num_failed = time.monotonic(), 0
                    self._unreachable.discard(member.replica_id)
                    if member.replica_id in self._answered_s:
                        self._answered_s[member.replica_id] = answered_s
                except RpcError as error:
                    num_failed += 1
                    silent_s = time.monotonic() - answered_s
                    # Two, because the first may fail when this process itself was suspended.
                    if num_failed > 1 and silent_s >= _LINK_TIMEOUT_S + interval_s:
                        self._unreachable.add(member.replica_id)
                        name = member.replica_id.partition(":")[0]
                        await self._break(quorum_id, f"{name} cannot be reached: {error}")
                await asyncio.sleep(interval_s)
        finally:
            await client.close()

    def _client_of(self, member: Member) -> AsyncRpcClient:
        return AsyncRpcClient(member.address, SERVICE, self._secret, _purpose(member.replica_id))

    def _is_current(self, quorum_id: int) -> bool:
        return self._quorum is not None and self._quorum.quorum_id == quorum_id


def _purpose(replica_id: str) -> str:
    """Return the purpose of the sessions of one coordinator, so that a call to it cannot be
    redirected to another."""
    return f"replica {replica_id}"


def quorum_for_rank(quorum: AgreedQuorum, own_id: str, rank: int) -> dict[str, Any]:
    """Return a quorum as one rank of the replica `own_id` uses it: its position, and the donor of
    each healing replica. As compute_quorum_results of torchft (0.2.0, src/manager.rs), without its
    initial sync."""
    members = quorum.members
    ids = [member.replica_id for member in members]
    own = ids.index(own_id)
    newest = max(member.step for member in members)
    ahead = [i for i, member in enumerate(members) if member.step == newest]
    behind = [i for i, member in enumerate(members) if member.step != newest]
    # Each rank has a different donor, so that all donors serve.
    donors = {healing: ahead[(i + rank) % len(ahead)] for i, healing in enumerate(behind)}
    donor = donors.get(own)
    return {
        "lighthouse": quorum.lighthouse,
        "quorum_id": quorum.quorum_id,
        "tokens": [member.token for member in members],
        "follows_aborted_step": any(member.commit_failures for member in members),
        "replica_rank": own,
        "replica_world_size": len(members),
        "replica_ids": ids,
        "store_address": members[ahead[rank % len(ahead)]].store_address,
        "max_step": newest,
        "max_replica_rank": ahead.index(own) if own in ahead else None,
        "max_world_size": len(ahead),
        "heal": donor is not None,
        "recover_src_replica_rank": donor,
        "recover_dst_replica_ranks": [
            healing for healing, source in donors.items() if source == own
        ],
        "state_url": None if donor is None else members[donor].state_urls[rank],
    }


class CoordinatorClient:
    """A rank's client of its coordinator. `_quorum` and `should_commit` have the signatures of
    torchft's ManagerClient (0.2.0); `token` is that of the leader's fence."""

    def __init__(self, address: str, secret: str, replica_id: str) -> None:
        self._client = RpcClient(address, SERVICE, secret, _purpose(replica_id))
        self._num_votes = 0

    def _quorum(
        self,
        *,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int,
        init_sync: bool,
        token: int = 0,
    ) -> Any:
        """Request a quorum and return it as an object with the fields of `quorum_for_rank`. Raises
        ReplicaError if this replica cannot take part, RpcError if the request may be repeated."""
        del init_sync
        request = {
            "rank": group_rank,
            "step": step,
            "state_url": checkpoint_metadata,
            "shrink_only": shrink_only,
            "commit_failures": commit_failures,
            "token": token,
        }
        try:
            return SimpleNamespace(**self._client.call("Quorum", request, timeout.total_seconds()))
        except RpcError as error:
            if error.is_final:
                raise ReplicaError(f"This replica cannot join the others: {error}") from None
            raise

    def should_commit(
        self, group_rank: int, step: int, should_commit: bool, timeout: timedelta
    ) -> bool:
        """Vote, and return whether all ranks of this replica voted to commit. Raises RpcError."""
        del step
        self._num_votes += 1
        request = {"rank": group_rank, "vote": self._num_votes, "commit": should_commit}
        deadline_s = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                left_s = max(_VOTE_RETRY_S, deadline_s - time.monotonic())
                return self._client.call("Vote", request, left_s)["commit"]
            except RpcError as error:
                # A vote may be repeated: its outcome is kept until the next one.
                if error.is_final or time.monotonic() >= deadline_s:
                    raise
            time.sleep(_VOTE_RETRY_S)

    def wait_until_broken(self, quorum_id: int) -> str:
        """Block until the quorum is broken, and return why; empty after a while, or if there is
        another quorum."""
        try:
            answer = self._client.call("Watch", {"quorum_id": quorum_id}, 2 * _WATCH_S)
        except RpcError:
            time.sleep(_WATCH_RETRY_S)
            return ""
        return answer["reason"]

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._client.close()
