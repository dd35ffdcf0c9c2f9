"""The element-wise optimizers, each by every implementation that it has."""

_ALL = ("fused", "foreach", "for-loop")
_IMPLEMENTATIONS = {"AdamW": _ALL, "Adam": _ALL, "SGD": _ALL, "Adagrad": _ALL}
"""Of an optimizer that has one implementation: ("fused",), the default of the key."""

OPTIMIZERS_BY_IMPLEMENTATION = [
    (name, implementation)
    for name, implementations in _IMPLEMENTATIONS.items()
    for implementation in implementations
]
