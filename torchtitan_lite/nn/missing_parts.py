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
    "ALiBi or relative positions": "bloom cpmant inkling_text mpt",
    "state-space or recurrent layers other than Gated DeltaNet": "bamba falcon_h1 falcon_mamba "
    "granitemoehybrid jamba mamba mamba2 nemotron_h recurrent_gemma rwkv xlstm zamba zamba2",
    "linear attention other than Gated DeltaNet": "bailing_hybrid kimi_linear minimax",
    "short convolutions as layers": "lfm2 lfm2_moe",
    "sparse attention with an indexer": "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa",
    "images, sound or video": "emu3 fuyu gemma3 gemma3n gemma4 git got_ocr2 mllama moshi "
    "moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal",
    "inputs of each layer and altered residuals": "gemma3n_text gemma4_text",
    "learned activations": "apertus",
    "differences of two attentions": "diffllama",
    "the sparse mixer's routing": "phimoe",
    "mixtures of attention heads": "jetmoe",
    "ternary weights": "bitnet",
    "hashed attention": "reformer",
    "patches of bytes": "blt",
}
_PARTS = {name: part for part, names in _MODEL_TYPES.items() for name in names.split()}


def missing_part(model_type: object) -> str | None:
    """Return what a `model_type` needs that is not there; None if this is not known."""
    return _PARTS.get(model_type) if isinstance(model_type, str) else None
