"""Where state lies. Saving, loading and initialising all speak of boxes of tensors.

Layer: above mesh and spec.
"""

from torchtitan_lite.redistribute.gradient import align_gradient
from torchtitan_lite.redistribute.layout import Box, box_of, is_first_holder, local_box

__all__ = ["Box", "align_gradient", "box_of", "is_first_holder", "local_box"]
