"""A Hugging Face folder as a snapshot: the family's key map applied, weights held by blocks of
rows.

Invariant: every byte of a parameter has one holder; holders are consecutive along dim 0, and each
is contiguous in its file. Layer: above folder.
"""

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch

from torchtitan_lite.checkpoint.conversion import expected_shapes
from torchtitan_lite.checkpoint.hugging_face.folder import HuggingFaceFolder
from torchtitan_lite.checkpoint.snapshots import SavedValues
from torchtitan_lite.checkpoint.storage.base import Storage, read_error
from torchtitan_lite.checkpoint.tensors import tensor_bytes, tensor_from_bytes
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.redistribute import Layout, TensorSpec
from torchtitan_lite.redistribute.placements import Holder
from torchtitan_lite.spec import HuggingFaceForm, HuggingFaceKey, ModelSpec

_SMALL_BYTES = 1 << 20
"""Maximum size of a tensor that is a single block."""
_ZEROS: Holder = "nowhere"
"""Holder of buffers that such folders do not contain, and that are zero."""
_SHOWN = 40
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RowSlice:
    """Whole rows of a parameter, and their byte range in a file."""

    key: str
    file: str
    first: int
    end: int


@dataclass(frozen=True)
class ParameterSource:
    """Location of a parameter in the folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[RowSlice, ...]
    """Of equal length along dim 0. Empty for a buffer that is not in the folder, and is zero."""


class HuggingFaceSnapshot:
    """Model weights, as step 0."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        spec: ModelSpec,
        *,
        num_blocks: int = 1,
        block_bytes: int | None = None,
    ) -> None:
        """Each parameter has at least `num_blocks` holders, so that as many ranks read a part of
        it, or enough to keep blocks below `block_bytes`.

        Raises CheckpointError if the folder holds another model than `spec`, and the errors of
        `HuggingFaceFolder`.
        """
        if spec.hugging_face is None:
            raise CheckpointError(
                f"{spec.name} {spec.flavor} is unknown to transformers: {storage.root}/{name} "
                "cannot be loaded into it. Choose another model.name or model.flavor."
            )
        self.folder = folder = HuggingFaceFolder(storage, name)
        self.where = folder.where
        if differences := spec.hugging_face.differences(folder.config):
            raise CheckpointError(
                f"{self.where} is another model than {spec.name} {spec.flavor}: "
                f'{"; ".join(differences)}. Set model.flavor = "hf" and model.hf_assets_path to '
                "the folder, which takes the model from there."
            )
        self._storage = storage
        parameters, buffers = expected_shapes(spec)
        sources = map_parameters(folder, spec, parameters | buffers)
        self._sources = {f"model.{name}": source for name, source in sources.items()}
        self.tensors: dict[str, TensorSpec] = {}
        self._pieces: dict[tuple[str, Holder], RowSlice] = {}
        for name, source in self._sources.items():
            num_bytes = prod(source.shape) * source.dtype.itemsize
            wanted = num_blocks if num_bytes > _SMALL_BYTES else 1
            if block_bytes is not None:
                wanted = max(wanted, -(-num_bytes // block_bytes))
            layout, owners = _block_layout(source, wanted)
            self.tensors[name] = TensorSpec(layout, source.shape, source.dtype)
            self._pieces |= {(name, holder): piece for holder, piece in owners.items()}
        self.saved = SavedValues(0, {}, {}, {}, model_only=True)

    def is_weight(self, name: str) -> bool:
        """Return whether the folder contains the tensor; False for a zero buffer."""
        return bool(self._sources[name].pieces)

    def reach(self, holder: Holder) -> None:
        """Return None: every rank can read the storage."""
        return None

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        placed = self.tensors[name]
        shape = placed.layout.local_shape(placed.shape, holder)
        if holder == _ZEROS or 0 in shape:
            return torch.zeros(shape, dtype=placed.dtype)
        file, first, end = self._place(name, holder)
        try:
            raw = self._storage.read(self.folder.path(file), first, end)
        except OSError as error:
            raise self._read_error(file, error) from None
        if len(raw) != end - first:
            raise self._read_error(file, OSError(errno.ENODATA, f"it ends before byte {end}"))
        return tensor_from_bytes(raw, placed.dtype, shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        if holder == _ZEROS or into.numel() == 0:
            into.zero_()
            return
        file, first, _ = self._place(name, holder)
        try:
            self._storage.read_into(self.folder.path(file), first, tensor_bytes(into), _ignore)
        except OSError as error:
            raise self._read_error(file, error) from None

    def _place(self, name: str, holder: Holder) -> tuple[str, int, int]:
        """Return the byte range of a holder's block in its file."""
        placed, piece = self.tensors[name], self._pieces[name, holder]
        (box,) = placed.layout.boxes(placed.shape, holder)
        # Rows are relative to the slice, which consists of whole rows.
        dim = 0 if len(self._sources[name].pieces) == 1 else 1
        row_bytes = prod(placed.shape[dim + 1 :]) * placed.dtype.itemsize
        first = piece.first + box.offset[dim] * row_bytes
        return piece.file, first, first + prod(box.size) * placed.dtype.itemsize

    def _read_error(self, file: str, error: OSError) -> CheckpointError:
        return read_error(f"{self.where}/{file} cannot be read", error)


def map_parameters(
    folder: HuggingFaceFolder, spec: ModelSpec, shapes: Mapping[str, Sequence[int]]
) -> dict[str, ParameterSource]:
    """Return name -> location for parameters and buffers of these shapes. Raises CheckpointError
    that lists all missing, misshapen and quantized parameters, and all unexpected keys."""
    assert spec.hugging_face is not None
    used: set[str] = set()
    problems: list[str] = []
    found: dict[str, ParameterSource] = {}
    for name, shape in shapes.items():
        rule, numbers = match_key(spec.hugging_face.keys, name)
        if not rule.forms:
            found[name] = ParameterSource(torch.float32, tuple(shape), ())
            continue
        form = next((f for f in rule.forms if _is_there(folder, f, numbers)), rule.forms[0])
        keys = expand_key(form, numbers, shape)
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
        f"{key} is unexpected"
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


def match_key(rules: Sequence[HuggingFaceKey], name: str) -> tuple[HuggingFaceKey, tuple[str, ...]]:
    """Return the key rule of a parameter, and the numbers in its name. Raises CheckpointError."""
    for rule in rules:
        pattern = "([0-9]+)".join(map(re.escape, rule.name.split("*")))
        if match := re.fullmatch(pattern, name, re.ASCII):
            return rule, match.groups()
    raise CheckpointError(f"{name} has no name in a Hugging Face folder.")


def expand_key(form: HuggingFaceForm, numbers: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Return the keys that hold a parameter of `shape`, in row order."""
    key = form.key
    for number in numbers:
        key = key.replace("*", number, 1)
    return [key.replace("*", str(row), 1) for row in range(shape[0])] if "*" in key else [key]


def _block_layout(
    source: ParameterSource, num_blocks: int
) -> tuple[Layout, dict[Holder, RowSlice]]:
    """Split row slices along dim 0 between them, and each into blocks of its own rows."""
    pieces = source.pieces
    if not pieces:
        return Layout.on_holder(_ZEROS), {}
    if len(pieces) == 1:
        owners = {_holder(pieces[0], block): pieces[0] for block in range(num_blocks)}
        return Layout.sharded_by_dims((num_blocks,), tuple(owners)), owners
    each = -(-num_blocks // len(pieces))
    owners = {_holder(piece, block): piece for piece in pieces for block in range(each)}
    return Layout.sharded_by_dims((len(pieces), each), tuple(owners)), owners


def _holder(piece: RowSlice, block: int) -> Holder:
    return f"{piece.key} from byte {piece.first}, block {block}"


def _ignore(content: memoryview) -> None:
    """Do nothing: there are no checksums to verify."""


def _is_there(folder: HuggingFaceFolder, form: HuggingFaceForm, numbers: Sequence[str]) -> bool:
    # The first element of a stack represents all; missing others are reported.
    return expand_key(form, numbers, (1,))[0] in folder.tensors


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
                f"{key} is of {found.tensor.dtype}: quantized weights are not loaded; take the "
                "model as bfloat16"
            )


def _source(
    folder: HuggingFaceFolder, form: HuggingFaceForm, keys: Sequence[str], shape: Sequence[int]
) -> ParameterSource:
    number, count = form.part
    pieces = []
    for key in keys:
        found = folder.tensors[key]
        first, end = found.tensor.first, found.tensor.end
        # A fused tensor is a stack of matrices, and this parameter is some rows of each.
        matrices = prod(found.tensor.shape[:-2]) if count > 1 else 1
        stride = (end - first) // matrices
        for matrix in range(matrices):
            start = first + matrix * stride + number * stride // count
            pieces.append(RowSlice(key, found.file, start, start + stride // count))
    return ParameterSource(folder.tensors[keys[0]].tensor.dtype, tuple(shape), tuple(pieces))
