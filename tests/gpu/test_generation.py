"""Generation with a KV cache on a GPU equals full forward passes."""

import time
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks import run_ranks
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.models import llama3, qwen3
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.serving.inference import BatchGenerator, Prompt, Sampling

pytestmark = pytest.mark.gpu

PROMPTS = ([5, 2, 9, 1, 30, 7, 7], [4], [11, 12, 13])
NUM_TOKENS = 24


def generate(device: str, family: str) -> dict[str, object]:
    """Generate greedily in this rank, with a KV cache and with a full forward pass per token."""
    module = {"llama3": llama3, "qwen3": qwen3}[family]
    flavor = {"llama3": "tiny", "qwen3": "tiny_moe"}[family]
    spec = module.spec_of(module.FLAVORS[flavor], flavor)
    here = detect_device(device)
    models = []
    for _ in range(2):
        model = spec.build()
        initialize(model, spec.init, seed=3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Otherwise the embedding of the last token alone would determine the next.
                if parameter.ndim > 1 and "embeddings" not in name:
                    parameter *= 15
        models.append(model.to(here.torch_device).eval())
    plain, cached = models
    full = [_greedily(plain, ids, here.torch_device) for ids in PROMPTS]
    with start_mesh(ParallelismConfig(), CommConfig(), here) as mesh:
        generator = BatchGenerator(cached, spec, mesh)
        began_s = time.perf_counter()
        results = generator.generate(
            [Prompt(ids) for ids in PROMPTS],
            max_new_tokens=NUM_TOKENS,
            sampling=Sampling(temperature=0.0),
        )
        seconds = time.perf_counter() - began_s
    return {"full": full, "cached": [list(one.ids) for one in results], "seconds": seconds}


@torch.no_grad()
def _greedily(model: torch.nn.Module, prompt: list[int], device: torch.device) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        logits_BSV = model(
            torch.tensor([ids], device=device),
            positions_BS=torch.arange(len(ids), device=device)[None],
            rng_keys_B=torch.zeros(1, dtype=torch.int64, device=device),
        )
        ids.append(int(logits_BSV[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_generation_equals_full_forward_passes(family: str, device: str, tmp_path: Path) -> None:
    (found,) = run_ranks(generate, tmp_path / "run", device=device, family=family)
    assert found["cached"] == found["full"]
    assert len({tuple(ids) for ids in found["full"]}) == len(PROMPTS)
