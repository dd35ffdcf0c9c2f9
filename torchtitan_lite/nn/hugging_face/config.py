"""Strict reading of a transformers config.json: an unknown setting that changes the mathematics is
an error."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.machine import memory_bytes
from torchtitan_lite.nn.spec import RUN_SETTINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
"""Keys that do not change the function of the weights, in any architecture, as patterns (fnmatch).
Most are fields of transformers' base class, which every config.json may have."""
_OFF: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "use_mrope": (False,),
}
"""Features that no architecture here has, and their values without effect."""
_UNIT_BYTES, _UNIT_LAYER_BYTES = 64, 8
"""Bytes per unit of a size, at least: 16 weights, and in each layer the counter of an expert."""
_LAYER_BYTES = 32 << 10
"""Bytes of the modules of a layer without weights, as measured for Llama and Qwen3."""
_NOT_OF_THE_FILE = {
    # No config.json has one.
    "capacity_factor",
    # Whether a run has multi-token prediction is a setting of its own.
    "mtp_depth",
    *RUN_SETTINGS,
}
"""Dimensions that a config.json does not decide."""
_EFFECTIVE = {"head_dim": "head_size"}
"""Dimensions that may be unset, and the property with the value that is used."""


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Name the file in each ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def find_architecture(values: Mapping[str, Any], known: Mapping[str, str]) -> str | None:
    """Return the architecture of a config.json, one of `known`, which are model types by
    architecture. The model type decides, as in transformers. One of code in the folder, which
    `auto_map` names, leaves it to `architectures`."""
    for name, model_type in known.items():
        if values.get("model_type") == model_type:
            return name
    code = values.get("auto_map")
    if not isinstance(code, dict) or "AutoConfig" not in code:
        return None
    architectures = values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return next((name for name in names if name in known), None)


