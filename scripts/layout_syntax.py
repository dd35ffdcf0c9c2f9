"""Command-line syntax of tensors and layouts.

A layout is `mesh=dp:2,tp:4 placements=S0,R`, with `ranks=4-11` if they are not the first ones. A
placement is R, S0 (a shard of dim 0), S0/2 (a strided shard), P or P(max) (partial). If several
axes shard a dim in an order other than the mesh's, `S0#1,S0#0` gives the position of each.
"""

import math
import re

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.distributed.torch_compat import strided_shard

EXAMPLE = "mesh=dp:2,tp:2 placements=S0,R"
_SHARD = re.compile(r"S(\d+)(?:/(\d+))?(?:#(\d+))?")
_PARTIAL = re.compile(r"P(?:\((\w+)\))?")
_KEYS = ("mesh", "placements", "ranks")


def parse_layout(text: str, option: str) -> Layout:
    """Parse the layout in `text`. Raises LayoutError that names `option`."""
    try:
        return _layout(text)
    except LayoutError as error:
        raise LayoutError(f'{option} "{text}": {error}') from None


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as 1024x4096; `scalar` is the shape of a scalar."""
    if text == "scalar":
        return ()
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise LayoutError(
            f'--shape "{text}" must be lengths with an x in between, such as 1024x4096, or scalar.'
        )
    return tuple(map(int, text.split("x")))


def parse_dtype(text: str) -> torch.dtype:
    """Parse a dtype by torch's name, such as bfloat16."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f'--dtype "{text}" must be a dtype of torch, such as bfloat16.')
    return dtype


def _layout(text: str) -> Layout:
    values: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals or not value or key in values:
            raise LayoutError(
                f'"{word}" must be mesh=, placements= or ranks= with a value, each at most once, '
                f'as in "{EXAMPLE}".'
            )
        values[key] = value
    missing = [key for key in _KEYS[:2] if key not in values]
    if missing:
        raise LayoutError(f'{" and ".join(missing)} must be given, as in "{EXAMPLE}".')
    mesh = _mesh(values["mesh"], values.get("ranks"))
    texts = values["placements"].split(",")
    if len(texts) != len(mesh.shape):
        raise LayoutError(
            f"{_counted(len(texts), 'placement')} {values['placements']} for "
            f"{_counted(len(mesh.shape), 'axis', 'axes')} {mesh}; one per axis is "
            f'required, such as "{EXAMPLE}".'
        )
    orders: dict[int, dict[int, int]] = {}
    placements = [_placement(word, axis, orders) for axis, word in enumerate(texts)]
    for dim, places in orders.items():
        if sorted(places) != list(range(len(places))):
            raise LayoutError(
                f"The shard order of dim {dim} must be #0 to #{len(places) - 1}, each once, "
                "as in S0#1,S0#0."
            )
    return Layout(
        mesh,
        placements,
        {dim: [places[place] for place in sorted(places)] for dim, places in orders.items()},
    )


def _mesh(text: str, ranks: str | None) -> HolderMesh:
    names, sizes = [], []
    for word in text.split(","):
        match = re.fullmatch(r"(\w+):([1-9]\d*)", word)
        if match is None:
            raise LayoutError(
                f'"{word}" in mesh must be an axis and its size, as in mesh=dp:2,tp:4.'
            )
        names.append(match[1])
        sizes.append(int(match[2]))
    count = math.prod(sizes)
    holders = tuple(range(count)) if ranks is None else _ranks(ranks)
    if len(holders) != count:
        raise LayoutError(
            f"mesh={text} needs {_counted(count, 'rank')}, and ranks={ranks} gives {len(holders)}; "
            f"ranks=0-{count - 1} would do."
        )
    return HolderMesh(tuple(sizes), holders, tuple(names))


def _ranks(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise LayoutError(
                f'"{word}" in ranks must be a rank or a range, as in ranks=0-3 or ranks=4,5,8-11.'
            )
        ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(ranks)


def _placement(text: str, axis: int, orders: dict[int, dict[int, int]]) -> Placement:
    """Parse one placement. Its position among the shardings of its dim, if given, is added to
    `orders`."""
    if text == "R":
        return Replicate()
    if match := _PARTIAL.fullmatch(text):
        return Partial(match[1] or "sum")
    match = _SHARD.fullmatch(text)
    if match is None:
        raise LayoutError(
            f'"{text}" in placements must be R, S0, S0/2, S0#1, P or P(max), as in "{EXAMPLE}".'
        )
    dim, factor, place = int(match[1]), match[2], match[3]
    if place is not None:
        places = orders.setdefault(dim, {})
        if int(place) in places:
            raise LayoutError(
                f"Two shards of dim {dim} are both #{place}. Give each its own position, as in "
                "S0#1,S0#0."
            )
        places[int(place)] = axis
    return Shard(dim) if factor is None else strided_shard(dim, int(factor))


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
