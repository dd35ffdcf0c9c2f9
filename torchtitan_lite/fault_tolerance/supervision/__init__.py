"""Start, watch and replace the processes of a run: launcher, rank recovery, rendezvous, failures.

`launcher` runs replicas on one machine, `rank_recovery` the ranks of one machine with spare
processes, `rendezvous` decides about several machines; `failures` finds why ranks hang or fail. The
modules beside them are what these share: the policy of restarts, requests to resize, readers of
logs, and the ranks of one machine without spare processes.
"""
