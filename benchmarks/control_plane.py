"""The coordinator with many machines: simulated agents over real connections, on one machine.

python -m benchmarks.control_plane [--quick] [--json PATH]

Each agent reports as the agent of a machine does, follows the answers, and waits for decisions.
They are in one process, the coordinator in another one: two cores. Ten machines form a replica.
Ranks fail in one replica after the other; the time to the next generation is that from the report
of the failure until all machines of the replica have joined it. Then the coordinator is killed and
started again; the last time is that until all machines have a lease of it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Comparison, Result, main
from benchmarks.processes import ChildFailed, free_port
from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.distributed.rpc.client import AsyncRpcClient
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    PURPOSE,
    SERVICE,
    Answer,
    Claim,
    FailureKind,
    NodeState,
    Report,
    RunState,
    Vote,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    CALL_S,
    LEARN_S,
    LEASE_S,
    REPORT_S,
    WAIT_S,
)

_SECRET = "a secret of the benchmark"
_PER_REPLICA = 10
_STEADY_S = 10.0
_MAX_FAILURE_S = 1.0
_MAX_OUTAGE_S = 3.0
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """Plan of one run."""

    numbers: Sequence[int]
    """Numbers of machines."""
    failures: int
    """Failures, at most one per replica: the restart policy delays further ones."""


@dataclass
class _Agent:
    """One machine."""

    report: Report
    client: AsyncRpcClient
    vote: Vote = field(default_factory=Vote)
    answer: Answer | None = None
    revision: int = 0
    leased_s: float = 0.0
    report_s: float = REPORT_S
    is_changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_reports: int = 0
    num_failed: int = 0

    async def run(self) -> None:
        """Report at every interval, and when something has changed."""
        while True:
            self.is_changed.clear()
            began_s = time.monotonic()
            try:
                await self._send()
            except RpcError:
                self.num_failed += 1
            with suppress(TimeoutError):
                left_s = self.report_s - (time.monotonic() - began_s)
                # `wait_for` may swallow the cancellation at the end (CPython 3.11).
                async with asyncio.timeout(max(0.0, left_s)):
                    await self.is_changed.wait()

    async def wait(self) -> None:
        """Report when the coordinator has decided something."""
        waited = None
        while True:
            answer, revision = self.answer, self.revision
            if answer is None or (answer.replica, revision) == waited:
                await asyncio.sleep(REPORT_S / 10)
                continue
            waited = answer.replica, revision
            with suppress(RpcError):
                request = {
                    "replica": answer.replica,
                    "revision": revision,
                    "machine": self.report.machine,
                }
                await self.client.call("Wait", request, WAIT_S + CALL_S)
                self.is_changed.set()

    async def _send(self) -> None:
        sent_s, self.num_reports = time.monotonic(), self.num_reports + 1
        report = self.report = replace(self.report, sequence=self.report.sequence + 1)
        vote = replace(self.vote, has_lease=sent_s < self.leased_s)
        request = {"report": report.to_json(), "vote": vote.to_json()}
        response = await self.client.call("Report", request, CALL_S)
        claim = Claim.parse(response["claim"])
        if claim.term > self.vote.term:
            self.is_changed.set()
        self.report_s = claim.report_s
        voters = claim.voters or self.vote.voters
        self.vote = Vote(term=claim.term, answered_s=claim.answered_s, voters=voters)
        if claim.leads:
            self.answer, self.revision = Answer.parse(response["answer"]), response["revision"]
            self.leased_s = sent_s + LEASE_S
            self._follow(self.answer)

    def _follow(self, answer: Answer) -> None:
        report = self.report
        is_member = answer.state is RunState.RUNNING and answer.node_rank >= 0
        if is_member and answer.generation > report.generation:
            self._report(
                phase=NodeState.JOINED,
                generation=answer.generation,
                replica=answer.replica,
                seen_generation=answer.generation,
                seen_replica=answer.replica,
                node_rank=answer.node_rank,
                mesh=answer.mesh,
                store_port=29000 if answer.node_rank == 0 else 0,
                has_progress=False,
                failure=FailureKind.NONE,
            )
        elif is_member and answer.store_port and not report.has_progress:
            self._report(has_progress=True)
        elif answer.state is RunState.FORMING and report.phase is not NodeState.STANDBY:
            self._report(phase=NodeState.STANDBY)

    def _report(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        self.is_changed.set()

    def fail(self) -> None:
        """Report that a rank has failed."""
        self._report(
            phase=NodeState.FAILED,
            failure=FailureKind.DEATH,
            failure_text="rank 0 was killed",
            failure_rank=0,
            failure_status=-9,
        )


def _start(port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_lite", "coordinator", "--bind", f"127.0.0.1:{port}"],
        env={**os.environ, TOKEN: _SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline().startswith("listening on"):
        raise ChildFailed("the coordinator did not start")
    return process


def _members(number: int) -> int:
    """Machines of a replica, of `number` in all."""
    return number // max(1, number // _PER_REPLICA)


async def _fail(agents: Sequence[_Agent], index: int) -> float:
    """Let a rank fail in a replica, and return the time until its next generation."""
    replica = index % agents[0].report.num_replicas
    members = [agent for agent in agents if agent.report.replica == replica]
    generation = members[0].report.generation
    began_s = time.monotonic()
    members[-1].fail()
    await _until(lambda: all(member.report.generation > generation for member in members))
    elapsed_s = time.monotonic() - began_s
    await _until(lambda: all(member.report.has_progress for member in members))
    return elapsed_s


def _agent(index: int, number: int, port: int) -> _Agent:
    num_replicas = max(1, number // _PER_REPLICA)
    report = Report(
        machine=f"{index:032x}",
        sequence=0,
        name=f"node-{index:05d}",
        address="127.0.0.1",
        run_id="run",
        num_machines=number,
        num_replicas=num_replicas,
        num_ranks=8,
        mesh="8",
        fingerprint="2-" + "a" * 64,
    )
    return _Agent(report, AsyncRpcClient(f"127.0.0.1:{port}", SERVICE, _SECRET, PURPOSE))


async def _until(condition: Any, timeout_s: float = _TIMEOUT_S) -> float:
    """Wait until a condition holds, and return for how long."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > timeout_s:
            raise ChildFailed(f"the simulated machines waited for {timeout_s:g} s in vain")
        await asyncio.sleep(0.005)
    return time.monotonic() - began_s


