"""How tensors and layouts are written on a command line.

A layout is `mesh=dp:2,tp:4 placements=S0,R`, with `ranks=4-11` where they are not the first ones. A
placement is R, S0 (a shard of dim 0), S0/2 (a strided shard), P or P(max) (a contribution). Where
several axes cut a dim in another order than the mesh's, `S0#1,S0#0` says each one's place in it.
"""

import math
import re

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute import HolderMesh, Layout
from torchtitan_lite.torch_compat import strided_shard

EXAMPLE = "mesh=dp:2,tp:2 placements=S0,R"
_SHARD = re.compile(r"S(\d+)(?:/(\d+))?(?:#(\d+))?")
_PARTIAL = re.compile(r"P(?:\((\w+)\))?")
_KEYS = ("mesh", "placements", "ranks")


def parse_layout(text: str, option: str) -> Layout:
    """The layout that `text` describes. Raises LayoutError in the name of `option`."""
    try:
        return _layout(text)
    except LayoutError as error:
        raise LayoutError(f'{option} "{text}": {error}') from None


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape such as 1024x4096; `scalar` is that of one number."""
    if text == "scalar":
        return ()
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise LayoutError(
            f'--shape "{text}" must be lengths with an x in between, such as 1024x4096, or scalar.'
        )
    return tuple(map(int, text.split("x")))


def parse_dtype(text: str) -> torch.dtype:
    """A dtype by torch's name, such as bfloat16."""
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f'--dtype "{text}" must be a dtype of torch, such as bfloat16.')
    return found


def _layout(text: str) -> Layout:
    given: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals or not value or key in given:
            raise LayoutError(
                f'"{word}" must be mesh=, placements= or ranks= with a value, each at most once, '
                f'as in "{EXAMPLE}".'
            )
        given[key] = value
    missing = [key for key in _KEYS[:2] if key not in given]
    if missing:
        raise LayoutError(f'{" and ".join(missing)} must be given, as in "{EXAMPLE}".')
    mesh = _mesh(given["mesh"], given.get("ranks"))
    texts = given["placements"].split(",")
    if len(texts) != len(mesh.shape):
        raise LayoutError(
            f"{_counted(len(texts), 'placement')} {given['placements']} for "
            f"{_counted(len(mesh.shape), 'axis', 'axes')} {mesh}; one an axis is needed, such as "
            f'"{EXAMPLE}".'
        )
    orders: dict[int, dict[int, int]] = {}
    placements = [_placement(word, axis, orders) for axis, word in enumerate(texts)]
    for dim, places in orders.items():
        if sorted(places) != list(range(len(places))):
            raise LayoutError(
                f"The places of the cuts of dim {dim} must be #0 to #{len(places) - 1}, each once, "
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
        found = re.fullmatch(r"(\w+):([1-9]\d*)", word)
        if found is None:
            raise LayoutError(
                f'"{word}" in mesh must be an axis and its size, as in mesh=dp:2,tp:4.'
            )
        names.append(found[1])
        sizes.append(int(found[2]))
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
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if found is None or (found[2] and int(found[2]) < int(found[1])):
            raise LayoutError(
                f'"{word}" in ranks must be a rank or a range, as in ranks=0-3 or ranks=4,5,8-11.'
            )
        ranks += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(ranks)


def _placement(text: str, axis: int, orders: dict[int, dict[int, int]]) -> Placement:
    """One placement. Its place among the cuts of its dim, if given, is added to `orders`."""
    if text == "R":
        return Replicate()
    if found := _PARTIAL.fullmatch(text):
        return Partial(found[1] or "sum")
    found = _SHARD.fullmatch(text)
    if found is None:
        raise LayoutError(
            f'"{text}" in placements must be R, S0, S0/2, S0#1, P or P(max), as in "{EXAMPLE}".'
        )
    dim, factor, place = int(found[1]), found[2], found[3]
    if place is not None:
        places = orders.setdefault(dim, {})
        if int(place) in places:
            raise LayoutError(
                f"Two cuts of dim {dim} are both #{place}. Give each its own place, as in "
                "S0#1,S0#0."
            )
        places[int(place)] = axis
    return Shard(dim) if factor is None else strided_shard(dim, int(factor))


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
