"""Mutation tests of parallel training.

python -m tests.mutants record [-- PYTEST ARGUMENTS]   run the tests and record what they reach
python -m tests.mutants run [--seed 0]                 run a drawn set of mutants (resumable)
python -m tests.mutants table                          print the score by operator, and survivors
python -m tests.mutants known                          print how many sites have a known killer
python -m tests.mutants check [--number 12]            run the known killers of some mutants

A recording stays valid until the code changes. A mutant is killed if a test that reaches its site
fails, or takes more than three times as long as without it. A mutant with which the code does not
run at all (an import or type error) is not counted.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.mutants.runner import TestRecord, outcomes_in, records_in, run_all, search_path
from tests.mutants.sites import REPOSITORY, all_sites, draw, load, save
from tests.mutants.table import KILLERS, known_table, save_killers, survivors, table


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    separator = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:separator])
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return options.run(options, argv[separator + 1 :])


def _record(options: argparse.Namespace, arguments: list[str]) -> int:
    sites = all_sites()
    save(sites, options.folder / "sites.jsonl")
    bases: dict[str, int] = {}
    for position, site in enumerate(sites):
        bases.setdefault(site.module, position)
    (options.folder / "bases.json").write_text(json.dumps(bases))
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "MUTANT_BASES": str((options.folder / "bases.json").resolve()),
        "MUTANT_SITES": str(len(sites)),
    }
    plugin = ["-p", "tests.mutants.recorder"]
    default = ["-n", "2", "--dist", "loadfile", "-m", "not matrix and not gpu"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, *(arguments or default)]
    return subprocess.call(command, cwd=REPOSITORY, env=environment)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    sites = load(options.folder / "sites.jsonl")
    records = [
        record for record in records_in(options.folder) if options.matrix or not record.is_matrix
    ]
    results = options.folder / "results.jsonl"
    outcomes = outcomes_in(results)
    position = {site.id: number for number, site in enumerate(sites)}
    chosen = draw(sites, options.seed, options.per_operator)
    if options.operators:
        chosen = [site for site in sites if site.operator in options.operators]
    if options.only:
        chosen = [site for site in sites if site.id in options.only]
    elif options.survivors:
        chosen = [site for site in chosen if site.id in outcomes and outcomes[site.id].is_alive]
    else:
        chosen = [site for site in chosen if site.id not in outcomes]
    # One operator after the other would leave the last ones to another run.
    chosen.sort(key=lambda site: site.id)
    run_all(
        [(position[site.id], site) for site in chosen],
        records,
        results,
        jobs=options.jobs,
        budget_s=options.budget_s,
        includes_matrix=options.matrix,
        tests_s=options.tests_s,
    )
    return 0


def _table(options: argparse.Namespace, arguments: list[str]) -> int:
    sites = load(options.folder / "sites.jsonl")
    outcomes = outcomes_in(options.folder / "results.jsonl")
    drawn = draw(sites, options.seed, options.per_operator)
    print(table(drawn, outcomes))
    print("\n".join(["", *survivors(drawn, outcomes)]))
    if options.save_killers:
        save_killers(outcomes.values(), sites)
    return 0


def _known(options: argparse.Namespace, arguments: list[str]) -> int:
    print(known_table(all_sites()))
    return 0


def _check(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the known killers of a drawn sample. Fail if more than a tenth of the mutants survive."""
    killers = json.loads(KILLERS.read_text())
    sites = [site for site in all_sites() if site.id in killers]
    if len(sites) < len(killers) / 2:
        print(
            f"mutants: only {len(sites)} of {len(killers)} sites of killers.json are left in the "
            "code. Run `record`, `run` and `table --save-killers`.",
            file=sys.stderr,
        )
        return 1
    random.Random(options.seed).shuffle(sites)
    chosen = sites[: options.number]
    results = options.folder / "check.jsonl"
    results.unlink(missing_ok=True)
    records = [
        TestRecord(killers[site.id], 30.0, False, frozenset([position]))
        for position, site in enumerate(chosen)
    ]
    run_all(
        list(enumerate(chosen)),
        records,
        results,
        jobs=options.jobs,
        budget_s=float("inf"),
        includes_matrix=False,
        tests_s=float("inf"),
    )
    num_alive = sum(outcome.is_alive for outcome in outcomes_in(results).values())
    # A few killers were seen in another process than their own, and may not kill alone.
    return int(num_alive > options.number / 10)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--folder", type=Path, default=Path("outputs/mutants"))
    drawn = argparse.ArgumentParser(add_help=False)
    drawn.add_argument("--seed", type=int, default=0)
    drawn.add_argument("--per-operator", type=int, default=24)
    jobs = argparse.ArgumentParser(add_help=False)
    jobs.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("record", parents=[shared]).set_defaults(run=_record)
    run = commands.add_parser("run", parents=[shared, drawn, jobs])
    run.set_defaults(run=_run)
    run.add_argument("--budget-s", type=float, default=float("inf"))
    run.add_argument(
        "--tests-s",
        type=float,
        default=float("inf"),
        help="only the cheapest tests of each mutant, up to this sum of durations: a first pass",
    )
    run.add_argument("--operators", nargs="*", metavar="NAME", help="all sites of these, undrawn")
    run.add_argument("--matrix", action="store_true", help="with the long matrices")
    run.add_argument("--survivors", action="store_true", help="only these, again")
    run.add_argument("--only", nargs="*", metavar="ID")
    table = commands.add_parser("table", parents=[shared, drawn])
    table.set_defaults(run=_table)
    table.add_argument("--save-killers", action="store_true", help="write killers.json")
    known = commands.add_parser("known", parents=[shared])
    known.set_defaults(run=_known)
    check = commands.add_parser("check", parents=[shared, jobs])
    check.set_defaults(run=_check)
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--number", type=int, default=12)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
