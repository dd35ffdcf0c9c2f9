"""A GPU without values: what runs on it has shapes, dtypes and devices, and takes no time.

Tensors on the device are FakeTensors; everything on the host is real. Each wait of the host for the
device is recorded with the function of the product that causes it. An operator that mixes devices
raises. Needs a CUDA build of torch with `runtime.c` preloaded.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
_ROOT = Path(__file__).parents[2]
_PRODUCT = tuple(str(_ROOT / name) + "/" for name in ("torchtitan_lite", "checkpoint", "models"))

Values = Callable[[torch.Tensor, FrameType], torch.Tensor | None]
"""Returns the values of a device tensor that a frame of the product reads; None: ones."""


class FakeDevice(TorchDispatchMode):
    """Runs operators on CUDA tensors without a device."""

    supports_higher_order_operators = True

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._thread = threading.current_thread()
        self.waits: Counter[str] = Counter()
        """Waits of the host, by file and function."""
        self.order: list[str] = []
        """Waits, and updates by a fused optimizer, in order."""

    @contextmanager
    def running(self) -> Iterator["FakeDevice"]:
        """Run the block with the device."""

        def tolist(tensor: torch.Tensor) -> Any:
            with unset_fake_temporarily():
                return self._to_host(tensor, "tolist").tolist()

        before = torch._C._only_lift_cpu_tensors()
        # torch.tensor(..., device="cuda") copies with an operator that can be seen.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            # The fake mode lies beneath this mode, for torch.compile to find it.
            waits = ExitStack()
            for kind, name in (
                (torch.cuda.Event, "synchronize"),
                (torch.cuda.Stream, "synchronize"),
                (torch.cuda, "synchronize"),
            ):
                waits.enter_context(patch.object(kind, name, self._waiting(name)))
            threads = patch.object(threading.Thread, "run", self._run_of_thread())
            with waits, threads, patch.object(FakeTensor, "tolist", tolist), self._mode, self:
                yield self
        finally:
            torch._C._set_only_lift_cpu_tensors(before)

    def _waiting(self, name: str) -> Callable[..., None]:
        """Return a function that waits for the device, which is done."""

        def wait(*given: Any) -> None:
            if threading.current_thread() is self._thread:
                self._record(name, waits=True)

        return wait

    def _run_of_thread(self) -> Callable[[threading.Thread], None]:
        """Return `Thread.run` for threads beside the main one, whose waits do not count."""
        run = threading.Thread.run

        def run_with_device(thread: threading.Thread) -> None:
            beside = FakeDevice(self._values)
            beside._mode = self._mode
            with beside:
                run(thread)

        return run_with_device

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile compile below this mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(
            not issubclass(kind, FakeTensor | torch.nn.Parameter) and kind is not torch.Tensor
            for kind in types
        ):
            # A subclass, such as DTensor, decomposes into operators on plain tensors.
            return NotImplemented
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        is_faked = any(isinstance(one, FakeTensor) for one in tensors)
        device = kwargs.get("device")
        if not is_faked and (device is None or torch.device(device).type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._run(func, tensors, args, kwargs)

    def _run(
        self, func: Any, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            with unset_fake_temporarily():
                return self._to_host(args[0], "item").item()
        if func is aten._to_copy.default:
            return self._copy(args[0], kwargs, func)
        if func is aten.copy_.default:
            into, source = args[:2]
            if into.device != source.device:
                self._record(
                    "copy_", waits=not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
                )
                return into
        if func is aten._foreach_copy_.default:
            crosses = any(a.device != b.device for a, b in zip(args[0], args[1], strict=True))
            if crosses:
                is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking")
                self._record("_foreach_copy_", waits=not is_async)
                return None
        if func.__name__.startswith("_fused_adam"):
            self.order.append("update")
        # With an index on the host, the operator copies it.
        has_host_tensor = any(one.device.type == "cpu" and one.dim() for one in tensors)
        if has_host_tensor or _has_unknown_size(func, args, kwargs):
            self._record(str(func), waits=True)
        return self._fake(func, args, kwargs)

    def _fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        def as_fake(one: torch.Tensor) -> torch.Tensor:
            return (
                one
                if isinstance(one, FakeTensor)
                else self._mode.from_tensor(one, static_shapes=True)
            )

        args, kwargs = tree_map_only(torch.Tensor, as_fake, (args, kwargs))
        with self._mode:
            return func(*args, **kwargs)

    def _copy(self, source: torch.Tensor, kwargs: dict[str, Any], func: Any) -> torch.Tensor:
        to = torch.device(kwargs.get("device") or source.device)
        if to.type != source.device.type:
            self._record("to", waits=not kwargs.get("non_blocking"))
        if to.type == "cpu":
            with unset_fake_temporarily():
                return self._host_values(source).to(kwargs.get("dtype") or source.dtype)
        return self._fake(func, (source,), kwargs)

    def _to_host(self, source: torch.Tensor, how: str) -> torch.Tensor:
        self._record(how, waits=True)
        return self._host_values(source)

    def _host_values(self, source: torch.Tensor) -> torch.Tensor:
        frame = _frame()
        values = self._values(source, frame) if frame is not None else None
        return torch.ones(source.shape, dtype=source.dtype) if values is None else values

    def _record(self, what: str, *, waits: bool) -> None:
        if waits:
            frame = _frame()
            if frame is None:
                site = f"torch {what}"
            else:
                path = Path(frame.f_code.co_filename).relative_to(_ROOT)
                site = f"{path} {frame.f_code.co_name}"
            self.waits[site] += 1
            self.order.append(site)


def _has_unknown_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host must read values to know the size of the result."""
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if func in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor):
        return kwargs.get("output_size") is None
    return func in (aten.nonzero.default, aten.masked_select.default, aten.bincount.default)


def _frame() -> FrameType | None:
    """Return the innermost frame of the product."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PRODUCT):
        frame = frame.f_back
    return frame
