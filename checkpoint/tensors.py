"""Tensors as bytes, dtypes by their safetensors names, and the local parts of DTensors."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import nn

from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.torch_compat import local_tensor

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64,
    "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE_BYTES = 8 << 20


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor: its memory on the CPU, a copy otherwise."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.cpu().view(-1).view(torch.uint8).numpy().data


def byte_pieces(tensor: torch.Tensor, start: int, length: int) -> Iterator[memoryview]:
    """Yield a range of the bytes of a contiguous tensor on any device, copying one piece of 8 MiB
    at a time to the CPU."""
    raw = tensor.view(-1).view(torch.uint8)[start : start + length]
    for first in range(0, length, _PIECE_BYTES):
        yield tensor_bytes(raw[first : first + _PIECE_BYTES])


def tensor_from_bytes(
    raw: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor on the same memory as `raw`; a copy if elements would be unaligned, or if the
    memory is read-only (bytes of object stores), because torch has no read-only tensors."""
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = bytearray(raw) if memoryview(raw).readonly else raw
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if tensor.data_ptr() % dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(dtype).view(tuple(shape))


def overflows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether a finite value became infinite in another dtype (above 65,504 in float16)."""
    if after.dtype != torch.float16 or before.dtype == torch.float16:
        return False
    return bool((after.isinf() & ~before.isinf()).any())


def local_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's local tensors, contiguous; without a copy where possible."""
    with torch.no_grad():
        return {
            name: local_tensor(tensor).detach().contiguous() for name, tensor in tensors.items()
        }


def copy_back(tensors: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor]) -> None:
    """Copy `parts` back into `tensors` that do not share their memory."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            own = local_tensor(tensor)
            if own.data_ptr() != parts[name].data_ptr():
                own.copy_(parts[name])


def cast_pieces(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor in another dtype, in chunks. Each chunk is a copy, so
    the tensor can be freed while the last one is written. Raises as `cast` does."""
    elements = tensor.reshape(-1)
    step = _PIECE_BYTES // dtype.itemsize
    for first in range(0, len(elements), step):
        yield tensor_bytes(cast(name, elements[first : first + step], dtype, copy=True))


def cast(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False
) -> torch.Tensor:
    """Cast `tensor`. Raises CheckpointError, with its name, if a finite value overflows (65,504 in
    float16)."""
    converted = tensor.to(dtype, copy=copy)
    if overflows(tensor, converted):
        raise CheckpointError(
            f"{name} has values that overflow float16. Pass --dtype bf16, or omit it."
        )
    return converted


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model as `model.NAME`, a tied one once."""
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return parameters | {f"model.{name}": buffer for name, buffer in buffers.items()}
