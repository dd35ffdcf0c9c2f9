"""Status of a lighthouse as plain data."""

from typing import Any

from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumRules


def describe(rules: QuorumRules, now_s: float, quorum_made_s: float | None) -> dict[str, Any]:
    """Return the last quorum, the waiting and the live replicas, the broken links, the replicas
    left out because of them, and the reason why there is no next quorum yet, all as JSON values.
    Ages and waits are in seconds before `now_s`."""
    quorum, decision = rules.quorum, rules.evaluate(now_s)
    return {
        "quorum_id": quorum.quorum_id if quorum else 0,
        "quorum_age_s": None if quorum_made_s is None else now_s - quorum_made_s,
        "members": [_member(member) for member in quorum.members] if quorum else [],
        "waiting": [
            {**_member(asking.member), "waited_s": now_s - asking.since_s}
            for _, asking in sorted(rules.waiting.items())
        ],
        "replicas": [
            {
                "replica_id": replica_id,
                "heartbeat_age_s": now_s - last_s,
                "is_healthy": rules.is_healthy(replica_id, now_s),
            }
            for replica_id, last_s in sorted(rules.heartbeats.items())
        ],
        "broken_links": [list(link) for link in rules.broken_links(now_s)],
        "left_out": list(decision.left_out),
        "verdict": decision.reason,
        "min_replicas": rules.settings.min_replicas,
        "join_timeout_ms": rules.settings.join_timeout_ms,
        "heartbeat_timeout_ms": rules.settings.heartbeat_timeout_ms,
    }


def _member(member: Any) -> dict[str, Any]:
    return {
        "replica_id": member.replica_id,
        "address": member.address,
        "step": member.step,
        "world_size": member.world_size,
        "commit_failures": member.commit_failures,
    }
