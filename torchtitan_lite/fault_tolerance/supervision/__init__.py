"""Start, watch and replace the processes of a run: launcher, rank recovery, rendezvous."""
