"""Generation with a KV cache equals a full forward pass per token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.tolerances import LOGITS_FLOAT32, PARITY_FLOAT64
from tests.unit.models.tiny import (
    DEEPSEEK,
    DEEPSEEK_V2,
    DIMS,
    GPT_OSS,
    LLAMA4,
    QWEN3,
    QWEN3_EXPERTS,
    QWEN3_NEXT,
)
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.models import deepseek_v3, gpt_oss, llama3, llama4, qwen3, qwen3_next
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.serving.inference import BatchGenerator, Prompt, Sampling, generation
from torchtitan_lite.serving.inference.kv_cache import KeyValueCache

GREEDY = Sampling(temperature=0.0)
SPECS = {
    # Five frequencies with RoPE scaling; three query heads per KV head.
    "llama": llama3.spec_of(DIMS, "tiny"),
    "llama-tied": llama3.spec_of(replace(DIMS, tied_embeddings=True), "tiny"),
    "llama-flex-masked": llama3.spec_of(
        replace(DIMS, attention_backend="flex", document_mask=True, dropout=0.5), "tiny"
    ),
    "qwen3": qwen3.spec_of(QWEN3, "tiny"),
    "qwen3-experts": qwen3.spec_of(QWEN3_EXPERTS, "tiny"),
    "deepseek": deepseek_v3.spec_of(DEEPSEEK, "tiny"),
    "deepseek-v2": deepseek_v3.spec_of(DEEPSEEK_V2, "tiny"),
    "gpt-oss": gpt_oss.spec_of(GPT_OSS, "tiny"),
    "llama4": llama4.spec_of(LLAMA4, "tiny"),
    "qwen3-next": qwen3_next.spec_of(QWEN3_NEXT, "tiny"),
}
STATE_WIDTHS = {
    **dict.fromkeys(SPECS, 2 * 2 * 10),
    # A latent and a shared rotated key, in place of keys and values of all heads.
    "deepseek": 9 + 10,
    "deepseek-v2": 8 + 10,
}
PROMPTS = ([5, 2, 9, 1, 30, 7, 7], [4], [11, 12, 13])


def drawn(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = spec.build()
    initialize(model, spec.init, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Otherwise the embedding of the last token alone would determine the next.
            factor = 15 if parameter.dim() > 1 and "embeddings" not in name else 1
            parameter.data = parameter.data.to(dtype) * factor
    return model.eval()


def whole_logits(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [S, V] of one sequence, computed in one forward pass."""
    with torch.no_grad():
        return model(
            torch.tensor([ids]),
            positions_BS=torch.arange(len(ids))[None],
            rng_keys_B=torch.zeros(1, dtype=torch.int64),
        )[0]


def greedily(model: nn.Module, ids: Sequence[int], num_tokens: int) -> list[int]:
    """Generate greedily, with a full forward pass per token."""
    result = list(ids)
    for _ in range(num_tokens):
        result.append(int(whole_logits(model, result)[-1].argmax()))
    return result[len(ids) :]


