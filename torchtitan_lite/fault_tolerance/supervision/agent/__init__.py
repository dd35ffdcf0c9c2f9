"""The processes of one machine: a dead rank is replaced, while the others keep their processes.

`member` is this machine's part of a replica, `process_pool` has its processes, `rank_process` is
the handle of one of them, and `worker` the side of the process: it waits on standby for a rank,
trains, and returns to standby when the member aborts the collectives. `lease` stops what trains or
writes after the end of the machine's lease. `resize_inbox` receives requests to resize,
`resize_follower` carries out what the coordinator decides about them, and `channel` is the
connection between agent and process.
"""
