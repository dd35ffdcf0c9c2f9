"""The processes of one machine: a dead rank is replaced, while the others keep their processes.

`member` is this machine's part of a replica, `process_pool` has its processes, `rank_process` is
the handle of one of them, and `worker` the side of the process: it waits on standby for a rank,
trains, and returns to standby when the member aborts the collectives.
"""
