"""Draw the order in which a config's pipeline runs a step, and report how long its ranks wait.

python -m scripts.show_pipeline --config FILE [--svg PATH] [--section.key value ...]

Starts no processes: the order is that of torch's schedule or of the config's file, and the time is
simulated.
"""

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

from scripts.pipeline_chart import Chart
from scripts.pipeline_svg import as_svg
from scripts.pipeline_text import as_text
from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import MeshError, UserError
from torchtitan_lite.core.log import configure_logging, logger
from torchtitan_lite.distributed.mesh import resolve_degrees
from torchtitan_lite.models import model_spec
from torchtitan_lite.parallel.pipeline_order import ActionCosts, simulate
from torchtitan_lite.parallel.pipeline_stages import plan_stages, stage_weights, step_order
from torchtitan_lite.training.checks.constraints import check_pipeline
from torchtitan_lite.training.checks.mesh_constraints import pipeline_microbatches
from torchtitan_lite.training.run_config import parse_command_line


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit status."""
    configure_logging()
    options, rest = _parser().parse_known_args(argv)
    try:
        config, _ = parse_command_line(rest)
        chart = _chart(config, options)
        in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(as_text(chart, shutil.get_terminal_size().columns, in_color=in_color))
        if options.svg is not None:
            _write(options.svg, as_svg(chart))
    except UserError as error:
        logger.error("%s", error)
        return 1
    return 0


def _chart(config: Config, options: argparse.Namespace) -> Chart:
    parallelism = config.parallelism
    world_size = options.nproc or _smallest_world_size(parallelism)
    check_pipeline(config, world_size)
    degrees = resolve_degrees(parallelism, world_size)
    if degrees.pp == 1:
        raise MeshError(
            "parallelism.pipeline_parallel_degree is 1, so there is no pipeline to draw. Set it in "
            "the file, or add --parallelism.pipeline_parallel_degree 2, say."
        )
    spec = model_spec(config.model)
    plan = plan_stages(spec, parallelism)
    layers = stage_weights(plan, spec, parallelism)
    weights = tuple(layer // math.gcd(*layers) for layer in layers)
    name = parallelism.pipeline_parallel_schedule
    if plan.order is not None:
        name = Path(parallelism.pipeline_parallel_schedule_csv or "").name
    order = step_order(
        plan, parallelism.pipeline_parallel_schedule, pipeline_microbatches(config, degrees)
    )
    costs = ActionCosts(
        forward=options.forward,
        backward_input=options.backward_input,
        backward_weight=options.backward_weight,
        stage_weights=weights,
    )
    note = (
        f"forward {costs.forward:g}, backward {costs.backward_input:g} for the input and "
        f"{costs.backward_weight:g} for the weights"
    )
    if len(set(weights)) > 1:
        note += f", times the stage's weight: {', '.join(map(str, weights))}"
    return Chart(name, simulate(order, costs), plan.ranks, order.num_microbatches, note)


def _smallest_world_size(parallelism: ParallelismConfig) -> int:
    shards = parallelism.data_parallel_shard_degree
    others_product = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if shards == -1:
        # The number that the experts' mesh requires.
        experts = parallelism.expert_parallel_degree * parallelism.expert_tensor_parallel_degree
        shards = experts // math.gcd(experts, others_product)
    copies = parallelism.pipeline_parallel_degree * parallelism.data_parallel_replicate_degree
    return copies * shards * others_product


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path} cannot be written: {error.strerror}.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.show_pipeline",
        usage="%(prog)s --config FILE [options] [--section.key value ...]",
        description="Draw the order in which a config's pipeline runs a step, and how much of the "
        "time its ranks wait. Starts no ranks and needs no GPU.",
        epilog="Costs are those of a layer: a stage costs as many times as much as it has layers, "
        "where the embedding and the output count as many layers as "
        "pipeline_parallel_first_stage_less_layers and _last_stage_less_layers say (divided by "
        "what all stages have in common). Messages cost nothing. --section.key value overrides a "
        "key of the file, as for train.py, whose --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--svg", type=Path, metavar="PATH", help="write the drawing there too")
    parser.add_argument(
        "--nproc",
        type=_positive(int),
        metavar="N",
        help="processes of the run, as torchrun would start (default: the fewest that fit)",
    )
    for option, what in (
        ("--forward", "a forward"),
        ("--backward-input", "a backward for a stage's input"),
        ("--backward-weight", "a backward for its weights"),
    ):
        parser.add_argument(
            option,
            type=_positive(float),
            default=1,
            metavar="COST",
            help=f"what {what} costs (default: 1)",
        )
    return parser


def _positive(type_: type):
    def number(text: str):
        value = type_(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
