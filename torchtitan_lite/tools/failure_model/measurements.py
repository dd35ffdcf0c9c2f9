"""Figures measured in this repository, by name, with their origins.

Written by `make docs` from benchmarks/results/.
"""

MEASUREMENTS: dict[str, tuple[float, str]] = {
    "restart_s": (
        7.57,
        "rank_recovery.json, 1 of 4 ranks killed, FSDP-4, until training again, median of 3, peer",
    ),
    "spare_s": (
        1.01,
        "rank_recovery.json, 1 of 4 ranks killed, FSDP-4, until training again, median of 3, ours",
    ),
    "lost_machine_s": (
        4.82,
        "lost_machine.json, 1 of 2 machines lost, 1 spare, state from buddy: it falls silent, "
        "until training again, median of 3, ours",
    ),
    "replica_stall_s": (
        0.181,
        "recovery.json, ours, builtin lighthouse, survivor's stall, median of 5, ours",
    ),
    "lost_machine_stall_s": (
        2.06,
        "recovery.json, link of 1 of 2 replicas cut for 20 s, longest pause of the other replica, "
        "ours",
    ),
    "replica_restart_s": (
        3.4,
        "recovery.json, ours, builtin lighthouse, restart to first committed step, median, ours",
    ),
    "donor_stall_s": (
        0.174,
        "recovery.json, ours, builtin lighthouse, donor's stall, median, ours",
    ),
    "torchft_stall_s": (
        0.97,
        "recovery.json, ours, builtin lighthouse, survivor's stall, median of 5, peer",
    ),
    "torchft_restart_s": (
        3.68,
        "recovery.json, ours, builtin lighthouse, restart to first committed step, median, peer",
    ),
    "torchft_donor_stall_s": (
        0.0179,
        "recovery.json, ours, builtin lighthouse, donor's stall, median, peer",
    ),
    "heal_mib_per_s": (
        856.0,
        "recovery.json, heal of 144 MiB, rate by 4 connections, ours",
    ),
    "load_mib_per_s": (
        1590.0,
        "checkpoint.json, 1 proc, 474 MB, load, cold, readinto, ours, as a rate",
    ),
    "write_mib_per_s": (
        1310.0,
        "checkpoint.json, 1 proc, 474 MB, synchronous save, safetensors and fsync, ours, as a rate",
    ),
    "snapshot_load_mib_per_s": (
        1580.0,
        "checkpoint.json, 1 proc, 474 MB, back from shared memory, ours, as a rate",
    ),
    "save_s_per_gib": (
        0.147,
        "checkpoint.json, 1 proc, 474 MB, extra wall of a save, torchtitan async, ours, per GiB",
    ),
    "async_save_s_per_gib": (
        0.483,
        "checkpoint.json, 1 proc, 474 MB, extra wall of a save, torchtitan async, peer, per GiB",
    ),
    "snapshot_s_per_gib": (
        0.0481,
        "checkpoint.json, 1 proc, 474 MB, extra wall time of a snapshot, memcpy, ours, per GiB",
    ),
}
