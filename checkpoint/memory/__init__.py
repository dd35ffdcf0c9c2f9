"""Snapshots in shared memory, which outlive the process that made them.

Layer: above errors. Standard library and xxhash only.
"""
