"""Estimate of a run without running it: memory, communication and time of a step on any number of
ranks, from traces of the real step on tensors without memory.

`trace` runs one rank's step, `extrapolation` adds the layers and microbatches that it left out,
`mesh_step` puts the ranks of a mesh together, and `search` looks for the best mesh with the
predictions of `meshes`.
"""

from torchtitan_lite.tools.estimate.estimate import Estimate, estimate
from torchtitan_lite.tools.estimate.picture import memory_picture
from torchtitan_lite.tools.estimate.text import as_values, text

__all__ = ["Estimate", "as_values", "estimate", "memory_picture", "text"]
