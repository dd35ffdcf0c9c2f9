"""Start, watch and replace the processes of a run.

`coordinator` decides who trains where, in which replica and on which mesh. `agent` has the members
of a run, which give the ranks of a machine their processes and follow a coordinator. `launcher`
hosts the members of all replicas of a run on one machine. `failures` finds why ranks hang or fail.
The modules beside them are what these share: the policy of restarts, requests to resize, readers of
logs, and the ranks of one machine that are not replaced.
"""
