"""Checkpoints of other systems: torch DCP, with torchtitan's names, in and out.

Layer: above the rest of checkpoint/, but for the manager.
"""
