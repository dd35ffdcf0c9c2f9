"""The status of a coordinator, as data and as text."""

from typing import Any

from tests.unit.fault_tolerance.supervision.coordinator.several_coordinators import World
from torchtitan_lite.fault_tolerance.supervision.coordinator.coordinator import Coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.status import status_text
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import LEASE_S

_NO_QUORUM = {"replicas": [], "members": [], "waiting": []}


def _machine(name: str, **changes: Any) -> dict[str, Any]:
    machine = {
        "machine": name * 8,
        "name": name,
        "node_rank": None,
        "is_spare": False,
        "generation": 0,
        "phase": "standby",
        "has_progress": False,
        "is_stopping": False,
        "report_age_s": 0.25,
    }
    return machine | changes


def _status(**changes: Any) -> dict[str, Any]:
    status = {
        "leads": True,
        "problem": "",
        "term": 7,
        "is_sole": False,
        "voters": [],
        "run_id": "run1",
        "machines_per_replica": 2,
        "replicas": [],
        "quorum": _NO_QUORUM,
    }
    return status | changes


def _text(status: dict[str, Any]) -> list[str]:
    return status_text(status, "10.0.0.1:29520").splitlines()


def test_machines_are_shown_by_replica_and_node_rank() -> None:
    trains = {"generation": 3, "phase": "joined"}
    running = [
        _machine("b", node_rank=1, **trains, is_stopping=True),
        _machine("a", node_rank=0, **trains, has_progress=True),
        _machine("spare", is_spare=True),
    ]
    forming = [
        _machine("c", node_rank=1, generation=2, phase="failed", report_age_s=1.0),
        _machine("d", node_rank=0, generation=2, phase="joined", report_age_s=LEASE_S),
        _machine("e"),
    ]
    replicas = [
        {"replica": 0, "state": "running", "generation": 3, "reason": "", "machines": running},
        {
            "replica": 1,
            "state": "forming",
            "generation": 2,
            "reason": "lost d",
            "machines": forming,
        },
    ]
    voters = [
        {"machine": "a" * 8, "has_acknowledged": True},
        {"machine": "b" * 8, "has_acknowledged": False},
        {"machine": "0123456789", "has_acknowledged": False},
    ]
    assert _text(_status(replicas=replicas, voters=voters)) == [
        "Coordinator 10.0.0.1:29520 (term 7) leads.",
        "Acknowledged by 1 of the 3 machines that elect it, but not b, an unknown machine "
        "(01234567).",
        "",
        "Run run1",
        "replica 0: running, generation 3, 2 of 2 machines and 1 spare",
        "replica 1: forming, generation 2, 2 of 2 machines and 1 spare (lost d)",
        "",
        "machine  replica  node rank  generation  state               last report",
        "a        0        0          3           training            0.2 s ago",
        "b        0        1          3           starting, stopping  0.2 s ago",
        "spare    0        spare      -           standby             0.2 s ago",
        "d        1        0          2           silent              4.0 s ago",
        "c        1        1          2           failed              1.0 s ago",
        "e        1        -          -           standby             0.2 s ago",
    ]


def test_the_quorum_is_shown_if_there_are_replicas() -> None:
    def member(number: int, step: int) -> dict[str, Any]:
        return {"replica_id": f"replica_{number}:f:u", "step": step, "world_size": 4}

    def replica(number: int, *, is_healthy: bool = True) -> dict[str, Any]:
        id_ = f"replica_{number}:f:u"
        return {"replica_id": id_, "heartbeat_age_s": 0.5, "is_healthy": is_healthy}

    quorum = {
        "quorum_id": 12,
        "quorum_age_s": 3.0,
        "members": [member(number, 64) for number in range(4)],
        "waiting": [{**member(1, 80), "waited_s": 2.0}, {**member(2, 80), "waited_s": 1.0}],
        "replicas": [*map(replica, range(3)), replica(3, is_healthy=False), replica(4)],
        "broken_links": [["replica_1:f:u", "replica_2:f:u"]],
        "left_out": ["replica_2:f:u"],
        "verdict": "replica_4:f:u may still join",
    }
    assert _text(_status(is_sole=True, quorum=quorum))[:-6] == [
        "Coordinator 10.0.0.1:29520 (term 7, --sole) leads.",
        "",
        "Quorum 12, formed 3.0 s ago: replica_0, replica_1, replica_2, replica_3",
        "Next quorum: replica_4:f:u may still join",
        "Broken link: between replica_1 and replica_2",
        "",
    ]
    rows = [row.split()[:-3] for row in _text(_status(quorum=quorum))[-5:]]
    assert rows == [
        ["replica_0", "member", "64", "4"],
        ["replica_1", "waiting", "for", "2.0", "s", "80", "4"],
        ["replica_2", "left", "out", "80", "4"],
        ["replica_3", "dead", "64", "4"],
        ["replica_4", "joining", "-", "-"],
    ]
    none = {**quorum, "members": [], "waiting": [], "broken_links": []}
    assert "No quorum has formed." in _text(_status(quorum=none))


def test_a_coordinator_says_what_it_knows() -> None:
    status = Coordinator(7).status(100.0)
    assert _text({**status, "quorum": _NO_QUORUM}) == [
        "Coordinator 10.0.0.1:29520 (term 7) does not lead: no machine has reported."
    ]
    world = World(1, num_machines=2, num_spares=1, num_replicas=1, is_sole=False)
    world.run(40, lambda: None)
    ((_, server),) = world.servers.items()
    status = server.coordinator.status(world.now_s)
    assert status["leads"] and len(status["voters"]) == 3
    assert all(voter["has_acknowledged"] for voter in status["voters"])
    (replica,) = status["replicas"]
    assert (replica["state"], status["machines_per_replica"]) == ("running", 2)
    assert sorted(machine["node_rank"] is None for machine in replica["machines"]) == [0, 0, 1]
    assert [machine["is_spare"] for machine in replica["machines"]] == [False, False, True]
    assert all(machine["report_age_s"] < 1 for machine in replica["machines"])
    world.machines.clear()
    world.now_s += LEASE_S
    status = server.coordinator.status(world.now_s)
    assert not status["leads"] and "0 of the 3 machines" in status["problem"]
    assert [row.split()[-4] for row in _text({**status, "quorum": _NO_QUORUM})[-3:]] == [
        "silent"
    ] * 3
