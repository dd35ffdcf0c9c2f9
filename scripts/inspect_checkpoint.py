"""Show what is in a checkpoint, check that it is whole, and list what runs left in shared memory.

python -m scripts.inspect_checkpoint PATH [--verify] [--tensors] [--json]
python -m scripts.inspect_checkpoint --shm [--free [RUN_ID]] [--json]

PATH is the folder of a step, or the folder of all steps of a run; or the URL of one. The exit
status is 1 where something is damaged, and 2 where the question cannot be answered.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from scripts.left_memory import free_left, left, left_in_words
from torchtitan_lite.checkpoint.manifest import Manifest, layouts_of, read_manifest_alone
from torchtitan_lite.checkpoint.memory.description import BYTES_PER_ELEMENT
from torchtitan_lite.checkpoint.memory.folder import SHARED_MEMORY
from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.names import step_name, step_of
from torchtitan_lite.checkpoint.storage.storage import Storage, open_storage
from torchtitan_lite.checkpoint.verify import verify
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, UserError


def main(argv: list[str], shared_memory: Path = SHARED_MEMORY) -> int:
    """Entry of the command. Returns the exit status."""
    try:
        options = _parser().parse_args(argv)
        if (options.path is None) != options.shm or (options.free is not None and not options.shm):
            raise UserError("Give either PATH or --shm; --free goes with --shm.")
        if options.shm:
            freed = [] if options.free is None else free_left(options.free, shared_memory)
            runs = left(shared_memory)
            _say(options, {"freed": freed, "runs": runs}, left_in_words(runs, freed))
            return 0
        storage, names = _steps(options.path)
        records = [_record(storage, name, options) for name in names]
        shown = records[0] if _is_step(options.path) else {"root": storage.root, "steps": records}
        _say(options, shown, "\n\n".join(map(_in_words, records)))
        return int(any(record["damage"] for record in records))
    except (UserError, OSError) as error:
        print(f"inspect_checkpoint: {error}", file=sys.stderr)
        return 2


def _say(options: argparse.Namespace, record: Mapping[str, Any], words: str) -> None:
    print(json.dumps(record, indent=2) if options.json else words)


def _is_step(path: str) -> bool:
    name = path.rstrip("/").rpartition("/")[2]
    return step_of(name) is not None or Path(path, MANIFEST).is_file()


def _steps(path: str) -> tuple[Storage, list[str]]:
    """Where the checkpoints lie, and their names. Raises CheckpointError when there are none."""
    whole = path.rstrip("/") if "://" in path else str(Path(path).absolute())
    if _is_step(path):
        root, _, name = whole.rpartition("/")
        return open_storage(root or "/"), [name]
    storage = open_storage(whole)
    names = [step_name(step) for step in storage.steps()]
    if not names:
        raise CheckpointError(
            f"{path} holds no checkpoint: needed is the folder of a step, in which there is a "
            f"{MANIFEST}, or one that holds such folders."
        )
    return storage, names


def _record(storage: Storage, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What there is to say of one checkpoint."""
    record: dict[str, Any] = {"path": f"{storage.root}/{name}", "verified": options.verify}
    try:
        manifest = read_manifest_alone(storage, name)
    except DamagedCheckpoint as error:
        return record | {"damage": [{"file": MANIFEST, "tensor": None, "problem": str(error)}]}
    found = verify(storage, name) if options.verify else []
    record |= {"damage": [asdict(one) for one in found]} | _contents(manifest)
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


def _in_words(record: Mapping[str, Any]) -> str:
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
        lines.append("  whole: all checksums hold")
    return "\n".join(lines)


def _sizes(by_name: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(count)}" for name, count in by_name.items()) or "none"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, like any other error."""
        raise UserError(f"{message}. --help shows how to call it.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m scripts.inspect_checkpoint",
        description="Show what is in a checkpoint, check that it is whole, and list what runs left "
        "in shared memory.",
        allow_abbrev=False,
    )
    parser.add_argument("path", nargs="?", help="folder (or URL) of a step, or of all steps")
    parser.add_argument(
        "--verify", action="store_true", help="read everything and compare all checksums"
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors too")
    parser.add_argument("--shm", action="store_true", help="list what runs left in shared memory")
    parser.add_argument(
        "--free",
        nargs="?",
        const="",
        metavar="RUN_ID",
        help="with --shm: free what that run left; without RUN_ID, what all left for which no "
        "process writes",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
