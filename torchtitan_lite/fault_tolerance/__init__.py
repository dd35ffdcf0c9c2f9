"""Replicas, their lighthouse, and the supervision of processes on nodes."""
