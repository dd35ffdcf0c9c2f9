"""Time limits of the coordinator, each derived from those before.

A machine may train only while it holds a lease, which each answer of the coordinator renews. One
without an answer for LEASE_S stops its ranks and their checkpoint writers within STOP_S, by itself;
what another machine computes in its place is written only afterwards.

Leases are measured with `lease_clock_s`, because CLOCK_MONOTONIC excludes the time for which a
machine is suspended. Assumptions: clocks of two machines differ in rate by much less than the
margin of LOST_S, and after a suspension a process checks its lease before it writes anything; the
kernel does not guarantee that order.

A machine is probably lost earlier: after SUSPECT_S of silence, or BROKEN_S after its connection
broke. If a spare machine can take its place, the next generation starts then, but writes nothing
that others see until LOST_S (`core.output_fence`): a firewall ends connections, too.
"""

REPORT_S = 0.5
"""Interval of the reports of a machine."""
MAX_REPORT_S = 1.5
"""The same for machines of a large run that are not voters."""
REPORTS_PER_S = 2000
"""Reports that a coordinator receives at most, up to the run for which that takes MAX_REPORT_S."""
LEASE_S = 4.0
"""Time without an answer after which a machine must stop its ranks. Counted from when the last
answered report was sent."""
STOP_S = 3.0
"""Time in which it must have stopped them."""
STANDBY_S = STOP_S * 2 / 3
"""The part of it for ranks to return to standby; then they are killed."""
LOST_S = LEASE_S + STOP_S + 1.0
"""Time without a report after which a machine is lost. Counted from when the coordinator received
the last report, and that is later than it was sent; the last second is a margin."""
SUSPECT_S = 3.0
"""Time without a report, at intervals of REPORT_S, after which a machine is probably lost. Agents
that are paused for a second, and a report that is lost, are no reason."""
BROKEN_S = 0.5
"""Time in which an agent whose connection broke must report again: it does so at once."""
QUIET_S = 1.25
"""Time without a report of any machine that trains after which the silence of one means nothing:
the coordinator itself, or its network, may have been paused."""
ALL_LOST_S = 60.0
"""Time in place of LOST_S if all machines were silent, which is more likely an outage of the
coordinator or its network: then no machine is replaced before it is certain."""
OUTAGE_S = LEASE_S
"""Time without a report of any machine that counts as such an outage."""
HOLD_S = 60.0
"""Time for which a request to stop waits for ranks that leave or start because of a resize."""
ACKNOWLEDGED_S = 3.0
"""Age of the last acknowledgment of a voter up to which it counts for a coordinator."""
LEARN_S = ACKNOWLEDGED_S + LOST_S
"""Time after its election in which a coordinator gives away no place of a machine that it has not
heard: the last answer of its predecessor may be ACKNOWLEDGED_S later than the election, and a lease
is lost LOST_S after it."""
WITHHELD_S = LEARN_S + LOST_S
"""Time after the start of a generation that must wait with its outputs, after which no coordinator
is needed to allow them: a new coordinator may renew the lease of a lost machine until it hears of
the generation, within LEARN_S."""
PASS_S = 0.1
"""Interval at which all replicas of a large run are looked at: a report that says nothing new must
not cost more the more there are."""
WAIT_S = 20.0
"""Longest time for which a machine waits for news in one call."""
CALL_S = 1.5
"""Timeout of a report. A report per lease may fail. The next one takes another connection, and must
arrive within SUSPECT_S."""
BLOCKED_S = 2.0
"""Time after which an agent whose main loop does not run stops to report."""


def report_interval_s(num_machines: int) -> float:
    """Return the interval of the reports of a machine that is not a voter."""
    return min(max(REPORT_S, num_machines / REPORTS_PER_S), MAX_REPORT_S)