def named_architecture(values: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """Return the architecture as `find_architecture` does. Raises ConfigError if it is another
    one."""
    name = find_architecture(values, known)
    if name is None:
        raise ConfigError(
            f"model_type is {values.get('model_type')!r:.60}, and "
            f"{' or '.join(dict.fromkeys(known.values()))} is needed."
        )
    return name


class HuggingFaceConfig:
    """The values of a config.json. Problems are collected, and raised by `check`; so are keys that
    nothing has read and that may change the mathematics."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._understood: set[str] = set()
        self._quantization: str | None = None
        self._num_layers = 1
        self.problems: list[str] = []

    def given(self, key: str, default: Any = None) -> Any:
        """Return the value unchanged; `default` if absent."""
        self._understood.add(key)
        return self._values.get(key, default)

    def has(self, key: str) -> bool:
        """Whether the key is there, null included."""
        self._understood.add(key)
        return key in self._values

    def set_default(self, key: str, value: Any) -> None:
        """Set the value that an absent key has in this architecture."""
        self._values = {key: value, **self._values}
        self._understood.add(key)

    def ignore(self, *keys: str) -> None:
        """Accept keys that have no effect in this architecture, or beside its other values."""
        self._understood.update(keys)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Read an integer of at least `least`."""
        value = self.given(key, default)
        # null means the default, too.
        value = default if value is None else value
        if type(value) is not int or value < least:
            self.report_not_whole(key, value, "above 0" if least == 1 else f"of at least {least}")
            return 1
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Read an integer with which the modules of a layer grow.

        Raises ConfigError if even the modules do not fit into the memory of this machine: building
        them would not end.
        """
        value = self.integer(key, default, least=least)
        _check_capacity(key, value, max(_UNIT_BYTES, _UNIT_LAYER_BYTES * self._num_layers))
        return value

    def num_layers(self, key: str, default: int | None = None) -> int:
        """Read the number of layers. Raises ConfigError as `size` does."""
        self._num_layers = self.integer(key, default)
        _check_capacity(key, self._num_layers, _LAYER_BYTES)
        return self._num_layers

    def report_not_whole(self, key: str, value: Any, limit: str = "") -> None:
        """Record that a value is not a whole number within a limit. transformers rejects 4.0,
        too."""
        given = "absent" if value is None else f"{value!r:.100}"
        wanted = f"a whole number {limit}".rstrip()
        is_whole = isinstance(value, float) and value.is_integer()
        hint = f": write {value:.0f}" if is_whole else ""
        self.problems.append(f"{key} is {given}, and {wanted} is needed{hint}")

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite positive number."""
        return self.checked_number(key, self.given(key, default))

    def flag(self, key: str, *, default: bool) -> bool:
        """Read a boolean."""
        value = self.given(key, default)
        if type(value) is not bool:
            self.problems.append(f"{key} is {value!r:.100}, and true or false is needed")
            return default
        return value

    def per_layer(
        self, key: str, num_layers: int, allowed: Sequence[Any], *, may_be_longer: bool = False
    ) -> list[Any] | None:
        """Read a list with one of `allowed` for each layer; None if it is absent or wrong."""
        values = self.given(key)
        if values is None:
            return None
        if isinstance(values, list) and may_be_longer:
            values = values[:num_layers]
        is_list = isinstance(values, list) and len(values) == num_layers
        if is_list and all(value in allowed for value in values):
            return values
        known = " or ".join(map(str, allowed))
        self.problems.append(f"{key} is {values!r:.100}, and {known} for each layer is needed")
        return None

    def only(self, key: str, *allowed: Any) -> None:
        """Accept an unsupported feature only if it is off or absent."""
        value = self.given(key, allowed[0])
        # In Python, true equals 1.
        is_flag = type(value) is bool
        if not any(value == other and is_flag == (type(other) is bool) for other in allowed):
            known = " or ".join(map(repr, allowed))
            self.problems.append(f"{key} is {value!r:.100}, and only {known} is supported")

    def checked_number(self, key: str, value: Any) -> float:
        """Return a value that was read elsewhere, if it is finite and positive."""
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.problems.append(f"{key} is {value!r:.100}, and a number above 0 is needed")
            return 1.0
        return float(value)

    def accept_quantization(self, method: str) -> None:
        """Accept weights that are quantized in this way, which the family reads."""
        self._quantization = method

    def check(self) -> None:
        """Raise ConfigError with all problems so far."""
        quantization = self.given("quantization_config")
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if quantization is not None and (kind is None or kind != self._quantization):
            self.problems.append(
                f"its weights are quantized ({kind or 'in an unknown way'}), which are not loaded; "
                "take the model as bfloat16, or have transformers dequantize it: "
                "from_pretrained(DIR, dtype=torch.bfloat16), dequantize(), save_pretrained(OUT)"
            )
        unknown = [
            f"{key} ({value!r:.60}{similar_key(key, self._understood - self._values.keys())})"
            for key, value in sorted(self._values.items())
            # null is the absence of a feature.
            if key not in self._understood and value is not None and not is_irrelevant(key, value)
        ]
        if unknown:
            self.problems.append(
                f"{', '.join(unknown)} of model_type {self._values.get('model_type')!r:.60} is not "
                "understood; delete what does not change the model"
            )
        if self.problems:
            raise ConfigError(f"the model cannot be built here: {'; '.join(self.problems)}.")


def similar_key(key: str, absent: Iterable[str]) -> str:
    """Return a question after a similar key that is absent; empty if there is none."""
    nearest = get_close_matches(key, sorted(absent), n=1, cutoff=0.8)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def differences(ours: "DataclassInstance", theirs: "DataclassInstance") -> list[str]:
    """Return the dimensions in which two models of a family differ, except run settings."""
    differing = []
    for field in fields(ours):
        name = _EFFECTIVE.get(field.name, field.name)
        here, there = (getattr(dims, name, getattr(dims, field.name)) for dims in (ours, theirs))
        if is_dataclass(here) and is_dataclass(there):
            assert not isinstance(here, type) and not isinstance(there, type)
            differing += differences(here, there)
        elif here != there and field.name not in _NOT_OF_THE_FILE:
            differing.append(f"{field.name} is {there} in its config.json and {here} here")
    return differing


def export_problem(
    values: Mapping[str, Any],
    dims: "DataclassInstance",
    read: Callable[[Mapping[str, Any]], "DataclassInstance"],
) -> str | None:
    """Return why transformers has no model of these dimensions, which are written to a config.json
    with `values`: `read` reads other ones. None if it has one."""
    try:
        differing = differences(dims, read(values))
    except ConfigError as error:
        differing = [str(error)]
    if not differing:
        return None
    return f"as model_type {values['model_type']!r}, {'; '.join(differing)}"


def is_irrelevant(key: str, value: Any) -> bool:
    """Whether a key with this value has no effect on the mathematics."""
    if key in _OFF:
        return value in _OFF[key]
    return any(fnmatchcase(key, pattern) for pattern in _ANY_VALUE)


def _check_capacity(key: str, value: int, unit_bytes: int) -> None:
    """Raise ConfigError for a size of `unit_bytes` per unit that exceeds the memory of this
    machine."""
    memory = memory_bytes()
    limit = memory // unit_bytes
    if value > limit:
        raise ConfigError(
            f"{key} is {value!r:.100}, and at most {limit:,} fit into the {memory / 1e9:.1f} GB of "
            "memory of this machine. Correct it."
        )
