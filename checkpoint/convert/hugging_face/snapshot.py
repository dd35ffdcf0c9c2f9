"""A Hugging Face folder as a snapshot: the family's key map applied, weights held by blocks of
rows.

Invariant: every byte of a parameter has one holder; holders are consecutive along dim 0, and each
is contiguous in its file.
"""

import errno
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch

from torchtitan_lite.checkpoint.convert.conversion import expected_shapes
from torchtitan_lite.checkpoint.convert.hugging_face.folder import CONFIG, HuggingFaceFolder
from torchtitan_lite.checkpoint.snapshots import SavedValues
from torchtitan_lite.checkpoint.storage.base import read_error
from torchtitan_lite.checkpoint.tensors import tensor_bytes, tensor_from_bytes
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.redistribute import Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.nn.hugging_face.config import naming
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, ModelSpec

_SMALL_BYTES = 1 << 20
"""Maximum size of a tensor that is a single block."""
_ZEROS: Holder = "nowhere"
"""Holder of buffers that such folders do not contain, and that are zero."""
_SHOWN = 40
_SAMPLE_BYTES = 4096
"""Bytes at each end of a tensor that count for the fingerprint."""
_MXFP4_BLOCK = 32
"""Numbers with one scale in MXFP4 (OCP Microscaling Formats 1.0): 4 bits each (1 of sign, 2 of
exponent, 1 of mantissa), with a power of two as their scale."""
_MXFP4_BIAS = 127
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
    transposed: bool = False
    """Whether each piece is a matrix, one element of dim 0, with its dims swapped."""
    part: tuple[int, int] = (0, 1)
    """(k, n): if transposed, part k of n of the columns of the matrix."""
    scales: RowSlice | None = None
    """Scales of MXFP4 blocks, which are in the only piece; None if the pieces are the numbers."""


