"""Who trains where: decisions about the replicas of a run, and the connection to their members.

`replica_coordinator` decides about the generations of one replica, `run_coordinator` which machine
is for which replica, `resize_coordinator` about the mesh of all; none of them has a clock or I/O.
`messages` has what members report and are answered, `link` the connection within a process,
`remote_link` and `server` that between machines, `timing` its time limits. Torch-free.
"""
