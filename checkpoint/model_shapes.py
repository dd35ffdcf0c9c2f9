"""Which tensors the model of a spec has, without building it. Layer: above spec."""

import torch

from torchtitan_lite.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(spec: ModelSpec) -> tuple[Shapes, Shapes]:
    """The shapes of all parameters, a tied one once, and of the persistent buffers."""
    with torch.device("meta"):
        model = spec.build()
    persistent = model.state_dict(keep_vars=True)
    return (
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {name: tuple(b.shape) for name, b in model.named_buffers() if name in persistent},
    )


def tied_weights(spec: ModelSpec) -> tuple[str, str] | None:
    """The parameter that two modules share, and the name of its second use."""
    if spec.tied_units is None:
        return None
    first, second = spec.tied_units
    return f"{first}.weight", f"{second}.weight"
