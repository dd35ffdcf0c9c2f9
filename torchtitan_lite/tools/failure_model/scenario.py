"""The inputs of the failure model: assumptions about a cluster and its job, and measured figures.

Units are in the names. Every field can be overridden by name.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.tools.failure_model.measurements import MEASUREMENTS

_SOURCE, _LEAST = "source", "least"


def _assumed(default: float, source: str, *, least: float = 0.0) -> Any:
    return field(default=default, metadata={_SOURCE: source, _LEAST: least})


_POSITIVE = math.ulp(0.0)


def _measured(name: str) -> Any:
    value, origin = MEASUREMENTS[name]
    least = _POSITIVE if name.endswith("_per_s") else 0.0
    return field(default=value, metadata={_SOURCE: f"measured: {origin}", _LEAST: least})


_MAY_BE_INFINITE = {"mtbf_h", "failure_shape"}
"""Inputs of a cluster without failures, or with failures at equal times."""
_LLAMA_3 = "Llama 3 (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster, a job, and the times that a failure costs it."""

    mtbf_h: float = _assumed(50_676.0, f"per rank; {_LLAMA_3}", least=_POSITIVE)
    """Mean time between failures of one rank, in hours."""
    failure_shape: float = _assumed(
        1.0, "assumption: independent failures, exponential times between them", least=_POSITIVE
    )
    """Shape of the gamma distribution of the times between failures of the cluster; infinite: equal
    times."""
    machine_share: float = _assumed(0.78, "share with hardware at fault in the same report")
    """Share of the failures that lose the machine with its memory."""
    ranks_per_machine: int = _assumed(8, "assumption", least=1)
    ranks_per_replica: int = _assumed(32, "assumption; at most half of the ranks", least=1)
    reserve_share: float = _assumed(0.005, "assumption; for every strategy, at least 1 machine")
    """Reserve machines per machine of the job."""
    replacement_s: float = _assumed(3600.0, "assumption")
    """Time until a lost machine is back as a reserve machine."""
    detect_s: float = _assumed(0.0, "measured times begin at the kill, so they include detection")
    """Further time to detect a failure, such as the timeout of a collective."""
    group_setup_s_per_1k_ranks: float = _assumed(
        3.0, "MegaScale (NSDI 2024): under 30 s for more than 10,000 GPUs"
    )
    """Time to set up process groups, per 1,000 ranks that take part."""
    step_s: float = _assumed(6.0, "assumption", least=_POSITIVE)
    state_gib_per_rank: float = _assumed(12.0, "assumption: weights and optimizer state")
    storage_gib_per_s: float = _assumed(100.0, "assumption", least=_POSITIVE)
    """Limit of the storage for all machines together."""
    exchange_s: float = _assumed(0.0, "FT-HSDP (arXiv 2602.00277): steps no slower than without")
    """Time that each step of several replicas waits for the sum of their gradients."""
    save_interval_steps: int = _assumed(0, "0: the best interval by Young's formula, at most 1 h")
    """Steps between saves to storage."""
    snapshot_interval_steps: int = _assumed(
        0, "0: the best interval by Young's formula, at most 1 h, at least the product's default"
    )
    """Steps between snapshots in shared memory."""
    buddy_interval_steps: int = _assumed(0, "0: each snapshot, as far as buddy_mib_per_s allows")
    """Steps between copies to the memory of a buddy machine."""
    buddy_mib_per_s: float = _assumed(
        256.0, "the default of checkpoint.buddy_mib_per_s, a limit per rank", least=_POSITIVE
    )
    """Rate of the copies to a buddy machine."""
    regrow_after_s: float = _assumed(600.0, "the launcher's default")
    """Time without a change after which a job takes machines that have arrived (traces)."""

    restart_s: float = _measured("restart_s")
    """Time from the death of a rank until all ranks, restarted, train."""
    spare_s: float = _measured("spare_s")
    """Time from the death of a rank until a warm spare has replaced it."""
    lost_machine_s: float = _measured("lost_machine_s")
    """The same where the machine is lost, and a spare machine replaces it; the difference is also
    added to `restart_s`."""
    replica_stall_s: float = _measured("replica_stall_s")
    """Stall of the other replicas when one of them dies, beyond the aborted step."""
    lost_machine_stall_s: float = _measured("lost_machine_stall_s")
    """The same where a machine is lost; the difference is also added to `torchft_stall_s`."""
    replica_restart_s: float = _measured("replica_restart_s")
    """Time from the restart of a replica to its first step, without transfer of a large state."""
    donor_stall_s: float = _measured("donor_stall_s")
    """Stall when a replica rejoins."""
    torchft_stall_s: float = _measured("torchft_stall_s")
    """`replica_stall_s` of a trainer on torchft."""
    torchft_restart_s: float = _measured("torchft_restart_s")
    """`replica_restart_s` of a trainer on torchft."""
    torchft_donor_stall_s: float = _measured("torchft_donor_stall_s")
    """`donor_stall_s` of a trainer on torchft."""
    heal_mib_per_s: float = _measured("heal_mib_per_s")
    """Rate at which a rank receives its state from a rank of a donor or a buddy."""
    load_mib_per_s: float = _measured("load_mib_per_s")
    """Rate at which a machine reads a checkpoint from storage."""
    write_mib_per_s: float = _measured("write_mib_per_s")
    """Rate at which a machine writes a checkpoint to storage."""
    snapshot_load_mib_per_s: float = _measured("snapshot_load_mib_per_s")
    """Rate at which a rank restores a snapshot from shared memory."""
    save_s_per_gib: float = _measured("save_s_per_gib")
    """Wall time that a save adds to training, per GiB of a rank."""
    async_save_s_per_gib: float = _measured("async_save_s_per_gib")
    """The same of torchtitan's asynchronous checkpointing."""
    snapshot_s_per_gib: float = _measured("snapshot_s_per_gib")
    """Wall time that a snapshot adds to training, per GiB of a rank."""

    @property
    def machine_mtbf_s(self) -> float:
        """Mean time between failures of a machine: of any of its ranks."""
        return self.mtbf_h * 3600.0 / self.ranks_per_machine


def overridden(scenario: Scenario, values: Mapping[str, str]) -> Scenario:
    """Return the scenario with values given by name. Raises UserError that names each problem."""
    known = {setting.name: setting for setting in fields(Scenario)}
    changes: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in values.items():
        if name not in known:
            problems.append(f"{name} is unknown; the names are {', '.join(known)}")
            continue
        is_whole = known[name].type is int
        least = known[name].metadata[_LEAST]
        try:
            number: float = int(text) if is_whole else float(text)
        except ValueError:
            kind = "a whole number" if is_whole else "a number"
            problems.append(f"{name} is {text!r}, must be {kind}")
            continue
        if name == "machine_share" and not 0 <= number <= 1:
            problems.append(f"{name} is {text}, must be from 0 to 1")
        elif not least <= number or (math.isinf(number) and name not in _MAY_BE_INFINITE):
            limit = "more than 0" if least == _POSITIVE else f"at least {least:g}"
            problems.append(f"{name} is {text}, must be finite and {limit}")
        else:
            changes[name] = number
    if problems:
        raise UserError("; ".join(problems) + ".")
    return replace(scenario, **changes)


def described(scenario: Scenario) -> Iterable[tuple[str, float, str]]:
    """Yield the name, the value and the source of each input; a value that differs from the
    default is "given"."""
    for setting in fields(Scenario):
        value = getattr(scenario, setting.name)
        source = setting.metadata[_SOURCE] if value == setting.default else "given"
        yield setting.name, value, source