class HuggingFaceSnapshot:
    """Model weights, as step 0."""

    def __init__(
        self,
        folder: HuggingFaceFolder,
        spec: ModelSpec,
        *,
        num_blocks: int = 1,
        block_bytes: int | None = None,
    ) -> None:
        """Each parameter has at least `num_blocks` holders, so that as many ranks read a part of
        it, or enough to keep blocks below `block_bytes`.

        Raises CheckpointError if the folder holds another model than `spec`.
        """
        if spec.hugging_face is None:
            raise CheckpointError(
                f"{spec.unknown_to_transformers}: {folder.where} cannot be loaded into it. Choose "
                "another model.name or model.flavor."
            )
        self.folder = folder
        self.where = folder.where
        with naming(f"{self.where}/{CONFIG}"):
            differences = spec.hugging_face.differences(folder.config)
        if differences:
            raise CheckpointError(
                f"{self.where} is another model than {spec.name} {spec.flavor}: "
                f'{"; ".join(differences)}. Set model.flavor = "hf" and model.hf_assets_path to '
                "the folder, which takes the model from there."
            )
        patterns = spec.hugging_face.ignored
        self.ignored = [
            key for key in folder.tensors if any(fnmatchcase(key, pattern) for pattern in patterns)
        ]
        """Keys of tensors that are not loaded."""
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

    def fingerprint(self) -> str:
        """Return a digest of the tensors' names, dtypes and shapes, and of the first and last bytes
        of each: such a folder has no checksums, and reading all of it would take as long as loading
        it."""
        digest = hashlib.blake2b(digest_size=16)
        for key, located in sorted(self.folder.tensors.items()):
            about = located.tensor
            digest.update(f"{key} {about.dtype} {about.shape} ".encode())
            for first in (about.first, max(about.first, about.end - _SAMPLE_BYTES)):
                last = min(first + _SAMPLE_BYTES, about.end)
                digest.update(self._read(located.file, first, last))
        return digest.hexdigest()

    def reach(self, holder: Holder) -> None:
        """Return None: every rank can read the storage."""
        return None

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        placed = self.tensors[name]
        shape = placed.layout.local_shape(placed.shape, holder)
        if holder == _ZEROS or 0 in shape:
            return torch.zeros(shape, dtype=placed.dtype)
        source = self._sources[name]
        if source.scales is not None:
            return self._dequantized(name, holder, source.scales, shape)
        file, first, end = self._place(name, holder)
        if source.transposed:
            end = first + source.part[1] * (end - first)
        raw = self._read(file, first, end)
        if source.transposed:
            rows, columns = shape[-2:]
            number, count = source.part
            stored = tensor_from_bytes(raw, placed.dtype, (columns, count * rows))
            return stored.chunk(count, dim=1)[number].t().contiguous().view(shape)
        return tensor_from_bytes(raw, placed.dtype, shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        if holder == _ZEROS or into.numel() == 0:
            into.zero_()
            return
        source = self._sources[name]
        if source.transposed or source.scales is not None:
            into.copy_(self.part(name, holder))
            return
        file, first, _ = self._place(name, holder)
        try:
            self.folder.storage.read_into(
                self.folder.path(file), first, tensor_bytes(into), _ignore
            )
        except OSError as error:
            raise self._read_error(file, error) from None

    def _read(self, file: str, first: int, end: int) -> bytes | memoryview:
        """Read bytes [first, end) of a file."""
        try:
            raw = self.folder.storage.read(self.folder.path(file), first, end)
        except OSError as error:
            raise self._read_error(file, error) from None
        if len(raw) != end - first:
            raise self._read_error(file, OSError(errno.ENODATA, f"it ends before byte {end}"))
        return raw

    def _dequantized(
        self, name: str, holder: Holder, scales: RowSlice, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return a holder's elements of dim 0, from their blocks and scales."""
        placed, blocks = self.tensors[name], self._pieces[name, holder]
        (box,) = placed.layout.boxes(placed.shape, holder)
        first = box.offset[0] * prod(placed.shape[1:])
        end = first + prod(shape)
        numbers = self._read(blocks.file, blocks.first + first // 2, blocks.first + end // 2)
        at = (scales.first + first // _MXFP4_BLOCK, scales.first + end // _MXFP4_BLOCK)
        exponents = self._read(scales.file, *at)
        return dequantize_mxfp4(
            torch.frombuffer(bytearray(numbers), dtype=torch.uint8),
            torch.frombuffer(bytearray(exponents), dtype=torch.uint8),
        ).view(*shape)

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
    parameters: dict[str, ParameterSource] = {}
    for name, shape in shapes.items():
        rule, numbers = match_key(spec.hugging_face.keys, name)
        if not rule.forms:
            parameters[name] = ParameterSource(torch.float32, tuple(shape), ())
            continue
        form = next((f for f in rule.forms if _is_there(folder, f, numbers)), rule.forms[0])
        keys = expand_key(form, numbers, shape)
        used.update(keys)
        if form.scales is not None:
            (scales,) = expand_key(replace(form, key=form.scales), numbers, shape)
            used.add(scales)
            wrong = list(_mxfp4_problems(folder, keys[0], scales, shape))
            problems += [f"{problem} (needed for {name})" for problem in wrong]
            if not wrong:
                parameters[name] = _mxfp4_source(folder, keys[0], scales, shape)
            continue
        wanted = shape_there(form, shape)
        wrong = list(_problems(folder, keys, wanted))
        problems += [f"{problem} (needed for {name})" for problem in wrong]
        if not wrong:
            parameters[name] = _source(folder, form, keys, shape)
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
    return parameters


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
    if source.transposed:
        owners = {_holder(piece, 0): piece for piece in pieces}
        return Layout.sharded_by_dims((len(pieces),), tuple(owners)), owners
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


def shape_there(form: HuggingFaceForm, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor in a folder that holds a parameter of `shape`."""
    _, count = form.part
    there = tuple(shape[1:]) if form.key.count("*") > 1 else tuple(shape)
    if form.is_row:
        return (1, *there)
    if form.rows is not None:
        return (form.rows[1], *there[1:])
    if form.transposed:
        return (*there[:-2], there[-1], there[-2] * count)
    if count == 1:
        return there
    return (*there[:-2], there[-2] * count, there[-1])


def _problems(
    folder: HuggingFaceFolder, keys: Sequence[str], shape: tuple[int, ...]
) -> Iterator[str]:
    for key in keys:
        located = folder.tensors.get(key)
        if located is None:
            yield f"{key} is missing"
        elif located.tensor.shape != shape:
            yield f"{key} has shape {list(located.tensor.shape)}, and {list(shape)} is needed"
        elif located.tensor.dtype not in _FLOATS:
            yield (
                f"{key} is of {located.tensor.dtype}: quantized weights are not loaded; take the "
                "model as bfloat16"
            )


def _source(
    folder: HuggingFaceFolder, form: HuggingFaceForm, keys: Sequence[str], shape: Sequence[int]
) -> ParameterSource:
    number, count = form.part
    pieces = []
    for key in keys:
        located = folder.tensors[key]
        first, end = located.tensor.first, located.tensor.end
        if form.rows is not None:
            row_bytes = (end - first) // form.rows[1]
            start = first + form.rows[0] * row_bytes
            pieces.append(RowSlice(key, located.file, start, start + shape[0] * row_bytes))
            continue
        # A fused tensor is a stack of matrices, and this parameter is some rows of each.
        matrices = prod(located.tensor.shape[:-2]) if count > 1 or form.transposed else 1
        stride = (end - first) // matrices
        if form.transposed:
            starts = range(first, end, stride)
            pieces += [RowSlice(key, located.file, start, start + stride) for start in starts]
            continue
        for matrix in range(matrices):
            start = first + matrix * stride + number * stride // count
            pieces.append(RowSlice(key, located.file, start, start + stride // count))
    return ParameterSource(
        folder.tensors[keys[0]].tensor.dtype,
        tuple(shape),
        tuple(pieces),
        transposed=form.transposed,
        part=form.part,
    )


def _mxfp4_problems(
    folder: HuggingFaceFolder, blocks: str, scales: str, shape: Sequence[int]
) -> Iterator[str]:
    *rows, width = shape
    if width % _MXFP4_BLOCK:
        yield f"{blocks} holds blocks of {_MXFP4_BLOCK} numbers, which do not divide {width}"
        return
    wanted = {
        blocks: (*rows, width // _MXFP4_BLOCK, _MXFP4_BLOCK // 2),
        scales: (*rows, width // _MXFP4_BLOCK),
    }
    for key, there in wanted.items():
        located = folder.tensors.get(key)
        if located is None:
            yield f"{key} is missing"
        elif located.tensor.shape != there:
            yield f"{key} has shape {list(located.tensor.shape)}, and {list(there)} is needed"
        elif located.tensor.dtype != torch.uint8:
            yield f"{key} is of {located.tensor.dtype}, and torch.uint8 is needed"


def _mxfp4_source(
    folder: HuggingFaceFolder, blocks: str, scales: str, shape: Sequence[int]
) -> ParameterSource:
    def whole(key: str) -> RowSlice:
        located = folder.tensors[key]
        return RowSlice(key, located.file, located.tensor.first, located.tensor.end)

    return ParameterSource(torch.bfloat16, tuple(shape), (whole(blocks),), scales=whole(scales))


def dequantize_mxfp4(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers in bfloat16, which represents them exactly, in one dim. `numbers` (uint8)
    has two of them per byte, the first in the low bits; `scales` (uint8) has biased exponents."""
    values = torch.tensor(
        [*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)], dtype=torch.bfloat16
    )
    codes = torch.stack([numbers & 0xF, numbers >> 4], dim=-1).flatten()
    mantissas = values[codes.int()].view(len(scales), _MXFP4_BLOCK)
    return torch.ldexp(mantissas, scales.int()[:, None] - _MXFP4_BIAS).flatten()
