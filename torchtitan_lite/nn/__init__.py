"""Blocks that models are built from. They run alone on a CPU: no rank, no mesh, no collective.

Layer: above redistribute and spec.
"""
