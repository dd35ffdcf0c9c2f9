"""Who trains where: decisions about the replicas of a run, and the connection to their members.

`replica_coordinator` decides about the generations of one replica, `run_coordinator` which machine
is for which replica and which machines are lost, `resize_coordinator` about the mesh of all, and
`leadership` whether this coordinator may decide; `coordinator` joins them. None has a clock or I/O.
`messages` has what members report and are answered, `link` the connection within a process,
`remote_link` and `server` that between machines, `timing` its time limits, `client` and `status`
what `coordinator --status` shows. Torch-free.
"""
