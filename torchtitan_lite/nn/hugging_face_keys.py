"""Keys of a config.json that do not change the function of the weights, in any architecture.

Most are fields of transformers' base class, which every config.json may have.
"""

from fnmatch import fnmatchcase
from typing import Any

_ANY_VALUE = (
    # The file and the program that wrote it.
    *("architectures", "model_type", "auto_map", "transformers_version", "transformers.js_config"),
    *("_*", "name_or_path", "unsloth_*", "is_llama_config", "torch_dtype", "dtype", "torchscript"),
    *("use_bfloat16", "tf_legacy_loss", "for_llm_compressor", "finetuning_task"),
    # Special tokens. The id of padding is also a fact of an architecture.
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("eod_token_id", "im_start_id", "im_end_id", "tokenizer_class", "prefix"),
    "model_max_length",
    # What a forward returns, and how it is computed.
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("attn_implementation", "experts_implementation", "use_cache", "cache_implementation"),
    *("use_flash_attn", "pretraining_tp", "ep_size", "chunk_size_feed_forward"),
    *("gradient_checkpointing", "tie_last_hidden_states", "is_decoder"),
    # Labels of other tasks.
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    # The beginning and the settings of a training run, of which each has its own.
    *("initializer_*", "mup_init", "*_dropout", "*_pdrop", "dropout", "router_aux_loss_coef"),
    *("aux_loss_alpha", "seq_aux", "router_jitter_noise", "input_jitter_noise"),
    # Generation, which has a file of its own.
    *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
    *("min_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *("output_logits", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
    *("guidance_scale", "num_assistant_tokens*", "assistant_*", "prompt_lookup_*", "use_mtp"),
    *("penalty_alpha", "low_memory", "trust_remote_code", "max_cache_len", "cache_config"),
    *("target_lookbehind", "is_assistant", "disable_compile", "compile_config", "stop_strings"),
    *("num_assistant_*", "sequence_bias", "constraints", "force_words_ids", "token_healing"),
    *("watermarking_config", "dola_layers", "max_time", "min_new_tokens", "max_matching_ngram_*"),
    *("top_h", "generation_config", "prefill_chunk_size", "continuous_batching_config"),
)
"""Patterns (fnmatch)."""
_OFF: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "use_mrope": (False,),
}
"""Features that no architecture here has, and their values without effect."""


def is_irrelevant(key: str, value: Any) -> bool:
    """Whether a key with this value has no effect on the mathematics."""
    if key in _OFF:
        return value in _OFF[key]
    return any(fnmatchcase(key, pattern) for pattern in _ANY_VALUE)
