"""The manifest of a checkpoint as plain JSON, merged from the parts of the ranks.

Each rank's part lists what it wrote; the leader's also holds the values. Invariant: every element
of every tensor is in exactly one box, or no manifest is built.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.storage.safetensors_file import BoxLocation
from torchtitan_lite.core.errors import CheckpointError

FORMAT = "torchtitan_lite.checkpoint"
VERSION = 3
READ_VERSIONS = (2, 3)
"""Supported format versions. Version 2 had no `data` and another checksum."""
MANIFEST = "manifest.json"
_CHECKSUM_FIELD = b'\n "xxh3": "'


def build_manifest(
    step: int, parts: Iterable[Mapping[str, Any]], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge the parts of all ranks.

    `base` has `mesh`, `values`, `config`, `versions` and optionally `model_only`. A part is
    {"rank", "rng", "layouts", "tensors": {name: {"dtype", "shape", "layout", "boxes"}}}, with
    `layout` an index into its own `layouts`; `rng` may be empty. A storage that keeps an attempt's
    files in a subfolder adds its name as `data`. Takes time linear in the number of boxes. Raises
    CheckpointError, with the tensor, if ranks disagree on it or its boxes do not have its number of
    elements.
    """
    parts = sorted(parts, key=lambda part: part["rank"])
    layouts: list[Any] = []
    places: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    rng: dict[str, Any] = {}
    for part in parts:
        if part["rng"]:
            rng[str(part["rank"])] = part["rng"]
        # Layouts are long, and most tensors of a rank share a few.
        joined: dict[int, int] = {}
        for name, entry in part["tensors"].items():
            number = entry["layout"]
            if number not in joined:
                joined[number] = _place_of(part["layouts"][number], layouts, places)
            _merge_entry(tensors, name, entry, joined[number], part["rank"])
    for name, entry in tensors.items():
        _check_covered(name, entry)
    model_only = bool(base.get("model_only", False))
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "model_only": model_only,
        "mesh": dict(base["mesh"]),
        "layouts": layouts,
        "tensors": tensors,
        **_data(parts),
        "values": dict(base["values"]),
        "rng": {} if model_only else rng,
        "config": dict(base["config"]),
        "versions": dict(base["versions"]),
    }


def box_entry(
    offset: Sequence[int], size: Sequence[int], file: str, place: BoxLocation
) -> dict[str, Any]:
    """Return the entry of one box in a part."""
    return {
        "offset": list(offset),
        "size": list(size),
        "file": file,
        "bytes": [place.first, place.end],
        "xxh3": place.xxh3,
    }


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Encode the manifest: JSON with one line per layout, tensor and other field, and a final
    checksum of everything before it. Not with `indent`, for which Python uses a much slower
    encoder."""
    fields = [(key, _field(value)) for key, value in manifest.items()]
    signed = _lines(fields, "").removesuffix("\n}").encode() + b","
    return signed + _CHECKSUM_FIELD + _checksum_field(signed)


def checksum_matches(text: bytes) -> bool:
    """Return whether the last field, `xxh3`, is the checksum of everything before it."""
    signed, mark, signature = text.rpartition(_CHECKSUM_FIELD)
    return bool(mark) and signature == _checksum_field(signed)


def checksum_matches_v2(manifest: Mapping[str, Any]) -> bool:
    """Return whether `xxh3` is the checksum of all other fields as JSON with sorted keys (version
    2). False if it is nested too deeply to encode."""
    rest = {key: value for key, value in manifest.items() if key != "xxh3"}
    try:
        encoded = json.dumps(rest, sort_keys=True).encode()
    except RecursionError:
        return False
    return manifest.get("xxh3") == xxhash.xxh3_64_hexdigest(encoded)


def _checksum_field(signed: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(signed).encode() + b'"\n}'


def _field(value: Any) -> str:
    """Encode a field. Those that grow with the run are lists or objects of objects."""
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        return _lines([(key, json.dumps(one)) for key, one in value.items()], " ")
    return json.dumps(value)


def _lines(items: Iterable[tuple[str, str]], indent: str) -> str:
    """Encode an object of JSON values, one per line."""
    lines = (f"{indent} {json.dumps(key)}: {value}" for key, value in items)
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _data(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the subfolder of the files, if they are in one."""
    folders = {part.get("data") for part in parts}
    if len(folders) > 1:
        raise CheckpointError(f"The files of one step are in several folders: {folders}.")
    data = next(iter(folders), None)
    return {} if data is None else {"data": data}


def _place_of(layout: Any, layouts: list[Any], places: dict[str, int]) -> int:
    """Return the index of a layout in the manifest, adding it if it is new."""
    place = places.setdefault(json.dumps(layout, sort_keys=True), len(layouts))
    if place == len(layouts):
        layouts.append(layout)
    return place


def _merge_entry(
    tensors: dict[str, dict[str, Any]], name: str, entry: Mapping[str, Any], place: int, rank: int
) -> None:
    known = tensors.setdefault(
        name, {"dtype": entry["dtype"], "shape": entry["shape"], "layout": place, "boxes": []}
    )
    described = (entry["dtype"], entry["shape"], place)
    if described != (known["dtype"], known["shape"], known["layout"]):
        raise CheckpointError(
            f"Rank {rank} describes {name} as {entry['dtype']} {entry['shape']} in layout {place}, "
            f"ranks before it as {known['dtype']} {known['shape']} in layout {known['layout']}."
        )
    # Each byte is written by exactly one rank.
    known["boxes"] += entry["boxes"]


def _check_covered(name: str, entry: Mapping[str, Any]) -> None:
    held = sum(math.prod(box["size"]) for box in entry["boxes"])
    if held != math.prod(entry["shape"]):
        raise CheckpointError(
            f"The ranks wrote {held} of the {math.prod(entry['shape'])} elements of {name}, of "
            f"shape {entry['shape']}: their save plans are inconsistent."
        )
