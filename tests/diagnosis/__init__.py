"""Scored diagnosis: inject seeded faults into running jobs, and score whether the product's own
output names the right process and the right cause. `python -m tests.diagnosis` is the command.
"""
