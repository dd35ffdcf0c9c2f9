"""Greedy generation in one process equals that of transformers where a cache holds what a kernel or
a rotation changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.hugging_face import VOCAB_SIZE, add_tokenizer, make_folder, make_model
from torchtitan_lite.serving.inference.generation import BatchGenerator, Prompt
from torchtitan_lite.serving.inference.loaded_model import load_model
from torchtitan_lite.serving.inference.sampling import Sampling

_PROMPT, _NEW = 20, 64


# The rotations of LongRoPE change at 32 and at 64 positions.
@pytest.mark.parametrize("family", ["gemma2", "phi3_long", "phi3_short"])
def test_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", family))
    theirs: Any = make_model(family)
    loaded = load_model(folder, device="cpu")
    draws = torch.Generator().manual_seed(3)
    prompt_BS = torch.randint(3, VOCAB_SIZE, (1, _PROMPT), generator=draws)
    expected = theirs.generate(
        prompt_BS,
        attention_mask=torch.ones_like(prompt_BS),
        max_new_tokens=_NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    with BatchGenerator(loaded.model, loaded.spec, loaded.mesh) as generator:
        (found,) = generator.generate(
            [Prompt(prompt_BS[0].tolist())],
            max_new_tokens=_NEW,
            sampling=Sampling(temperature=0.0),
        )
    assert len(found.ids) == _NEW
    assert found.ids == expected[0, _PROMPT:].tolist()
