"""Fault injection: disturb a job under the launcher and compare its outcome with that of an
undisturbed run. `python -m tests.chaos` is the command.
"""