def texts_of(generator: BatchGenerator, prompts: Sequence[Sequence[int]], **changes: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": 9, "sampling": GREEDY} | changes
    return [one.ids for one in generator.generate([Prompt(ids) for ids in prompts], **settings)]


@pytest.mark.parametrize("name", SPECS)
def test_a_batch_equals_full_forward_passes(
    name: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = drawn(replace_flex(SPECS[name]))
    generator = BatchGenerator(drawn(SPECS[name]), SPECS[name], mesh)
    expected = [greedily(plain, ids, 9) for ids in PROMPTS]
    for read_at_once in (1024, 3):
        monkeypatch.setattr(generation, "_READ_AT_ONCE", read_at_once)
        assert texts_of(generator, PROMPTS) == expected, read_at_once
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    # The KV cache is reused for another batch.
    assert texts_of(generator, PROMPTS[1:]) == expected[1:]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, PARITY_FLOAT64), (torch.float32, LOGITS_FLOAT32)]
)
@pytest.mark.parametrize("name", SPECS)
def test_logits_of_each_step_equal_those_of_a_full_forward_pass(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    spec = SPECS[name]
    ids = torch.randint(0, 53, (21,), generator=torch.Generator().manual_seed(2))
    expected_SV = whole_logits(drawn(replace_flex(spec), dtype), ids.tolist())
    model = drawn(spec, dtype)
    cache = KeyValueCache(model)
    cache.allocate(1, 32)
    actual, first = [], 0
    for count in (12, 1, 1, 5, 1, 1):
        positions_BS = torch.arange(first, first + count)[None]
        with torch.no_grad():
            actual.append(
                model(
                    ids[None, first : first + count],
                    positions_BS=positions_BS,
                    rng_keys_B=torch.zeros(1, dtype=torch.int64),
                )[0]
            )
        first += count
    scale = expected_SV.abs().max().item()
    torch.testing.assert_close(torch.cat(actual), expected_SV, rtol=0, atol=tolerance * scale)
    itemsize = torch.tensor([], dtype=dtype).itemsize
    numbers = spec.num_layers * 32 * STATE_WIDTHS[name]
    if name == "qwen3-next":
        # In half of the layers three inputs of the convolution and six states, for any length.
        numbers = numbers // 2 + 2 * (3 * (2 * 10 + 42) + 6 * 5 * 7)
    assert cache.num_bytes == numbers * itemsize


def test_a_sample_does_not_depend_on_its_batch(mesh: Mesh) -> None:
    spec = SPECS["llama"]
    generator = BatchGenerator(drawn(spec), spec, mesh)
    sampling = Sampling(temperature=20.0, top_p=0.9, seed=4)
    prompts = [Prompt(PROMPTS[0], 0), Prompt(PROMPTS[0], 1), Prompt(PROMPTS[2], 0)]

    def ids_of(chosen: Sequence[Prompt], sampling: Sampling = sampling) -> list[list[int]]:
        actual = generator.generate(chosen, max_new_tokens=12, sampling=sampling)
        return [one.ids for one in actual]

    together = ids_of(prompts)
    assert together == [ids_of([prompt])[0] for prompt in prompts]
    assert together[0] != together[1]
    assert ids_of(prompts, replace(sampling, seed=5)) != together


def test_generation_ends_at_a_stop_token_or_the_maximum_length(mesh: Mesh) -> None:
    spec = replace(SPECS["llama"], max_seq_len=12)
    generator = BatchGenerator(drawn(spec), spec, mesh)
    free = texts_of(generator, PROMPTS, max_new_tokens=5)
    stop = free[1][2]
    on_token: list[tuple[int, int]] = []
    actual = generator.generate(
        [Prompt(ids) for ids in PROMPTS],
        max_new_tokens=30,
        sampling=GREEDY,
        stop_ids={stop},
        on_token=lambda number, token: on_token.append((number, token)),
    )
    assert actual[1].stopped and actual[1].ids == free[1][: free[1].index(stop)]
    for number, (prompt, one) in enumerate(zip(PROMPTS, actual, strict=True)):
        assert one.stopped or len(prompt) + len(one.ids) == 12
        assert one.ids[:5] == free[number][: len(one.ids)]
        assert [token for who, token in on_token if who == number] == one.ids


def test_generation_drops_no_token_for_capacity(mesh: Mesh) -> None:
    moe = MoEDims(num_experts=4, top_k=2, hidden_dim=11)
    # With its capacity, each expert would accept two of the copies of a prompt.
    capped = replace(QWEN3_EXPERTS, moe=replace(moe, capacity_factor=0.1))
    spec = qwen3.spec_of(capped, "tiny")
    plain = drawn(qwen3.spec_of(replace(QWEN3_EXPERTS, moe=moe), "tiny"))
    prompts = [list(range(first, first + 32)) for first in (0, 7, 20)]
    expected = [greedily(plain, ids, 9) for ids in prompts]
    assert [greedily(drawn(spec), ids, 9) for ids in prompts] != expected
    assert texts_of(BatchGenerator(drawn(spec), spec, mesh), prompts) == expected


@pytest.mark.parametrize("length", [0, 12])
def test_a_prompt_that_is_too_long_is_rejected(mesh: Mesh, length: int) -> None:
    spec = replace(SPECS["llama"], max_seq_len=12)
    generator = BatchGenerator(drawn(spec), spec, mesh)
    with pytest.raises(ConfigError, match=f"Prompt 2 has {length} tokens.* 12 positions"):
        texts_of(generator, [[1], [1] * length])


def test_a_model_without_attention_is_rejected() -> None:
    with pytest.raises(ConfigError, match="Linear has no Attention"):
        KeyValueCache(nn.Linear(1, 1))


def replace_flex(spec: ModelSpec) -> ModelSpec:
    """Return the same weights with the attention kernel that runs here."""
    if spec.name != "llama3":
        return spec
    return llama3.spec_of(replace(spec.dims, attention_backend="sdpa", dropout=0.0), "tiny")