async def _measure(number: int, failures: int) -> list[Result]:
    comparison = Comparison(f"{number} machines")
    failures = min(failures, number // _PER_REPLICA)
    port = free_port()
    coordinator = _start(port)
    process = psutil.Process(coordinator.pid)
    idle_mib = process.memory_info().rss / 2**20
    agents = [_agent(index, number, port) for index in range(number)]
    tasks = []
    try:
        for index, agent in enumerate(agents):
            tasks += [asyncio.create_task(agent.run()), asyncio.create_task(agent.wait())]
            if index % 50 == 49:
                # As many as may not have proved themselves yet.
                await asyncio.sleep(0.05)
        await _until(lambda: all(agent.report.has_progress for agent in agents), 4 * LEARN_S)
        cpu_s, reports = sum(process.cpu_times()[:2]), sum(a.num_reports for a in agents)
        began_s = time.monotonic()
        await asyncio.sleep(_STEADY_S)
        elapsed_s = time.monotonic() - began_s
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        reports = sum(a.num_reports for a in agents) - reports
        used_mib = process.memory_info().rss / 2**20
        times_s = [await _fail(agents, index) for index in range(failures)]
        num_generations = sum(agent.report.generation for agent in agents)
        comparison.same(
            "generations of all machines", num_generations, number + failures * _members(number)
        )
        coordinator.send_signal(signal.SIGKILL)
        coordinator.wait()
        killed_s = time.monotonic()
        coordinator = _start(port)
        await _until(lambda: all(a.leased_s > killed_s + LEASE_S for a in agents))
        outage_s = time.monotonic() - killed_s
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for agent in agents:
            await agent.client.close()
        coordinator.kill()
        coordinator.wait()
    times_s.sort()
    return [
        comparison.value("CPU of the coordinator per report", "ms", cpu_s / reports * 1e3),
        comparison.value("share of a core", "of one core", cpu_s / elapsed_s),
        comparison.value("reports", "per second", reports / elapsed_s),
        comparison.value("memory per machine", "KiB", (used_mib - idle_mib) / number * 1024),
        comparison.value("failure to the next generation, median", "s", times_s[len(times_s) // 2]),
        comparison.value(
            f"the same, the longest of {failures}", "s", times_s[-1], goal=_MAX_FAILURE_S
        ),
        comparison.value(
            "kill of the coordinator to leases of its successor", "s", outage_s, goal=_MAX_OUTAGE_S
        ),
    ]


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure each number of machines."""
    del folder
    for number in plan.numbers:
        yield from asyncio.run(_measure(number, plan.failures))


if __name__ == "__main__":
    main(
        "Simulated machines at one coordinator.",
        measure,
        full=Plan((100, 300, 1000), 100),
        quick=Plan((20,), 2),
    )
