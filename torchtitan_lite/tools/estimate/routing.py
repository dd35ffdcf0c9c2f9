"""Values of a few integers in a step whose tensors have none: the routing of tokens to experts.

Sizes of the exchange of tokens depend on the routers' counts, so these are given values: every
expert gets the same number of tokens, up to the remainder. What is computed from such counts is
computed with their values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.torch_compat import outside_of_fake_tensors, tensors_in

_aten = torch.ops.aten
_COUNT = _aten.scatter_add.default
_READ = _aten._local_scalar_dense.default
_EXCHANGE = torch.ops.c10d.alltoall_base_.default


class BalancedRouting:
    """Runs operations on tensors without values, and follows the values of counts."""

    def __init__(self) -> None:
        # By identity, because tensors compare element-wise. The tensor is kept, so that its
        # identity is not used again.
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(
        self,
        operation: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> Any:
        """Return the result of `operation`. A number that is read from a tensor without values
        is 1."""
        tensors = tensors_in((args, kwargs))
        known = [id(tensor) in self._values for tensor in tensors]
        if operation is _READ:
            return self._read(tensors[0]) if known[0] else _one(tensors[0])
        if group is None and known and all(known):
            return self._follow(operation, args, kwargs)
        result = operation(*args, **kwargs)
        if operation is _COUNT and args[0].dtype is torch.int64 and args[0].dim() == 2:
            self._set(result, _balanced(args[0].shape, args[2].shape[1]))
        if operation is _EXCHANGE and group is not None and known[:2] == [True, True]:
            # Every rank sends what this one sends, so each receives what this one sends to itself.
            sent = self._values[id(tensors[1])][1]
            with outside_of_fake_tensors():
                self._set(tensors[0], sent[group.rank()].expand_as(sent).clone())
        return result

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()

    def _read(self, tensor: torch.Tensor) -> int | float:
        with outside_of_fake_tensors():
            return self._values[id(tensor)][1].item()

    def _follow(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with outside_of_fake_tensors():
            values = operation(
                *(self._real(argument) for argument in args),
                **{name: self._real(argument) for name, argument in kwargs.items()},
            )
        return self._fake(values)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._values[id(value)][1]
        if isinstance(value, list | tuple):
            return type(value)(self._real(element) for element in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def _fake(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # Without memory, because this runs inside of `fake_tensors`.
            tensor = torch.empty(value.shape, dtype=value.dtype)
            self._set(tensor, value)
            return tensor
        if isinstance(value, list | tuple):
            return type(value)(self._fake(element) for element in value)
        return value

    def _set(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        self._values[id(tensor)] = tensor, values


def _one(tensor: torch.Tensor) -> int | float:
    return 1.0 if tensor.dtype.is_floating_point else 1


def _balanced(shape: Sequence[int], num_choices: int) -> torch.Tensor:
    """Return counts [rows, experts] whose rows add up to `num_choices`."""
    rows, experts = shape
    with outside_of_fake_tensors():
        share, rest = divmod(num_choices, experts)
        return (share + (torch.arange(experts) < rest).long()).repeat(rows, 1)
