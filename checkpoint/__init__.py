"""Checkpoints: what is kept where, and how it comes back. See docs/checkpointing.md.

Layer: above redistribute, mesh and spec.
"""

from torchtitan_lite._links import refuse_other_name

refuse_other_name(__name__)
