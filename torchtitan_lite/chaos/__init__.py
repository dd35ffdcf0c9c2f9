"""Faults on purpose: a run under the launcher is disturbed, and its outcome compared with that of a
run that nothing has disturbed. `scripts.chaos` is the command.

Layer: above checkpoint and launcher; nothing imports it but that command and tests.
"""
