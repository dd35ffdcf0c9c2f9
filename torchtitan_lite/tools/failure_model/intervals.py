"""Intervals of saves, snapshots and copies to buddies: as given, or the best ones."""

import math
from dataclasses import dataclass

from torchtitan_lite.tools.failure_model.scenario import Scenario
from torchtitan_lite.tools.failure_model.strategies import Strategy

_MAX_INTERVAL_S = 3600.0
_MAX_SNAPSHOT_SHARE = 0.03
"""Limit of the default of `checkpoint.ram_interval`."""


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """Durations of saves, snapshots and copies, and of reading them, in seconds."""

    save_stall_s: float
    write_s: float
    load_s: float
    snapshot_stall_s: float
    buddy_copy_s: float
    transfer_s: float


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Training time between saves, between snapshots, and between copies, in seconds."""

    save_s: float
    snapshot_s: float
    buddy_s: float


def intervals(
    scenario: Scenario, strategy: Strategy, num_ranks: int, costs: SaveCosts
) -> Intervals:
    """Return the intervals of a strategy, by Young's formula for the failures after which it reads
    snapshots or storage.

    With buddies, the best of three choices: snapshots at the interval for all failures, of which
    as many are copied as the rate of copies allows; snapshots as far apart as copies; and saves as
    frequent as without buddies, where copies are slow.
    """
    machine_share = scenario.machine_share
    if strategy.replicas is not None:
        return _intervals(scenario, num_ranks, costs, 0.0, 0.0)
    if not strategy.snapshots:
        return _intervals(scenario, num_ranks, costs, 0.0, 1.0)
    without_buddies = _intervals(scenario, num_ranks, costs, 1 - machine_share, machine_share)
    if not strategy.buddies:
        return without_buddies
    choices = (
        _intervals(scenario, num_ranks, costs, 1.0, 0.0),
        _intervals(scenario, num_ranks, costs, 1.0, 0.0, least_snapshot_s=costs.buddy_copy_s),
        without_buddies,
    )
    return min(choices, key=lambda some: _lost_share(scenario, num_ranks, costs, some))


def _intervals(
    scenario: Scenario,
    num_ranks: int,
    costs: SaveCosts,
    snapshot_share: float,
    storage_share: float,
    *,
    least_snapshot_s: float = 0.0,
) -> Intervals:
    """Return the intervals for the shares of the failures that read snapshots and storage."""
    step_s = scenario.step_s
    save_s = scenario.save_interval_steps * step_s or _best_interval_s(
        scenario, num_ranks, storage_share, costs.save_stall_s
    )
    # The best interval, at least the product's default.
    snapshot_s = scenario.snapshot_interval_steps * step_s or max(
        _best_interval_s(scenario, num_ranks, snapshot_share, costs.snapshot_stall_s),
        costs.snapshot_stall_s / _MAX_SNAPSHOT_SHARE,
        least_snapshot_s,
    )
    snapshot_s = _whole_steps_s(scenario, snapshot_s)
    buddy_s = max(scenario.buddy_interval_steps * step_s, costs.buddy_copy_s, snapshot_s)
    return Intervals(
        # A save begins when the one before is durable.
        save_s=_whole_steps_s(scenario, max(save_s, costs.write_s)),
        snapshot_s=snapshot_s,
        buddy_s=math.ceil(round(buddy_s / snapshot_s, 9)) * snapshot_s,
    )


def _lost_share(scenario: Scenario, num_ranks: int, costs: SaveCosts, some: Intervals) -> float:
    """Return the share of the time of a job with buddies that saves, snapshots and the repeated
    steps and reads after failures take, to the first order."""
    from_buddy_s = costs.buddy_copy_s + some.buddy_s / 2 + costs.transfer_s
    from_storage_s = costs.write_s + some.save_s / 2 + costs.load_s
    failure_s = (1 - scenario.machine_share) * some.snapshot_s / 2
    failure_s += scenario.machine_share * min(from_buddy_s, from_storage_s)
    blocked = costs.save_stall_s / some.save_s + costs.snapshot_stall_s / some.snapshot_s
    return blocked + failure_s * _failures_per_s(scenario, num_ranks)


def _best_interval_s(scenario: Scenario, num_ranks: int, share: float, stall_s: float) -> float:
    """Return Young's interval for a `share` of the failures."""
    rate = share * _failures_per_s(scenario, num_ranks)
    return min(math.sqrt(2 * stall_s / rate) if rate else math.inf, _MAX_INTERVAL_S)


def _failures_per_s(scenario: Scenario, num_ranks: int) -> float:
    return num_ranks / (scenario.mtbf_h * 3600)


def _whole_steps_s(scenario: Scenario, seconds: float) -> float:
    """Round up to whole steps, at least one."""
    return max(1, math.ceil(round(seconds / scenario.step_s, 9))) * scenario.step_s
