"""Replacement of a dead rank by a warm spare, while the other ranks keep their processes.

`agent` supervises the processes of one machine, `rank_process` is its handle of one of them, and
`worker` is the side of the process: it waits on standby for a rank, trains, and returns to standby
when the agent aborts the collectives.
"""
