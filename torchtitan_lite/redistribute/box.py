"""A block of a tensor. Layer: imports nothing of the project."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """Where a block starts and how large it is, per dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of the box in the whole tensor."""
        return tuple(
            slice(start, start + length)
            for start, length in zip(self.offset, self.size, strict=True)
        )
