"""Replicas of a job on this machine: started, watched, started again, ended. `scripts.launch` is
its command.

Nothing here imports torch, so that the launcher starts at once and takes no memory from training.
Invariant: a process that was started here does not outlive the launcher, whatever ends that; only
the writers of checkpoints do, for as long as their last save takes. Layer: above errors and log.
"""
