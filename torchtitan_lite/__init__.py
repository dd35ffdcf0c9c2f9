"""torchtitan_lite: fault-tolerant distributed training of language models.

Read `train.py`, then `torchtitan_lite/training/trainer.py`, then `docs/architecture.md`.
"""

__version__ = "0.1.0"

from torchtitan_lite.core import _links

_links.require_links()
