"""Durations of a job of a given size under a strategy, from a scenario."""

from dataclasses import dataclass

from torchtitan_lite.tools.failure_model.intervals import SaveCosts, intervals
from torchtitan_lite.tools.failure_model.scenario import Scenario
from torchtitan_lite.tools.failure_model.strategies import Strategy

_MIB_PER_GIB = 1024.0


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Durations, in seconds, of a job on all of its machines."""

    num_ranks: int
    machines_per_replica: int
    step_s: float
    exchange_s: float
    """Time that a step of several replicas waits for the sum of their gradients."""
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
    machine_loss_s: float
    """What a recovery, or the stall of the other replicas, takes more if a machine is lost."""
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

    def groups_s(ranks: float) -> float:
        return scenario.group_setup_s_per_1k_ranks * ranks / 1000

    costs = _save_costs(scenario, strategy, num_ranks)
    between = intervals(scenario, strategy, num_ranks, costs)
    num_replicas = num_ranks / in_replica
    is_torchft = strategy.replicas == "torchft"
    return JobTimes(
        num_ranks=num_ranks,
        machines_per_replica=in_replica // machine_ranks(scenario, num_ranks),
        step_s=scenario.step_s,
        exchange_s=scenario.exchange_s if strategy.replicas is not None else 0.0,
        save_interval_s=between.save_s,
        save_stall_s=costs.save_stall_s,
        write_s=costs.write_s,
        load_s=costs.load_s,
        snapshot_interval_s=between.snapshot_s,
        snapshot_stall_s=costs.snapshot_stall_s,
        snapshot_load_s=_own_state_s(scenario, scenario.snapshot_load_mib_per_s),
        buddy_interval_s=between.buddy_s,
        buddy_copy_s=costs.buddy_copy_s,
        transfer_s=costs.transfer_s,
        restart_s=scenario.detect_s + scenario.restart_s + groups_s(num_ranks),
        spare_s=scenario.detect_s + scenario.spare_s + groups_s(num_ranks),
        machine_loss_s=_machine_loss_s(scenario, strategy),
        replica_stall_s=scenario.detect_s
        + (scenario.torchft_stall_s if is_torchft else scenario.replica_stall_s)
        + groups_s(num_replicas),
        replica_restart_s=scenario.detect_s
        + (scenario.torchft_restart_s if is_torchft else scenario.replica_restart_s)
        + groups_s(in_replica),
        donor_stall_s=(scenario.torchft_donor_stall_s if is_torchft else scenario.donor_stall_s)
        + groups_s(num_replicas),
    )


def _save_costs(scenario: Scenario, strategy: Strategy, num_ranks: int) -> SaveCosts:
    in_replica = replica_ranks(scenario, num_ranks)
    num_machines = num_ranks / machine_ranks(scenario, num_ranks)
    gib = scenario.state_gib_per_rank

    def whole_state_s(mib_per_s: float) -> float:
        # A replica's ranks hold one copy of the state; all machines read and write it.
        rate = min(num_machines * mib_per_s / _MIB_PER_GIB, scenario.storage_gib_per_s)
        return gib * in_replica / rate

    ours = strategy.snapshots
    stall_s = gib * (scenario.save_s_per_gib if ours else scenario.async_save_s_per_gib)
    transfer_s = _own_state_s(scenario, scenario.heal_mib_per_s)
    return SaveCosts(
        save_stall_s=stall_s,
        write_s=max(stall_s, whole_state_s(scenario.write_mib_per_s)),
        load_s=whole_state_s(scenario.load_mib_per_s) + transfer_s,
        snapshot_stall_s=gib * scenario.snapshot_s_per_gib if ours else 0.0,
        buddy_copy_s=_own_state_s(scenario, scenario.buddy_mib_per_s),
        transfer_s=transfer_s,
    )


def _own_state_s(scenario: Scenario, mib_per_s: float) -> float:
    return scenario.state_gib_per_rank * _MIB_PER_GIB / mib_per_s


def _machine_loss_s(scenario: Scenario, strategy: Strategy) -> float:
    """Return what a failure costs more if the machine is lost: nothing closes its connections."""
    if strategy.replicas is not None:
        return max(0.0, scenario.lost_machine_stall_s - scenario.replica_stall_s)
    return max(0.0, scenario.lost_machine_s - scenario.spare_s)
