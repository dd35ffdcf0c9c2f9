"""The kernels of ring attention on a GPU, as far as they can be tested without one."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.torch_compat import attention_backward, attention_with_lse


class _Calls(TorchDispatchMode):
    """Records the arguments of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__] = args
        return func(*args, **(kwargs or {}))


def test_backward_uses_the_kernel_for_dense_sequences() -> None:
    # Without values, torch takes the path of a GPU.
    q, k, v = (torch.empty(2, 4, 64, 16, device="meta", dtype=torch.bfloat16) for _ in range(3))
    with _Calls() as mode:
        out, lse = attention_with_lse(q, k, v, True)
        grads = attention_backward(out, q, k, v, out, lse, True)
    assert [grad.shape for grad in grads] == [q.shape] * 3 and lse.shape == (2, 4, 64)
    args = mode.calls["_scaled_dot_product_flash_attention_backward.default"]
    assert args[6:8] == (None, None), "cumulative lengths select the kernel for packed sequences"
