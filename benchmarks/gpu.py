"""A training step on a GPU: this project against torchtitan 0.2.2's own trainer.

python -m benchmarks.gpu [--case a] [--quick | --rehearse] [--json PATH]

Llama 3.2 1B with an output layer of its own, on one GPU: the same random tokens and initial
weights, fp32 weights, bf16 compute, fused AdamW, compile, norms clipped at 1. Cases: (a) 1 x 8192
without activation checkpointing, (b) 4 x 8192 and (c) 8 x 2048 with it per operation, and the cost
of asynchronous saves. The trainers alternate in separate processes (A/B/A/B), 10 warm-up and 20
timed steps each, then some profiled ones.

With `--json` the rows of the measured cases replace those in the file, so cases may be measured in
separate calls; what each process measured is written beside it at once, to `gpu.parts/`. `--quick`
checks both trainers on a GPU in tiny sizes, and says so and ends where there is none; `--rehearse`
does that on a CPU. The exit status is 1 if the trainers did not do the same work.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_case import CASES, Case, extra_per_save_s, tiny
from benchmarks.gpu_ours import train_ours
from benchmarks.gpu_torchtitan import train_torchtitan
from benchmarks.harness import Comparison, GoalKind, Result, formatted, report
from benchmarks.processes import ChildFailed, run_ranks

PEER = "torchtitan"
LOSS_TOLERANCE = 1e-2
"""Relative, of losses of bf16 compute: 8 bits, and other orders of casts and sums."""
BEST_CASE, BEST_GOAL = "best case", 1.05
"""Its tokens per second, as a multiple of torchtitan's."""
RATE = "tokens per second"
ROUNDS = 2
_TRAINERS: Mapping[str, Callable[..., Any]] = {"ours": train_ours, PEER: train_torchtitan}


def measure(cases: Sequence[Case], folder: Path, parts: Path | None) -> Iterator[Result]:
    """Measure `cases`; `parts` gets what each process measured."""
    for index, case in enumerate(cases):
        runs, failure = _alternate(case, folder / str(index), parts)
        comparison = _evidence(case, runs, failure)
        yield from (_save_rows if case.save_every else _step_rows)(case, runs, comparison)


Runs = dict[str, list[dict[str, Any]]]


def _alternate(case: Case, folder: Path, parts: Path | None) -> tuple[Runs, str]:
    """Run both trainers in turns. Returns their measurements, and why the peer did not run."""
    measured: Runs = {}
    try:
        failure = f"torchtitan {version('torchtitan')} failed"
    except PackageNotFoundError:
        failure = "torchtitan is not installed"
    runs = [(turn, name) for turn in range(ROUNDS) for name in _TRAINERS]
    for turn, name in runs:
        if name == PEER and PEER not in measured and turn > 0:
            continue
        place = folder / f"{name}_{turn}"
        # Each trainer compiles once with a cold cache.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"compiled_{name}")
        began_s = time.time()
        try:
            (values,) = run_ranks(
                _TRAINERS[name], {"case": case.arguments(), "folder": str(place)}, 1, place
            )
        except ChildFailed as error:
            if name != PEER:
                raise
            failure = f"{failure}: {str(error).splitlines()[-1]}"
            print(f"{case.name}: {error}", flush=True)
            measured.pop(PEER, None)
            continue
        finally:
            # Checkpoints of several processes would fill a small disk.
            shutil.rmtree(place / "checkpoint", ignore_errors=True)
        values["first_step_s"] = values["first_step_at_s"] - began_s
        measured.setdefault(name, []).append(values)
        text = f"{statistics.median(values['step_s']):.3f} s per step"
        print(f"{case.name}, round {turn + 1}, {name}: {text}", flush=True)
        if parts:
            parts.mkdir(parents=True, exist_ok=True)
            slug = case.name.replace(" ", "_").replace(",", "")
            text = json.dumps({"case": case.arguments(), **values}, indent=1)
            (parts / f"{slug}.{name}.{turn}.json").write_text(text, encoding="utf-8")
    return measured, "" if PEER in measured else failure


def _evidence(case: Case, measured: Runs, failure: str) -> Comparison:
    """Return the evidence that both did the same work."""
    comparison = Comparison(case.name, other=PEER)
    if failure:
        comparison.note(failure)
        return comparison
    if case.save_every:
        free_gb = shutil.disk_usage("/dev/shm").free / 1e9
        comparison.note(
            f"shared memory: {free_gb:.0f} GB free; with less than ours needs, it waits"
        )
    ours, peer = measured["ours"][0], measured[PEER][0]
    comparison.same("parameters", ours["num_params"], peer["num_params"])
    comparison.same("dtype of the weights", ours["dtype"], peer["dtype"])
    # torchtitan logs some of the losses.
    differences = []
    for step, theirs in peer["losses"].items():
        own = ours["losses"][step]
        comparison.note(f"loss of step {step}: ours {own:.5f}, {PEER} {theirs:.5f}")
        differences.append(abs(own - theirs) / abs(theirs))
    comparison.small("largest difference of a loss, relative", max(differences), LOSS_TOLERANCE)
    for name, runs in measured.items():
        medians = [statistics.median(run["step_s"]) for run in runs]
        comparison.note(f"median s per step in each round, {name}: {formatted(medians, '.4f')}")
    return comparison


