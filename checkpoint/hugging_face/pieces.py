"""Which bytes of a Hugging Face folder make up each parameter of a model: the family's key map,
applied. Layer: above folder.

Invariant: the pieces of a parameter follow each other along its dim 0, each contiguous in its file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch

from torchtitan_lite.checkpoint.hugging_face.folder import HuggingFaceFolder
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.spec import HuggingFaceForm, HuggingFaceKey, ModelSpec

_SHOWN = 40
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Piece:
    """Whole rows of a parameter, and the bytes that hold them."""

    key: str
    file: str
    first: int
    end: int


@dataclass(frozen=True)
class Source:
    """A parameter, as the folder has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Of equal length along dim 0. Empty: it does not exist there, and is zero."""


def find_pieces(
    folder: HuggingFaceFolder, spec: ModelSpec, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Source]:
    """Our name -> where it lies, for parameters and buffers of these shapes. Raises CheckpointError
    that lists every parameter that is missing, misshapen or quantised, and every key that has no
    place."""
    assert spec.hugging_face is not None
    used: set[str] = set()
    problems: list[str] = []
    found: dict[str, Source] = {}
    for name, shape in shapes.items():
        rule, numbers = rule_of(spec.hugging_face.keys, name)
        if not rule.forms:
            found[name] = Source(torch.float32, tuple(shape), ())
            continue
        form = next((f for f in rule.forms if _is_there(folder, f, numbers)), rule.forms[0])
        keys = keys_of(form, numbers, shape)
        used.update(keys)
        wanted = _shape_there(form, shape)
        wrong = list(_problems(folder, keys, wanted))
        problems += [f"{problem} (needed for {name})" for problem in wrong]
        if not wrong:
            found[name] = _source(folder, form, keys, shape)
            dtypes = {str(folder.tensors[key].tensor.dtype) for key in keys}
            if len(dtypes) > 1:
                problems.append(f"{keys[0]} and its like are of {' and '.join(sorted(dtypes))}")
    ignored = spec.hugging_face.ignored
    problems += [
        f"{key} has no place in the model"
        for key in folder.tensors
        if key not in used and not any(fnmatchcase(key, pattern) for pattern in ignored)
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{folder.where} does not fit {spec.name} {spec.flavor} ({len(problems)} problems): "
            f"{'; '.join(problems[:_SHOWN])}{more}."
        )
    return found


def rule_of(rules: Sequence[HuggingFaceKey], name: str) -> tuple[HuggingFaceKey, tuple[str, ...]]:
    """The rule of a parameter of ours, and the numbers in its name. Raises CheckpointError."""
    for rule in rules:
        pattern = "([0-9]+)".join(map(re.escape, rule.name.split("*")))
        if match := re.fullmatch(pattern, name, re.ASCII):
            return rule, match.groups()
    raise CheckpointError(f"{name} has no name in a Hugging Face folder.")


def keys_of(form: HuggingFaceForm, numbers: Sequence[str], shape: Sequence[int]) -> list[str]:
    """The keys that hold a parameter of `shape`, in the order of its rows."""
    key = form.key
    for number in numbers:
        key = key.replace("*", number, 1)
    return [key.replace("*", str(row), 1) for row in range(shape[0])] if "*" in key else [key]


def _is_there(folder: HuggingFaceFolder, form: HuggingFaceForm, numbers: Sequence[str]) -> bool:
    # The first element of a stack stands for all: of others that are missing it is told.
    return keys_of(form, numbers, (1,))[0] in folder.tensors


def _shape_there(form: HuggingFaceForm, shape: Sequence[int]) -> tuple[int, ...]:
    _, count = form.part
    there = tuple(shape[1:]) if form.key.count("*") > 1 else tuple(shape)
    if count == 1:
        return there
    return (*there[:-2], there[-2] * count, there[-1])


def _problems(
    folder: HuggingFaceFolder, keys: Sequence[str], shape: tuple[int, ...]
) -> Iterator[str]:
    for key in keys:
        found = folder.tensors.get(key)
        if found is None:
            yield f"{key} is missing"
        elif found.tensor.shape != shape:
            yield f"{key} has shape {list(found.tensor.shape)}, and {list(shape)} is needed"
        elif found.tensor.dtype not in _FLOATS:
            yield (
                f"{key} is of {found.tensor.dtype}: quantised weights are not loaded; take the "
                "model as bfloat16"
            )


def _source(
    folder: HuggingFaceFolder, form: HuggingFaceForm, keys: Sequence[str], shape: Sequence[int]
) -> Source:
    number, count = form.part
    pieces = []
    for key in keys:
        found = folder.tensors[key]
        first, end = found.tensor.first, found.tensor.end
        # A fused tensor is a stack of matrices, of each of which these are some rows.
        matrices = prod(found.tensor.shape[:-2]) if count > 1 else 1
        stride = (end - first) // matrices
        for matrix in range(matrices):
            start = first + matrix * stride + number * stride // count
            pieces.append(Piece(key, found.file, start, start + stride // count))
    return Source(folder.tensors[keys[0]].tensor.dtype, tuple(shape), tuple(pieces))
