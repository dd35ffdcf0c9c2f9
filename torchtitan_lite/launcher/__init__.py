"""Start, watch, restart and end the replicas of a job on this machine, for
`torchtitan-lite launch`.

Nothing here imports torch, so that the launcher starts at once and takes no memory from training.
Invariant: a process that was started here does not outlive the launcher, whatever ends that; only
the writers of checkpoints do, for as long as their last save takes. Layer: above errors and log.
"""
