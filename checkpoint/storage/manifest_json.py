"""The manifest of a checkpoint as plain JSON, joined from the parts of the ranks.

Each rank's part says what it wrote; the leader's also holds the values. Invariant: every element
of every tensor is in exactly one box, or no manifest is made. Layer: above part_file.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.storage.part_file import Written
from torchtitan_lite.errors import CheckpointError

FORMAT = "torchtitan_lite.checkpoint"
VERSION = 2
MANIFEST = "manifest.json"


def build_manifest(
    step: int, parts: Iterable[Mapping[str, Any]], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Join the parts of all ranks.

    `base` gives `mesh`, `values`, `config`, `versions` and may give `model_only`. A part is
    {"rank", "rng", "layouts", "tensors": {name: {"dtype", "shape", "layout", "boxes"}}}, with
    `layout` an index into its own `layouts`; `rng` is empty where there is none. A box that several
    ranks wrote is taken from the first. Raises CheckpointError, naming the tensor, when ranks
    disagree on it or its boxes do not hold all of it.
    """
    layouts: list[Any] = []
    places: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    rng: dict[str, Any] = {}
    for part in sorted(parts, key=lambda part: part["rank"]):
        if part["rng"]:
            rng[str(part["rank"])] = part["rng"]
        for name, entry in part["tensors"].items():
            layout = part["layouts"][entry["layout"]]
            place = places.setdefault(json.dumps(layout, sort_keys=True), len(layouts))
            if place == len(layouts):
                layouts.append(layout)
            _join(tensors, name, entry, place, part["rank"])
    for name, entry in tensors.items():
        _require_whole(name, entry)
    model_only = bool(base.get("model_only", False))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "model_only": model_only,
        "mesh": dict(base["mesh"]),
        "layouts": layouts,
        "tensors": tensors,
        "values": dict(base["values"]),
        "rng": {} if model_only else rng,
        "config": dict(base["config"]),
        "versions": dict(base["versions"]),
    }
    manifest["xxh3"] = checksum(manifest)
    return manifest


def box_entry(
    offset: Sequence[int], size: Sequence[int], file: str, place: Written
) -> dict[str, Any]:
    """What a part says of one box."""
    return {
        "offset": list(offset),
        "size": list(size),
        "file": file,
        "bytes": [place.first, place.end],
        "xxh3": place.xxh3,
    }


def checksum(manifest: Mapping[str, Any]) -> str:
    """xxh3 of the manifest without its key `xxh3`, as JSON with sorted keys."""
    rest = {key: value for key, value in manifest.items() if key != "xxh3"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """As it is stored."""
    return json.dumps(manifest, indent=1).encode()


def _join(
    tensors: dict[str, dict[str, Any]], name: str, entry: Mapping[str, Any], place: int, rank: int
) -> None:
    known = tensors.setdefault(
        name, {"dtype": entry["dtype"], "shape": entry["shape"], "layout": place, "boxes": []}
    )
    said = (entry["dtype"], entry["shape"], place)
    if said != (known["dtype"], known["shape"], known["layout"]):
        raise CheckpointError(
            f"Rank {rank} describes {name} as {entry['dtype']} {entry['shape']} in layout {place}, "
            f"ranks before it as {known['dtype']} {known['shape']} in layout {known['layout']}."
        )
    taken = {(*box["offset"], *box["size"]) for box in known["boxes"]}
    known["boxes"] += [box for box in entry["boxes"] if (*box["offset"], *box["size"]) not in taken]


def _require_whole(name: str, entry: Mapping[str, Any]) -> None:
    held = sum(math.prod(box["size"]) for box in entry["boxes"])
    if held != math.prod(entry["shape"]):
        raise CheckpointError(
            f"The ranks wrote {held} of the {math.prod(entry['shape'])} elements of {name}, of "
            f"shape {entry['shape']}: their descriptions of what each writes do not fit together."
        )
