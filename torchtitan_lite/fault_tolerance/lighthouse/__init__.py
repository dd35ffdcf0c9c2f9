"""Lighthouse: forms the quorums of the replicas and tracks their heartbeats.

It serves torchft's managers (0.2.0) as torchft's own lighthouse does, and in addition accepts
the departures of replicas.
"""
