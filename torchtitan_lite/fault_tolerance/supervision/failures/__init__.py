"""Why a generation of a replica hangs or has failed, from what its ranks leave: heartbeats, flight
records, logs, exit statuses and the kernel's tables of connections. Torch-free."""
