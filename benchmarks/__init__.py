"""Measurements side by side: ours, the peer and the floor in one run. Each file is a command,
`python -m benchmarks.NAME [--quick] [--json PATH]`, run from the top of a checkout.
"""