def _step_rows(case: Case, measured: Runs, comparison: Comparison) -> Iterator[Result]:
    ours, peer = measured["ours"], measured.get(PEER)
    missing = "" if peer else f" ({PEER} did not run)"
    own_rate = _tokens_per_s(case, ours)
    if peer:
        yield comparison.ratio(
            RATE,
            "tokens/s",
            own_rate,
            peer=_tokens_per_s(case, peer),
            goal=case.goal,
            more_is_better=True,
        )
    else:
        yield comparison.value(f"{RATE}{missing}", "tokens/s", own_rate, valid=False)
    for metric, unit, value in (
        ("spread of a step, 90th less 10th percentile over the median", "%", _spread_percent),
        ("peak memory", "GiB", lambda runs: max(run["peak_gib"] for run in runs)),
        ("start to end of step 1, cold compiler", "s", lambda runs: runs[0]["first_step_s"]),
        ("start to end of step 1, warm compiler", "s", lambda runs: runs[-1]["first_step_s"]),
    ):
        theirs = value(peer) if peer else None
        yield comparison.value(metric + missing, unit, value(ours), peer=theirs)
    for kind in ours[-1]["profile_ms"]:
        theirs = peer[-1]["profile_ms"].get(kind) if peer else None
        yield comparison.value(
            f"profile: {kind}{missing}", "ms per step", ours[-1]["profile_ms"][kind], peer=theirs
        )


def _save_rows(case: Case, measured: Runs, comparison: Comparison) -> Iterator[Result]:
    def per_save(runs: list[dict[str, Any]]) -> float:
        extra = [s for run in runs for s in extra_per_save_s(run["step_s"], case.save_every)]
        return max(0.0, statistics.median(extra))

    ours, peer = measured["ours"], measured.get(PEER)
    metric = "extra wall time per save"
    if peer:
        yield comparison.ratio(metric, "s", per_save(ours), peer=per_save(peer), goal=1.0)
    else:
        name = f"{metric} ({PEER} did not run)"
        yield comparison.value(name, "s", per_save(ours), valid=False)


def _tokens_per_s(case: Case, runs: list[dict[str, Any]]) -> float:
    return case.tokens / statistics.median(s for run in runs for s in run["step_s"])


def _spread_percent(runs: list[dict[str, Any]]) -> float:
    steps = [s for run in runs for s in run["step_s"]]
    deciles = statistics.quantiles(steps, n=10)
    return 100 * (deciles[-1] - deciles[0]) / statistics.median(steps)


def merged(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with those of cases that were measured earlier and not again, and the row of the
    best case."""
    measured = {row["case"] for row in rows}
    all_rows = [row for row in earlier if row["case"] not in measured | {BEST_CASE}] + rows
    ratios = {
        row["case"]: row["ours"] / row["peer"]
        for row in all_rows
        if row["metric"] == RATE and "peer" in row
    }
    if not ratios:
        return all_rows
    best = max(ratios, key=lambda case: ratios[case])
    is_valid = all(row["met"] for row in all_rows if row["case"] == best and row["metric"] == RATE)
    best_row = {
        "case": BEST_CASE,
        "metric": f"{RATE}, ours / {PEER}: {best}",
        "unit": "ratio",
        "ours": ratios[best],
        "goal": BEST_GOAL,
        "met": is_valid and ratios[best] >= BEST_GOAL,
        "kind": GoalKind.AT_LEAST.value,
    }
    return [*all_rows, best_row]


def _merge(path: Path, earlier: str) -> None:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows = [row | {"card": card} for row in json.loads(path.read_text(encoding="utf-8"))]
    rows = merged(rows, json.loads(earlier))
    lines = [json.dumps(row) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="The GPU benchmark against torchtitan.")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="tiny sizes")
    sizes.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu needs a GPU, and there is none: nothing was measured.")
        sys.exit(0 if options.quick else 2)
    cases = [CASES[name] for name in options.case or CASES]
    if options.quick or options.rehearse:
        cases = [tiny(case) for case in cases]
    if options.quick:
        cases = [replace(case, device="cuda", seq_len=256) for case in cases]
    earlier = options.json.read_text("utf-8") if options.json and options.json.exists() else "[]"
    parts = options.json.with_suffix(".parts") if options.json else None
    with tempfile.TemporaryDirectory() as folder:
        all_hold = report(measure(cases, Path(folder), parts), options.json)
    if options.json:
        _merge(options.json, earlier)
    sys.exit(0 if all_hold else 1)


if __name__ == "__main__":
    main()
