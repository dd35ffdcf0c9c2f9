"""vLLM's entry point to `publish.vllm_engine`, which is imported where it is used only.

vLLM imports this module in each of its processes on a machine with this package.
"""

# pyright: reportMissingImports=false

from typing import Any

BACKEND = "torchtitan_lite"


def register() -> None:
    """Register the weight transfer backend `torchtitan_lite`. vLLM may call it several times in a
    process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    factory: Any = WeightTransferEngineFactory
    # vLLM has no public way to ask.
    if BACKEND not in factory._registry:
        factory.register_engine(
            BACKEND, "torchtitan_lite.serving.publish.vllm_engine", "PublishedWeightsEngine"
        )
