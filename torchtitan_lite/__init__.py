"""torchtitan_lite: fault-tolerant distributed training of language models.

Read `train.py`, then `torchtitan_lite/trainer.py`, then `docs/architecture.md`.
"""

__version__ = "0.1.0"

from torchtitan_lite import _links

_links.require_links()
