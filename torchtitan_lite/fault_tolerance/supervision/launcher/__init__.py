"""Launcher of the replicas of a run on one machine, for `torchtitan-lite launch`: starts, monitors,
restarts and stops them.

No module here imports torch, so that the launcher starts at once and takes no memory from training.
Invariant: no process started here outlives the launcher, however the launcher ends, except the
checkpoint writers, until their last save is complete.
"""
