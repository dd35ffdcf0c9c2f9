"""`torchtitan-lite inspect`: checkpoints, and snapshots in shared memory."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint import (
    WAYS,
    Manifest,
    find_steps,
    is_step,
    layouts_of,
    read_manifest_alone,
    verify,
)
from torchtitan_lite.checkpoint.shared_memory import (
    COPY,
    OWN,
    PUBLISHED,
    SHARED_MEMORY,
    Region,
    SharedMemoryRun,
    SlotState,
    free_run,
    list_runs,
    region_files,
)
from torchtitan_lite.checkpoint.storage import (
    BYTES_PER_ELEMENT,
    MANIFEST,
    Storage,
    open_storage,
)
from torchtitan_lite.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DamagedSnapshot,
    UserError,
)
from torchtitan_lite.core.urls import is_url


def run(
    options: argparse.Namespace, arguments: Sequence[str], shared_memory: Path = SHARED_MEMORY
) -> int:
    """Inspect the target of `options`. Returns the exit status."""
    try:
        if (options.path is None) != options.shm or (options.free is not None and not options.shm):
            raise UserError("Give either PATH or --shm; --free needs --shm.")
        if options.shm:
            return _inspect_memory(options, shared_memory)
        storage, names = _steps(options.path)
        records = [_record(storage, name, options) for name in names]
        shown = records[0] if is_step(options.path) else {"root": storage.root, "steps": records}
        _print(options, shown, "\n\n".join(map(_format_record, records)))
        return int(any(record["damage"] for record in records))
    except (UserError, OSError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2


def _inspect_memory(options: argparse.Namespace, base: Path) -> int:
    freed: list[str] = []
    if options.free is not None:
        runs = {run.run_id: run for run in list_runs(base=base)}
        ids = [options.free] if options.free else [i for i, run in runs.items() if not run.is_used]
        unused = [_memory_record(runs[run_id]) for run_id in ids if run_id in runs]
        if not options.free and unused and not options.yes and not _confirmed(unused):
            return 2
        for run_id in ids:
            # Raises CheckpointError for an unknown run, and for one that is in use.
            free_run(run_id, base=base)
        freed = ids
    left = [_memory_record(run) for run in list_runs(base=base)]
    _print(options, {"freed": freed, "runs": left}, _format_memory(left, freed))
    return 0


def _confirmed(unused: Sequence[Mapping[str, Any]]) -> bool:
    """Show what would be freed and ask for confirmation. Raises UserError without a terminal."""
    print(_format_memory(unused, []), file=sys.stderr)
    if not sys.stdin.isatty():
        raise UserError(
            f"--free without RUN_ID would free the memory of {len(unused)} runs listed above. "
            "Confirm with --yes, or name one run."
        )
    list_runs = "this run" if len(unused) == 1 else f"these {len(unused)} runs"
    print(f"Free the memory of {list_runs}? [y/N] ", end="", file=sys.stderr, flush=True)
    is_confirmed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not is_confirmed:
        print("Nothing was freed.", file=sys.stderr)
    return is_confirmed


def _print(options: argparse.Namespace, record: Mapping[str, Any], text: str) -> None:
    print(json.dumps(record, indent=2) if options.json else text)


def _steps(path: str) -> tuple[Storage, list[str]]:
    """Return the location of the checkpoints, and their names. Raises CheckpointError if there
    are none."""
    root, names = find_steps(path if is_url(path) else str(Path(path).absolute()))
    if not names:
        raise CheckpointError(f"{path} contains no checkpoint. Give {WAYS}.")
    return open_storage(root), names


def _record(storage: Storage, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Describe one checkpoint."""
    record: dict[str, Any] = {"path": f"{storage.root}/{name}", "verified": options.verify}
    try:
        manifest = read_manifest_alone(storage, name)
    except DamagedCheckpoint as error:
        return record | {"damage": [{"file": MANIFEST, "tensor": None, "problem": str(error)}]}
    problems = verify(storage, name) if options.verify else []
    record |= {"damage": [asdict(problem) for problem in problems]} | _contents(manifest)
    if options.tensors:
        record["tensors"] = _tensors(manifest)
    return record


