"""Benchmarks: ours, a floor and a peer, measured in one run.

`make bench` runs all of them; each is `python -m benchmarks.NAME [--quick] [--json PATH]` in the
root of a checkout, with NAME `step`, `parallel`, `redistribute`, `checkpoint`, `recovery` or
`convert`. Shared by all: `harness` (comparisons, rows, command line), `processes` (start and watch
measured processes) and `worker` (turns and instruments in a measured process).
"""
