"""The decoder against Hugging Face's Llama with the same weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.harness.tolerances import LOGITS_FLOAT32, LOGITS_FLOAT64, ROPE_FLOAT32
from tests.unit.models.tiny import DIMS, tiny_decoder, tiny_samples
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.rope import RopeScaling, RotaryEmbedding, rotate

assert isinstance(DIMS.rope_scaling, RopeScaling)
_SCALING = DIMS.rope_scaling


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, LOGITS_FLOAT32), (torch.float64, LOGITS_FLOAT64)]
)
def test_logits_equal_those_of_transformers(
    dtype: torch.dtype, tolerance: float, tied: bool
) -> None:
    model = tiny_decoder(dtype, tied_embeddings=tied).eval()
    theirs = LlamaForCausalLM(_config(_SCALING, tied)).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)
    missing, unexpected = theirs.load_state_dict(_named_as_theirs(model), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    samples = tiny_samples(length=41)
    with torch.no_grad():
        ours_BSV = model(**samples)
        theirs_BSV = theirs(samples["tokens_BS"]).logits
    assert ours_BSV.std() > 0.1
    torch.testing.assert_close(ours_BSV, theirs_BSV, atol=tolerance, rtol=0)


@pytest.mark.parametrize("scaling", [None, _SCALING, RopeScaling(factor=32.0)])
def test_rotations_equal_those_of_transformers(scaling: RopeScaling | None) -> None:
    positions_BS = torch.tensor([[0, 1, 2, 3, 4, 6, 7]])
    ours = RotaryEmbedding(DIMS.head_size, DIMS.rope_theta, scaling)
    theirs = LlamaRotaryEmbedding(_config(scaling, tied=False))
    torch.testing.assert_close(
        ours.frequencies_E, theirs.inv_freq, atol=ROPE_FLOAT32, rtol=ROPE_FLOAT32
    )
    draws = torch.Generator().manual_seed(0)
    q_BSHE = torch.rand(1, 7, 6, DIMS.head_size, generator=draws) - 0.5
    k_BSKE = torch.rand(1, 7, 2, DIMS.head_size, generator=draws) - 0.5
    cos, sin = ours(positions_BS)
    expected = apply_rotary_pos_emb(
        q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), *theirs(q_BSHE, positions_BS)
    )
    for x, y in zip((q_BSHE, k_BSKE), expected, strict=True):
        torch.testing.assert_close(
            rotate(x, cos, sin), y.transpose(1, 2), atol=ROPE_FLOAT32, rtol=0
        )


def _config(scaling: RopeScaling | None, tied: bool) -> LlamaConfig:
    rope: dict[str, str | float] = {"rope_type": "default", "rope_theta": DIMS.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    assert DIMS.hidden_dim is not None
    return LlamaConfig(
        hidden_size=DIMS.dim,
        num_hidden_layers=DIMS.num_layers,
        num_attention_heads=DIMS.num_heads,
        num_key_value_heads=DIMS.num_kv_heads,
        head_dim=DIMS.head_dim,
        intermediate_size=DIMS.hidden_dim,
        vocab_size=DIMS.vocab_size,
        rms_norm_eps=DIMS.norm_eps,
        max_position_embeddings=4096,
        rope_parameters=rope,
        tie_word_embeddings=tied,
    )


_THEIR_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.": "model.layers.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "output.": "lm_head.",
}


def _named_as_theirs(model: Decoder) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, parameter in model.named_parameters():
        for ours, theirs in _THEIR_NAMES.items():
            name = name.replace(ours, theirs)
        renamed["model.norm.weight" if name == "norm.weight" else name] = parameter.detach()
    return renamed
