"""Explain the plan that moves a tensor from one layout to another, and draw it.

python -m scripts.explain_reshard --shape 1024x4096 --src "mesh=dp:2,tp:2 placements=S0,R"
    --dst "mesh=dp:4 placements=S0" [--dtype bfloat16] [--svg PATH] [--torch] [--json]

Starts no processes and needs no tensor.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, get_args

from scripts.dtensor_steps import DTensorPrediction, describe_dtensor, predict_dtensor
from scripts.layout_syntax import EXAMPLE, parse_dtype, parse_layout, parse_shape
from scripts.reshard_explanation import (
    explain,
    lower_bound_bytes,
    temporary_bytes,
    traffic,
)
from scripts.reshard_svg import as_svg
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.distributed.redistribute import Plan, plan
from torchtitan_lite.distributed.redistribute.planning.cost import (
    BUCKET_BYTES,
    Transport,
    default_costs,
)


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit status."""
    try:
        options = _parser().parse_args(argv)
        svg: Path | None = options.svg
        exchange_plan = plan(
            parse_layout(options.src, "--src"),
            parse_layout(options.dst, "--dst"),
            parse_shape(options.shape),
            parse_dtype(options.dtype),
            costs=default_costs(options.device).with_ranks_per_node(options.ranks_per_node),
        )
        # All output is computed before any is written.
        drawing = as_svg(exchange_plan) if svg is not None else None
        dtensor = predict_dtensor(exchange_plan) if options.torch else None
        output = (
            _as_json(exchange_plan, dtensor)
            if options.json
            else _as_text(exchange_plan, dtensor, options.transport)
        )
        if svg is not None and drawing is not None:
            _write(svg, drawing)
    except UserError as error:
        print(f"explain_reshard: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


def _as_text(
    exchange_plan: Plan, dtensor: DTensorPrediction | None, transport: Transport | None
) -> str:
    lines = [explain(exchange_plan, transport=transport)]
    if dtensor is not None:
        lines += describe_dtensor(dtensor, exchange_plan)
    return "\n".join(lines)


def _as_json(exchange_plan: Plan, dtensor: DTensorPrediction | None) -> str:
    record: dict[str, Any] = {
        "src": str(exchange_plan.src),
        "dst": str(exchange_plan.dst),
        "shape": exchange_plan.shape,
        "dtype": str(exchange_plan.dtype).removeprefix("torch."),
        "rounds": [] if exchange_plan.is_noop else exchange_plan.rounds,
        "moved_bytes": exchange_plan.moved_bytes,
        "lower_bound_bytes": lower_bound_bytes(exchange_plan),
        "temporary_bytes": temporary_bytes(exchange_plan, BUCKET_BYTES),
        "holders": {str(holder): asdict(t) for holder, t in traffic(exchange_plan).items()},
    }
    if dtensor is not None:
        record["dtensor"] = asdict(dtensor)
    return json.dumps(record, indent=2)


def _write(path: Path, drawing: str) -> None:
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path} cannot be written: {error.strerror}.") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, like any other error."""
        raise UserError(f"{message}. --help shows how to call it.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m scripts.explain_reshard",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Explain the plan that moves a tensor from one layout to another, and\n"
        "draw it. Starts no ranks.",
        epilog="A LAYOUT has the axes of a mesh with their sizes and a placement for each:\n"
        f'  "{EXAMPLE}"\n'
        "  ranks=4-7 or ranks=4,5,8-9   if the mesh does not have the first ranks\n"
        "Placements:\n"
        "  R          replicated\n"
        "  S0, S1     sharded along dim 0, dim 1\n"
        "  S0#1,S0#0  sharded by the second axis first: #k is an axis's place in the shard order\n"
        "  S0/2       a strided shard with split factor 2\n"
        "  P, P(max)  partial values, reduced by sum, avg, product, min or max",
        allow_abbrev=False,
    )
    parser.add_argument("--shape", required=True, help="tensor shape: 1024x4096, or scalar")
    parser.add_argument("--src", required=True, metavar="LAYOUT", help="source layout")
    parser.add_argument("--dst", required=True, metavar="LAYOUT", help="destination layout")
    parser.add_argument("--dtype", default="float32", help="as torch names it (default: float32)")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="write a drawing there too")
    parser.add_argument(
        "--torch", action="store_true", help="show what DTensor.redistribute would do instead"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device, whose links decide whether nodes forward data",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=0, metavar="N", help="0: all are on one node"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument(
        "--transport",
        choices=get_args(Transport),
        help="the path that will be taken, where that is known",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
