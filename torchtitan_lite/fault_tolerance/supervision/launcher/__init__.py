"""Launcher of the replicas of a run on one machine, for `torchtitan-lite launch`: starts, monitors,
restarts and stops them.

`launcher` hosts a `replica` for each, whose member follows the coordinator in this process; `plan`
has the options, `start_command` the command of a rank. `resize` admits requests and distributes
slots; the coordinator decides their phases. `lighthouse_process` and `torchft_lighthouse` run the
lighthouse, `departures` notifies it of replicas that leave, `status_view` and `goodput` show the
run.

No module here imports torch, so that the launcher starts at once and takes no memory from training.
Invariant: no process started here outlives the launcher, however the launcher ends, except the
checkpoint writers, until their last save is complete.
"""
