"""Execution of a plan: programs of copies for a rank, and the transports between ranks."""
