"""Status of a coordinator as text: leadership, machines, and the quorum of the replicas."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import NodeState
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import LEASE_S

_PHASES = {
    NodeState.STANDBY: "standby",
    NodeState.JOINED: "starting",
    NodeState.FAILED: "failed",
    NodeState.ENDED: "finished",
}
_ID_CHARS = 8


def status_text(status: Mapping[str, Any], address: str) -> str:
    """Return the status of the coordinator at `address`, as `client.coordinator_status` returns it,
    in lines and tables."""
    parts = [[*_leadership(status, address)]]
    if status["replicas"]:
        parts += [[*_replicas(status)], _machines(status["replicas"])]
    if status["quorum"]["replicas"]:
        parts.append(_quorum(status["quorum"]))
    return "\n\n".join("\n".join(part) for part in parts)


def _leadership(status: Mapping[str, Any], address: str) -> Iterator[str]:
    name = f"Coordinator {address} (term {status['term']}{', --sole' * status['is_sole']})"
    yield f"{name} leads." if status["leads"] else f"{name} does not lead: {status['problem']}."
    voters, names = status["voters"], _machine_names(status["replicas"])
    if voters:
        shown = [
            names.get(voter["machine"], f"an unknown machine ({voter['machine'][:_ID_CHARS]})")
            for voter in voters
            if not voter["has_acknowledged"]
        ]
        count = len(voters) - len(shown)
        missing = f", but not {', '.join(shown)}" if shown else ""
        yield f"Acknowledged by {count} of the {len(voters)} machines that elect it{missing}."


def _machine_names(replicas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    machines = [machine for replica in replicas for machine in replica["machines"]]
    return {machine["machine"]: machine["name"] for machine in machines}


def _replicas(status: Mapping[str, Any]) -> Iterator[str]:
    size = status["machines_per_replica"]
    yield f"Run {status['run_id']}"
    for replica in status["replicas"]:
        machines = replica["machines"]
        num_machines = min(size, sum(not machine["is_spare"] for machine in machines))
        num_spares = len(machines) - num_machines
        spares = f" and {num_spares} spare" if num_spares else ""
        reason = f" ({replica['reason']})" if replica["reason"] else ""
        state = f"{replica['state']}, generation {replica['generation']}"
        count = f"{num_machines} of {size} machines{spares}"
        yield f"replica {replica['replica']}: {state}, {count}{reason}"


def _machines(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("machine", "replica", "node rank", "generation", "state", "last report")]
    for replica in replicas:
        for machine in sorted(replica["machines"], key=_by_node_rank):
            node_rank = "-" if machine["node_rank"] is None else str(machine["node_rank"])
            rows.append(
                (
                    machine["name"],
                    str(replica["replica"]),
                    "spare" if machine["is_spare"] else node_rank,
                    str(machine["generation"] or "-"),
                    _state(machine),
                    f"{machine['report_age_s']:.1f} s ago",
                )
            )
    return _aligned(rows)


def _by_node_rank(machine: Mapping[str, Any]) -> tuple[bool, int, str]:
    node_rank = machine["node_rank"]
    return node_rank is None, node_rank or 0, machine["name"]


def _state(machine: Mapping[str, Any]) -> str:
    if machine["report_age_s"] >= LEASE_S:
        return "silent"
    phase = machine["phase"]
    is_training = phase == NodeState.JOINED and machine["has_progress"]
    state = "training" if is_training else _PHASES[phase]
    return f"{state}, stopping" if machine["is_stopping"] else state


def _quorum(quorum: Mapping[str, Any]) -> list[str]:
    members = {member["replica_id"]: member for member in quorum["members"]}
    waiting = {member["replica_id"]: member for member in quorum["waiting"]}
    rows = [("replica", "state", "samples", "ranks", "last heartbeat")]
    for replica in quorum["replicas"]:
        replica_id = replica["replica_id"]
        if not replica["is_healthy"]:
            state = "dead"
        elif replica_id in quorum["left_out"]:
            state = "left out"
        elif replica_id in waiting:
            state = f"waiting for {waiting[replica_id]['waited_s']:.1f} s"
        else:
            state = "member" if replica_id in members else "joining"
        known = waiting.get(replica_id) or members.get(replica_id)
        samples = "-" if known is None else str(known["step"])
        ranks = "-" if known is None else str(known["world_size"])
        age = f"{replica['heartbeat_age_s']:.1f} s ago"
        rows.append((_name(replica_id), state, samples, ranks, age))
    lines = ["No quorum has formed."]
    if members:
        age_s, names = quorum["quorum_age_s"], ", ".join(map(_name, members))
        lines = [f"Quorum {quorum['quorum_id']}, formed {age_s:.1f} s ago: {names}"]
    if waiting:
        lines.append(f"Next quorum: {quorum['verdict']}")
    for first, second in quorum["broken_links"]:
        lines.append(f"Broken link: between {_name(first)} and {_name(second)}")
    return [*lines, "", *_aligned(rows)]


def _name(replica_id: str) -> str:
    return replica_id.partition(":")[0]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