def _contents(manifest: Manifest) -> dict[str, Any]:
    parts: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, entry in manifest.tensors.items():
        num_bytes = prod(entry.shape) * BYTES_PER_ELEMENT.get(entry.dtype, 0)
        parts[name.partition(".")[0]] += num_bytes
        dtypes[entry.dtype] += num_bytes
        for box in entry.boxes:
            files[box.file] += box.bytes[1] - box.bytes[0]
    return {
        "step": manifest.step,
        "model_only": manifest.model_only,
        "format_version": manifest.version,
        "versions": manifest.versions,
        "data": manifest.data,
        "mesh": manifest.mesh,
        "num_tensors": len(manifest.tensors),
        "bytes": sum(parts.values()),
        "bytes_by_part": dict(parts),
        "bytes_by_dtype": dict(dtypes),
        "bytes_by_file": dict(sorted(files.items())),
        "values": sorted(manifest.values),
    }


def _tensors(manifest: Manifest) -> dict[str, Any]:
    layouts = layouts_of(manifest)
    return {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "layout": str(layouts[entry.layout]),
            "boxes": len(entry.boxes),
        }
        for name, entry in sorted(manifest.tensors.items())
    }


def _format_record(record: Mapping[str, Any]) -> str:
    lines = [record["path"]]
    if "step" in record:
        written = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        degrees = [f"{axis} {degree}" for axis, degree in record["mesh"].items() if degree > 1]
        below = "" if record["data"] is None else f" below {record['data']}"
        lines += [
            f"  step {record['step']}" + (", weights only" if record["model_only"] else ""),
            f"  format version {record['format_version']}, written by {written}",
            f"  mesh: {' x '.join(degrees) or 'one rank'}",
            f"  {record['num_tensors']} tensors, {_size(record['bytes'])} in "
            f"{len(record['bytes_by_file'])} files{below}",
            f"  parts: {_sizes(record['bytes_by_part'])}",
            f"  dtypes: {_sizes(record['bytes_by_dtype'])}",
            f"  values: {', '.join(record['values']) or 'none'}",
        ]
    for name, entry in record.get("tensors", {}).items():
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        lines.append(f"    {name}: {entry['dtype']} {shape}, {entry['layout']}")
    for damage in record["damage"]:
        tensor = f"{damage['tensor']}: " if damage["tensor"] else ""
        lines.append(f"  DAMAGED {damage['file']}: {tensor}{damage['problem']}")
    if record["verified"] and not record["damage"]:
        lines.append("  intact: all checksums match")
    return "\n".join(lines)


def _sizes(by_name: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(count)}" for name, count in by_name.items()) or "none"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"


def _format_memory(runs: Sequence[Mapping[str, Any]], freed: Sequence[str]) -> str:
    lines = [f"Freed run {run_id}." for run_id in freed]
    for run in runs:
        lines += [f"run {run['run_id']}, {run['bytes'] / 2**20:,.1f} MiB"]
        for what, record in (
            ("snapshots", run),
            ("buddy copies", run["copies"]),
            ("published weights", run["published"]),
        ):
            if record["ranks"]:
                steps = ", ".join(map(str, record["steps"])) or "none"
                lines.append(f"  {what} of {len(record['ranks'])} ranks, complete steps: {steps}")
            lines += [
                f"  {what} of rank {rank} are written by process {pid or 'unknown'}"
                for rank, pid in record["writers"].items()
            ]
        if run["root"]:
            lines.append(f"  checkpoints in {run['root']}")
        if pinned := ", ".join(map(str, run["published"]["pinned"])):
            lines.append(f"  subscribers read published weights of ranks {pinned}")
    return "\n".join(lines or ["No run holds shared memory."])


def _memory_record(run: SharedMemoryRun) -> dict[str, Any]:
    own, copies, published = (_kind_record(run, kind) for kind in (OWN, COPY, PUBLISHED))
    # Publishers do not know where checkpoints are.
    roots = (own.pop("roots") | copies.pop("roots") | published.pop("roots")) - {""}
    return {
        "run_id": run.run_id,
        "root": ", ".join(sorted(roots)),
        "bytes": run.bytes,
        **own,
        "copies": copies,
        "published": published | {"pinned": list(run.pinned)},
    }


def _kind_record(run: SharedMemoryRun, kind: str) -> dict[str, Any]:
    """Describe the regions of a kind; steps are those that all of them hold."""
    roots: set[str] = set()
    steps: list[set[int]] = []
    for path in region_files(run.path, kind).values():
        # A damaged one has no step.
        held: set[int] = set()
        with suppress(DamagedSnapshot):
            region = Region.open(path)
            roots.add(str(region.description.get("root")))
            held = {slot.step for slot in region.slots() if slot.state == SlotState.COMPLETE}
            region.close()
        steps.append(held)
    return {
        "roots": roots,
        "ranks": list(run.ranks[kind]),
        "steps": sorted(set.intersection(*steps)) if steps else [],
        "writers": {str(rank): pid for (of, rank), pid in run.owners.items() if of == kind},
    }
