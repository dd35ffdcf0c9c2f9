"""Durations of a job of a given size under a strategy, from a scenario."""

import math
from dataclasses import dataclass

from torchtitan_lite.tools.failure_model.scenario import Scenario
from torchtitan_lite.tools.failure_model.strategies import Strategy

_MAX_INTERVAL_S = 3600.0
_MAX_SNAPSHOT_SHARE = 0.03
"""Limit of the default of `checkpoint.ram_interval`."""
_MIB_PER_GIB = 1024.0


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Durations, in seconds, of a job on all of its machines."""

    num_ranks: int
    machines_per_replica: int
    step_s: float
    save_interval_s: float
    """Training time between two saves, at least the time that a save needs to be durable."""
    save_stall_s: float
    """Time for which a save blocks training."""
    write_s: float
    """Time from the begin of a save until it is durable, at least `save_stall_s`."""
    load_s: float
    """Time to load a checkpoint from storage."""
    snapshot_interval_s: float
    snapshot_stall_s: float
    snapshot_load_s: float
    buddy_interval_s: float
    buddy_copy_s: float
    """Time that a copy to a buddy machine needs until it is complete."""
    transfer_s: float
    """Time in which a rank receives its state from another machine."""
    restart_s: float
    """Detection and restart of all ranks, process groups included."""
    spare_s: float
    """Detection and replacement by a spare, process groups included."""
    replica_stall_s: float
    replica_restart_s: float
    donor_stall_s: float

    @property
    def training_share(self) -> float:
        """Share of the time between saves in which steps are computed, and not snapshots."""
        return self.snapshot_interval_s / (self.snapshot_interval_s + self.snapshot_stall_s)


def replica_ranks(scenario: Scenario, num_ranks: int) -> int:
    """Return the number of ranks that hold one copy of the state: a replica."""
    return min(scenario.ranks_per_replica, max(1, num_ranks // 2))


def machine_ranks(scenario: Scenario, num_ranks: int) -> int:
    """Return the number of ranks of a machine, at most those of a replica."""
    return min(scenario.ranks_per_machine, replica_ranks(scenario, num_ranks))


def job_times(scenario: Scenario, strategy: Strategy, num_ranks: int) -> JobTimes:
    """Return the durations of a job with `num_ranks` ranks."""
    in_replica = replica_ranks(scenario, num_ranks)
    num_machines = num_ranks / machine_ranks(scenario, num_ranks)
    gib = scenario.state_gib_per_rank

    def whole_state_s(mib_per_s: float) -> float:
        # A replica's ranks hold one copy of the state; all machines read and write it.
        rate = min(num_machines * mib_per_s / _MIB_PER_GIB, scenario.storage_gib_per_s)
        return gib * in_replica / rate

    def own_state_s(mib_per_s: float) -> float:
        return gib * _MIB_PER_GIB / mib_per_s

    def groups_s(ranks: float) -> float:
        return scenario.group_setup_s_per_1k_ranks * ranks / 1000

    ours = strategy.snapshots
    stall_s = gib * (scenario.save_s_per_gib if ours else scenario.async_save_s_per_gib)
    write_s = max(stall_s, whole_state_s(scenario.write_mib_per_s))
    snapshot_stall_s = gib * scenario.snapshot_s_per_gib if ours else 0.0
    snapshot_s = _snapshot_interval_s(scenario, strategy, num_ranks, snapshot_stall_s)
    buddy_copy_s = own_state_s(scenario.buddy_mib_per_s)
    buddy_s = max(scenario.buddy_interval_steps * scenario.step_s, buddy_copy_s, snapshot_s)
    transfer_s = own_state_s(scenario.heal_mib_per_s)
    num_replicas = num_ranks / in_replica
    is_torchft = strategy.replicas == "torchft"
    return JobTimes(
        num_ranks=num_ranks,
        machines_per_replica=in_replica // machine_ranks(scenario, num_ranks),
        step_s=scenario.step_s,
        save_interval_s=_save_interval_s(scenario, strategy, num_ranks, stall_s, write_s),
        save_stall_s=stall_s,
        write_s=write_s,
        load_s=whole_state_s(scenario.load_mib_per_s) + transfer_s,
        snapshot_interval_s=snapshot_s,
        snapshot_stall_s=snapshot_stall_s,
        snapshot_load_s=own_state_s(scenario.snapshot_load_mib_per_s),
        buddy_interval_s=math.ceil(round(buddy_s / snapshot_s, 9)) * snapshot_s,
        buddy_copy_s=buddy_copy_s,
        transfer_s=transfer_s,
        restart_s=scenario.detect_s + scenario.restart_s + groups_s(num_ranks),
        spare_s=scenario.detect_s + scenario.spare_s + groups_s(num_ranks),
        replica_stall_s=scenario.detect_s
        + (scenario.torchft_stall_s if is_torchft else scenario.replica_stall_s)
        + groups_s(num_replicas),
        replica_restart_s=scenario.detect_s
        + (scenario.torchft_restart_s if is_torchft else scenario.replica_restart_s)
        + groups_s(in_replica),
        donor_stall_s=(scenario.torchft_donor_stall_s if is_torchft else scenario.donor_stall_s)
        + groups_s(num_replicas),
    )


def _save_interval_s(
    scenario: Scenario, strategy: Strategy, num_ranks: int, stall_s: float, write_s: float
) -> float:
    """Return the training time between saves: as given, or the best one for the failures after
    which the strategy reads storage."""
    interval_s = scenario.save_interval_steps * scenario.step_s
    if not interval_s:
        share = scenario.machine_share if strategy.snapshots else 1.0
        if strategy.buddies or strategy.replicas is not None:
            share = 0.0
        interval_s = _best_interval_s(scenario, num_ranks, share, stall_s)
    return _whole_steps_s(scenario, max(interval_s, write_s))


def _snapshot_interval_s(
    scenario: Scenario, strategy: Strategy, num_ranks: int, stall_s: float
) -> float:
    """Return the training time between snapshots: as given, or the best one for the failures after
    which the strategy reads snapshots, at least the product's default."""
    interval_s = scenario.snapshot_interval_steps * scenario.step_s
    if not interval_s:
        share = 1.0 if strategy.buddies else 1 - scenario.machine_share
        if strategy.replicas is not None:
            share = 0.0
        best_s = _best_interval_s(scenario, num_ranks, share, stall_s)
        interval_s = max(best_s, stall_s / _MAX_SNAPSHOT_SHARE)
    return _whole_steps_s(scenario, interval_s)


def _best_interval_s(scenario: Scenario, num_ranks: int, share: float, stall_s: float) -> float:
    """Return Young's interval for a `share` of the failures."""
    rate = share * num_ranks / (scenario.mtbf_h * 3600)
    return min(math.sqrt(2 * stall_s / rate) if rate else math.inf, _MAX_INTERVAL_S)


def _whole_steps_s(scenario: Scenario, seconds: float) -> float:
    """Round up to whole steps, at least one."""
    return max(1, math.ceil(round(seconds / scenario.step_s, 9))) * scenario.step_s
