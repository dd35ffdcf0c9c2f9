"""Mutation tests of parallel training.

python -m tests.mutants record [-- PYTEST ARGUMENTS]   run the tests and record what they reach
python -m tests.mutants run [--seed 0]                 run a drawn set of mutants (resumable)
python -m tests.mutants table                          print the score by operator, and survivors
python -m tests.mutants check [--number 12]            run known killers of some mutants again

A recording stays valid until the code changes. A mutant is killed if a test that reaches its site
fails, or takes more than three times as long as without it. A mutant with which the code does not
run at all (an import or type error) is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.mutants.runner import outcomes_in, records_in, run_all, search_path
from tests.mutants.sites import REPOSITORY, all_sites, draw, load, save
from tests.mutants.table import table


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
    if options.only:
        chosen = [site for site in sites if site.id in options.only]
    elif options.survivors:
        chosen = [s for s in chosen if _has_survived(outcomes.get(s.id))]
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
    )
    return 0


def _has_survived(outcome: object) -> bool:
    return getattr(outcome, "outcome", "") in ("survived", "unreached")


def _table(options: argparse.Namespace, arguments: list[str]) -> int:
    sites = load(options.folder / "sites.jsonl")
    drawn = draw(sites, options.seed, options.per_operator)
    print(table(drawn, outcomes_in(options.folder / "results.jsonl")))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for name, run in (("record", _record), ("run", _run), ("table", _table)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--folder", type=Path, default=Path("outputs/mutants"))
        if name == "record":
            continue
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--per-operator", type=int, default=24)
        if name == "run":
            command.add_argument("--jobs", type=int, default=2)
            command.add_argument("--budget-s", type=float, default=float("inf"))
            command.add_argument("--matrix", action="store_true", help="with the long matrices")
            command.add_argument("--survivors", action="store_true", help="only these, again")
            command.add_argument("--only", nargs="*", metavar="ID")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
