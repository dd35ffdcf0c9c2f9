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
VERSION = 3
READ_VERSIONS = (2, 3)
"""Those of the format that are read. Version 2 had no `data`, and signed in another way."""
MANIFEST = "manifest.json"
_SIGNATURE = b'\n "xxh3": "'


def build_manifest(
    step: int, parts: Iterable[Mapping[str, Any]], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Join the parts of all ranks.

    `base` gives `mesh`, `values`, `config`, `versions` and may give `model_only`. A part is
    {"rank", "rng", "layouts", "tensors": {name: {"dtype", "shape", "layout", "boxes"}}}, with
    `layout` an index into its own `layouts`; `rng` is empty where there is none. A storage that
    puts the files of an attempt into a folder of their own adds its name as `data`. Takes time in
    proportion to the number of boxes. Raises CheckpointError, naming the tensor, when ranks
    disagree on it, or its boxes together do not have as many elements as it has.
    """
    parts = sorted(parts, key=lambda part: part["rank"])
    layouts: list[Any] = []
    places: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    rng: dict[str, Any] = {}
    for part in parts:
        if part["rng"]:
            rng[str(part["rank"])] = part["rng"]
        # A layout names all files, and most of a rank's tensors share a few.
        joined: dict[int, int] = {}
        for name, entry in part["tensors"].items():
            number = entry["layout"]
            if number not in joined:
                joined[number] = _place_of(part["layouts"][number], layouts, places)
            _join(tensors, name, entry, joined[number], part["rank"])
    for name, entry in tensors.items():
        _require_whole(name, entry)
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


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """As it is stored: JSON with a line for each layout, tensor and other field, and one that signs
    what is before it. Not by `indent`, with which Python takes another encoder, many times as
    slow."""
    fields = [(key, _field(value)) for key, value in manifest.items()]
    signed = _lines(fields, "").removesuffix("\n}").encode() + b","
    return signed + _SIGNATURE + _signature_of(signed)


def is_signed(text: bytes) -> bool:
    """Whether the manifest's last line but one, `xxh3`, is the checksum of all before it."""
    signed, mark, signature = text.rpartition(_SIGNATURE)
    return bool(mark) and signature == _signature_of(signed)


def is_signed_as_2(manifest: Mapping[str, Any]) -> bool:
    """The same in version 2: `xxh3` is the checksum of all else, as JSON with sorted keys. False,
    too, for one that is nested too deeply to be written."""
    rest = {key: value for key, value in manifest.items() if key != "xxh3"}
    try:
        encoded = json.dumps(rest, sort_keys=True).encode()
    except RecursionError:
        return False
    return manifest.get("xxh3") == xxhash.xxh3_64_hexdigest(encoded)


def _signature_of(signed: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(signed).encode() + b'"\n}'


def _field(value: Any) -> str:
    """A field of the manifest. Those that grow with the run are lists or objects of objects."""
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        return _lines([(key, json.dumps(one)) for key, one in value.items()], " ")
    return json.dumps(value)


def _lines(items: Iterable[tuple[str, str]], indent: str) -> str:
    """A JSON object of values that are JSON already, one a line."""
    lines = (f"{indent} {json.dumps(key)}: {value}" for key, value in items)
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _data(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where the files lie, if not in the folder of the step itself."""
    said = {part.get("data") for part in parts}
    if len(said) > 1:
        raise CheckpointError(f"The files of one step lie in several places: {said}.")
    data = next(iter(said), None)
    return {} if data is None else {"data": data}


def _place_of(layout: Any, layouts: list[Any], places: dict[str, int]) -> int:
    """The index of a layout among those of the manifest, to which it is added if it is new."""
    place = places.setdefault(json.dumps(layout, sort_keys=True), len(layouts))
    if place == len(layouts):
        layouts.append(layout)
    return place


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
    # Each byte is written by one rank.
    known["boxes"] += entry["boxes"]


def _require_whole(name: str, entry: Mapping[str, Any]) -> None:
    held = sum(math.prod(box["size"]) for box in entry["boxes"])
    if held != math.prod(entry["shape"]):
        raise CheckpointError(
            f"The ranks wrote {held} of the {math.prod(entry['shape'])} elements of {name}, of "
            f"shape {entry['shape']}: their descriptions of what each writes do not fit together."
        )
