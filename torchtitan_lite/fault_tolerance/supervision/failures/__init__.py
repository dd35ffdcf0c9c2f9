"""Diagnosis of hangs and failures of a generation, from what its ranks leave: heartbeats, flight
records, logs, exit statuses and the kernel's tables of connections. Torch-free."""
