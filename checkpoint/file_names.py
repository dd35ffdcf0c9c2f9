"""The names of files of tensors. Layer: imports nothing of the project."""

import re

FILE_NAME = re.compile(r"rank-([0-9]{5})\.safetensors", re.ASCII)


def file_name(writer: int) -> str:
    """The file of a writer, by its number: that of its rank, where one replica writes alone."""
    return f"rank-{writer:05d}.safetensors"


def writer_of(name: str) -> int:
    """The number in a name that `file_name` gave. Raises ValueError for another name."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r:.100} is no file of tensors")
    return int(match[1])
