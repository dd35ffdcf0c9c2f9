"""Machines and several coordinators on a clock: messages are delayed, links are cut and connections
end, coordinators and agents are paused, killed and started at any time."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from torchtitan_lite.fault_tolerance.supervision.coordinator.coordinator import Coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.leadership import new_term
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    Claim,
    NodeState,
    Report,
    RunState,
    Vote,
    VoterList,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Busy,
    Rejected,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    BROKEN_S,
    CALL_S,
    LEASE_S,
    REPORT_S,
    STOP_S,
    WITHHELD_S,
)

_TICK_S = 0.25
_ABORT_S = 5.0
"""Longest time in which ranks return to standby, see `Member`."""
_RECONNECT_S = 1.5
_TIMEOUT_S = 90.0
"""Time without a place and without being a spare after which a machine is started again."""


@dataclass
class _Server:
    coordinator: Coordinator
    is_paused: bool = False
    queue: list[Callable[[], None]] = field(default_factory=list)
    """Requests that arrived while it was paused."""


@dataclass
class _Machine:
    """As `Member` and `RemoteLink`, as slow as is allowed: it trains until STOP_S after the end of
    its lease."""

    report: Report
    server: int
    vote: Vote
    leased_s: float = 0.0
    """End of the lease."""
    place: tuple[int, int, int] | None = None
    """Replica, generation and node rank for which its ranks train."""
    stops_s: float | None = None
    """When its ranks, which were ordered to stop, have returned to standby."""
    writes_after_s: float = 0.0
    """When its ranks may write what others see."""
    joined_s: float = 0.0
    served_s: float = 0.0
    next_report_s: float = 0.0
    waits_until_s: float = 0.0
    """End of the timeout of the call that it waits for; 0 if it waits for none."""


class World:
    """A run on `num_machines` machines and some spare ones."""

    def __init__(
        self,
        seed: int,
        *,
        num_machines: int,
        num_spares: int,
        num_replicas: int,
        is_sole: bool,
        has_fence: bool = True,
    ) -> None:
        self.random, self.now_s = Random(seed), 1000.0
        self._is_sole, self._num = is_sole, count()
        self._has_fence = has_fence
        self._num_machines, self._num_replicas = num_machines, num_replicas
        self.servers: dict[int, _Server] = {}
        self.machines: dict[str, _Machine] = {}
        self.cut: set[tuple[str, int]] = set()
        self.max_delay_s = 0.1
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.start_server()
        for _ in range(num_machines + num_spares):
            self.start_machine()

    def start_server(self, *, is_sole: bool = False) -> None:
        term = new_term(self.now_s, self.random)
        coordinator = Coordinator(term, is_sole=is_sole or self._is_sole)
        self.servers[next(self._num)] = _Server(coordinator)

    def start_machine(self) -> None:
        """Start a machine that knows the voters: one that does not may begin another run at a
        coordinator that does not, either."""
        name = f"m{next(self._num)}"
        lists = [machine.vote.voters for machine in self.machines.values()]
        newest = max(lists, key=lambda text: VoterList.parse(text).version, default="")
        report = Report(
            machine=name,
            sequence=0,
            name=name,
            address="10.0.0.1",
            run_id="run",
            num_machines=self._num_machines,
            num_replicas=self._num_replicas,
            num_ranks=1,
            mesh="1",
            fingerprint="2-abc",
        )
        server = self.random.choice([*self.servers]) if self.servers else -1
        self.machines[name] = _Machine(report, server, Vote(voters=newest), served_s=self.now_s)

    def resume(self, server: _Server) -> None:
        server.is_paused = False
        for process in server.queue:
            process()
        server.queue = []

    def run(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Let time pass, and `check` after each tick."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += _TICK_S
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            for machine in list(self.machines.values()):
                self._act(machine)
            check()

    def places(self) -> dict[tuple[int, int], list[str]]:
        """Return the machines that train, by replica and generation."""
        places: dict[tuple[int, int], list[str]] = {}
        for name, machine in self.machines.items():
            if machine.place is not None:
                places.setdefault(machine.place[:2], []).append(name)
        return places

    def check(self) -> None:
        """Check that no two generations of a replica write at once, and no two machines in one
        place."""
        places = [
            machine.place
            for machine in self.machines.values()
            if machine.place is not None and machine.writes_after_s <= self.now_s
        ]
        generations = {place[:2] for place in places}
        assert len(generations) == len({replica for replica, _ in generations}), self.places()
        assert len(places) == len({*places}), places

    def disconnect(self, name: str) -> None:
        """End the connection of a machine, of which its coordinator learns."""
        server = self.servers.get(self.machines[name].server)
        if server is None:
            return

        def process() -> None:
            if server.is_paused:
                server.queue.append(process)
                return
            server.coordinator.disconnected(name, self.now_s)
            self._after(BROKEN_S, check)

        def check() -> None:
            if server.is_paused:
                server.queue.append(lambda: self._after(BROKEN_S, check))
            else:
                server.coordinator.check_breaks(self.now_s)

        process()
        # One that lives connects again.
        self.machines[name].next_report_s = self.now_s

    def _act(self, machine: _Machine) -> None:
        if machine.place is not None and self.now_s >= machine.leased_s + STOP_S:
            self._stand_by(machine, has_lost_lease=True)
        if machine.stops_s is not None and self.now_s >= machine.stops_s:
            self._stand_by(machine, has_lost_lease=False)
        if machine.place is not None and self.now_s >= machine.joined_s + 1:
            machine.report = replace(machine.report, has_progress=True, trained_mesh="1")
        if self.now_s - machine.served_s > _TIMEOUT_S:
            del self.machines[machine.report.machine]
            self.start_machine()
        elif machine.waits_until_s and self.now_s >= machine.waits_until_s:
            machine.waits_until_s = 0.0
            self._reconnect(machine)
        elif not machine.waits_until_s and self.now_s >= machine.next_report_s:
            self._send(machine)

    def _reconnect(self, machine: _Machine) -> None:
        if self.servers:
            machine.server = self.random.choice([*self.servers])

    def _delay_s(self) -> float:
        return self.random.uniform(0.0, self.max_delay_s)

    def _send(self, machine: _Machine) -> None:
        sent_s, number = self.now_s, machine.server
        machine.next_report_s, machine.waits_until_s = sent_s + REPORT_S, sent_s + CALL_S
        report = replace(machine.report, sequence=machine.report.sequence + 1)
        vote = replace(machine.vote, has_lease=sent_s < machine.leased_s)
        machine.report = report

        def process() -> None:
            server = self.servers.get(number)
            if server is None or (report.machine, number) in self.cut:
                return
            if server.is_paused:
                server.queue.append(process)
                return
            try:
                claim, answer = server.coordinator.report(report, vote, self.now_s)
            except (Busy, Rejected):
                return
            self._after(self._delay_s(), lambda: self._receive(machine, sent_s, claim, answer))

        self._after(self._delay_s(), process)

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._num), event))

    def _receive(
        self, machine: _Machine, sent_s: float, claim: Claim, answer: Answer | None
    ) -> None:
        is_gone = self.machines.get(machine.report.machine) is not machine
        if is_gone or self.now_s >= sent_s + CALL_S or machine.next_report_s > sent_s + REPORT_S:
            return
        machine.waits_until_s = 0.0
        if claim.term < machine.vote.term:
            self._reconnect(machine)
            return
        is_new = claim.term > machine.vote.term
        if is_new:
            machine.next_report_s = self.now_s
        elif answer is None and self.now_s - machine.leased_s + LEASE_S > _RECONNECT_S:
            self._reconnect(machine)
        voters, known = VoterList.parse(claim.voters), VoterList.parse(machine.vote.voters)
        newest = claim.voters if voters.version > known.version else machine.vote.voters
        machine.vote = Vote(term=claim.term, answered_s=claim.answered_s, voters=newest)
        if answer is not None:
            machine.leased_s, machine.served_s = sent_s + LEASE_S, self.now_s
            self._follow(machine, answer)

    def _follow(self, machine: _Machine, answer: Answer) -> None:
        report = machine.report
        machine.report = replace(
            report,
            seen_generation=max(report.seen_generation, answer.generation),
            seen_replica=answer.replica,
        )
        is_member = answer.state is RunState.RUNNING and answer.node_rank >= 0
        place = (answer.replica, answer.generation, answer.node_rank) if is_member else None
        if place is not None and place == machine.place and not answer.withholds_outputs:
            machine.writes_after_s = 0.0
        if machine.place is not None:
            is_rebuilt = answer.state is RunState.REBUILDING
            if place != machine.place and not is_rebuilt and machine.stops_s is None:
                machine.stops_s = self.now_s + self.random.choice([0.0, 0.5, _ABORT_S])
        elif place is not None and answer.generation > report.generation:
            machine.place, machine.joined_s = place, self.now_s
            is_withheld = answer.withholds_outputs and self._has_fence
            machine.writes_after_s = self.now_s + WITHHELD_S if is_withheld else 0.0
            machine.report = replace(
                machine.report,
                phase=NodeState.JOINED,
                generation=answer.generation,
                replica=answer.replica,
                node_rank=answer.node_rank,
                mesh=answer.mesh,
                store_port=29000 if answer.node_rank == 0 else 0,
                has_progress=False,
                has_lost_lease=False,
            )

    def _stand_by(self, machine: _Machine, *, has_lost_lease: bool) -> None:
        machine.place = machine.stops_s = None
        machine.report = replace(
            machine.report, phase=NodeState.STANDBY, has_lost_lease=has_lost_lease
        )
