"""Names and data types of the on-disk format: step folders, manifests and tensor files.

Standard library only, for the writer process.
"""

import re

FORMAT = "torchtitan_lite.checkpoint"
VERSION = 3
READ_VERSIONS = (2, 3)
"""Supported format versions. Version 2 had no `data` and another checksum."""
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"rank-([0-9]{5})\.safetensors", re.ASCII)
ATTEMPT_TOKEN = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,127}", re.ASCII)
"""Pattern of an attempt's token where it names files: it cannot name another folder or a file."""
_STEP = re.compile(r"step-([0-9]{1,18})", re.ASCII)
BYTES_PER_ELEMENT: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4,
    "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Element sizes by safetensors dtype name."""


def tensor_file_name(writer: int) -> str:
    """Return the file name of a writer: its rank, if one replica writes alone."""
    return f"rank-{writer:05d}.safetensors"


def parse_writer(name: str) -> int:
    """Return the writer of a `tensor_file_name`. Raises ValueError for other names."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r:.100} is not a tensor file name")
    return int(match[1])


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step}"


def parse_step_name(name: str) -> int | None:
    """Return the step of a folder name; None for other folders."""
    match = _STEP.fullmatch(name)
    # "step-007" is not canonical: it would be read and deleted as "step-7".
    return int(match[1]) if match and step_name(int(match[1])) == name else None
