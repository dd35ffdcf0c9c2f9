"""What architectures of transformers need that no module here has, for the error that refuses
them."""

from collections.abc import Mapping

_MODEL_TYPES: Mapping[str, str] = {
    "an encoder": "bert bert-generation big_bird camembert data2vec-text electra ernie "
    "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta "
    "xlm-roberta-xl xlnet xmod",
    "an encoder beside the decoder": "bart bigbird_pegasus blenderbot blenderbot-small marian "
    "mbart mvp pegasus plbart prophetnet t5 trocr whisper",
    "learned or sinusoidal positions": "biogpt ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neo openai-gpt "
    "opt xglm",
    "ALiBi or relative positions": "bloom cpmant inkling2_text inkling_text mpt",
    "state-space or recurrent layers other than Gated DeltaNet": "bamba falcon_h1 falcon_mamba "
    "granitemoehybrid jamba mamba mamba2 nemotron_h recurrent_gemma rwkv xlstm zamba zamba2",
    "linear attention other than Gated DeltaNet": "bailing_hybrid kimi_linear minimax",
    "separate projections of Gated DeltaNet": "olmo_hybrid qwen3_5_moe_text qwen3_5_text",
    "short convolutions as layers": "lfm2 lfm2_moe lfm3",
    "sparse attention with an indexer": "axk2 deepseek_v32 deepseek_v4 dots3_note_text glm_moe_dsa "
    "hy_v4 minimax_m3_vl_text qwen4_exp_text",
    "masks of attention that depend on its values": "doge",
    "compressed convolutional attention": "zaya",
    "images, sound or video": "dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git "
    "got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal "
    "qwen3_5 qwen3_5_moe qwen4_exp",
    "keys and values of another model": "gemma4_assistant gemma4_unified_assistant",
    "keys that are the values, too, and scaled layers": "gemma4_unified_text",
    "inputs of each layer and altered residuals": "gemma3n_text gemma4_text",
    "learned activations": "apertus",
    "residuals weighted by depth": "beam",
    "layers that run several times": "hrm_text",
    "norms that differ between layers": "axk1 modernbert-decoder",
    "a norm of the embedding": "nanochat",
    "biases that differ between layers": "gpt_neox_japanese",
    "heads that differ between layers, or between keys and values": "mimo_v2_flash",
    "a projection for the gates of attention": "afmoe laguna",
    "attention temperatures beside rotary embedding": "ministral3",
    "latent attention other than that of DeepSeek": "minicpm3 youtu",
    "fused projections in groups of heads": "codegen falcon",
    "differences of two attentions": "diffllama",
    "the sparse mixer's routing": "phimoe",
    "a choice of experts by biased logits": "kolibri1",
    "experts that return their input": "longcat_flash",
    "means of routed and shared experts": "cohere2_moe",
    "experts stored as one matrix": "dbrx",
    "mixtures of attention heads": "jetmoe",
    "ternary weights": "bitnet",
    "hashed attention": "reformer",
    "patches of bytes": "blt",
    "a row of facts, which models/auto does not have yet (docs/guides/own_model.md)": ""
    "cohere_compass_text glm4_moe_lite granitemoe_swa hy_v3",
}
_PARTS = {name: part for part, names in _MODEL_TYPES.items() for name in names.split()}


def missing_part(model_type: object) -> str | None:
    """Return what a `model_type` needs that is not there; None if this is not known."""
    return _PARTS.get(model_type) if isinstance(model_type, str) else None
