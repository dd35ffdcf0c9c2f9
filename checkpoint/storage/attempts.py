"""Attempts at a step, in any storage: the announcements of the ranks, the manifest that merges
their parts, the commit, and the removal of attempts.

Each rank announces the part that it has written, or that it writes nothing. A part lists what the
rank wrote; the leader's also holds the values. Invariant: every element of every tensor is in
exactly one box, or no manifest is built.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.format import FORMAT, VERSION
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.storage.safetensors_file import BoxLocation
from torchtitan_lite.core.errors import CheckpointError

_PART = re.compile(r"rank-([0-9]{5})\.json", re.ASCII)
_FAILURE = re.compile(r"rank-([0-9]{5})\.failed", re.ASCII)
_ALL_STEPS = range(10**18)
_CHECKSUM_FIELD = b'\n "xxh3": "'


@dataclass(frozen=True)
class Announcements:
    """Announcements of an attempt."""

    parts: dict[int, str]
    """Rank -> path of its part."""
    failures: dict[int, str]
    """Rank -> path of its error, of ranks without a part: one that failed and succeeded later is
    not among them."""


def put_part(
    storage: Storage, step: int, token: str, rank: int, part: Mapping[str, Any]
) -> dict[str, Any]:
    """Announce durably that a rank has written everything in `part`, and return the part as the
    manifest needs it."""
    part = {**part, "data": token} if storage.keeps_attempts else dict(part)
    storage.announce(step, token, f"rank-{rank:05d}.json", json.dumps(part).encode())
    return part


def put_failure(storage: Storage, step: int, token: str, rank: int, error: str) -> None:
    """Announce that a rank writes nothing in this attempt."""
    storage.announce(step, token, f"rank-{rank:05d}.failed", json.dumps(error).encode())


def announcements(storage: Storage, step: int, token: str) -> Announcements:
    """Return the announcements of an attempt as they are now."""
    paths = storage.announced(step, token)
    parts, failures = _by_rank(_PART, paths), _by_rank(_FAILURE, paths)
    return Announcements(
        parts, {rank: path for rank, path in failures.items() if rank not in parts}
    )


def read_part(storage: Storage, announced: Announcements, rank: int) -> dict[str, Any]:
    """Return a part as `put_part` returned it. Raises OSError."""
    if rank not in announced.parts:
        raise FileNotFoundError(f"Rank {rank} has not announced its part in {storage.root}.")
    return _read(storage, announced.parts[rank])


def read_failures(storage: Storage, announced: Announcements) -> dict[int, str]:
    """Return rank -> error of the announced failures that are still there. Raises OSError."""
    errors = {}
    for rank, path in announced.failures.items():
        with suppress(FileNotFoundError):
            errors[rank] = str(_read(storage, path))
    return errors


def commit(
    storage: Storage,
    step: int,
    token: str,
    parts: Iterable[Mapping[str, Any]],
    base: Mapping[str, Any],
) -> None:
    """Merge the parts of all ranks with `base`, see `build_manifest`, and make the step visible as
    `Storage.commit` does."""
    storage.commit(step, token, manifest_bytes(build_manifest(step, parts, base)))


def abandon(storage: Storage, step: int, token: str) -> None:
    """Remove what an attempt wrote without committing it."""
    storage.remove_attempts(step, lambda other: other != token)


def recover(storage: Storage, generation_id: str) -> None:
    """Remove what killed processes left, except for attempts whose tokens begin with
    `generation_id`. For one process, before it saves."""
    storage.remove_attempts(_ALL_STEPS, lambda token: token.startswith(generation_id))


def remove_stale_attempts(storage: Storage, before: int) -> None:
    """Remove attempts at steps older than `before`, which is committed: they cannot succeed,
    because every rank writes its steps in order."""
    storage.remove_attempts(range(before), lambda token: False)


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
        return _lines([(key, json.dumps(entry)) for key, entry in value.items()], " ")
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


def _by_rank(pattern: re.Pattern[str], paths: Iterable[str]) -> dict[int, str]:
    names = ((pattern.fullmatch(path.rpartition("/")[2]), path) for path in paths)
    return {int(match[1]): path for match, path in names if match}


def _read(storage: Storage, path: str) -> Any:
    try:
        return json.loads(bytes(storage.read(path)))
    except ValueError as error:
        raise OSError(f"{storage.root}/{path} is damaged: {error}") from None
