"""Strict reading of a transformers config.json: an unknown setting that changes the mathematics is
an error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.rope import RopeScaling, YarnScaling

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RUN_TIME = {
    *("attention_backend", "document_mask", "dropout", "max_seq_len"),
    *("balance_loss_weight", "z_loss_weight", "bias_update_rate", "capacity_factor"),
    *("mtp_depth", "mtp_loss_weight", "chunk_size", "pad_token_id"),
}
"""Dimensions that are not properties of the weights."""
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}
"""Names of the RoPE scaling's fields, here and in transformers."""
_YARN = {
    "factor": "factor",
    "original_max_position": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""The same of YaRN."""


_EFFECTIVE = {"head_dim": "head_size"}
"""Dimensions that may be unset, and the property with the value that is used."""


def named_architecture(values: Mapping[str, Any], known: Sequence[str]) -> str:
    """Return the architecture of a config.json, one of `known`. Raises ConfigError if it is
    another one."""
    given = values.get("architectures")
    for name in given if isinstance(given, list) else ():
        if name in known:
            return name
    raise ConfigError(
        f"config.json is of a model that cannot be built here: its architecture is {given!r:.200}, "
        f"and {' or '.join(known)} is needed."
    )


class HuggingFaceConfig:
    """The values of a config.json. Problems are collected, and raised by `check`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._quantization: str | None = None
        self.problems: list[str] = []

    def given(self, key: str) -> Any:
        """Return the value unchanged; None if absent."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there, null included."""
        return key in self._values

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Read an integer of at least `least`."""
        value = self._values.get(key, default)
        # null means the default, too.
        value = default if value is None else value
        if type(value) is not int or value < least:
            wanted = "a number above 0" if least == 1 else f"a whole number of at least {least}"
            self.problems.append(f"{key} is {value!r:.100}, and {wanted} is needed")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite positive number."""
        return self._number(key, self._values.get(key, default))

    def flag(self, key: str, *, default: bool) -> bool:
        """Read a boolean."""
        value = self._values.get(key, default)
        if type(value) is not bool:
            self.problems.append(f"{key} is {value!r:.100}, and true or false is needed")
            return default
        return value

    def per_layer(self, key: str, num_layers: int, allowed: Sequence[Any]) -> list[Any] | None:
        """Read a list with one of `allowed` for each layer; None if it is absent or wrong."""
        values = self._values.get(key)
        if values is None:
            return None
        is_list = isinstance(values, list) and len(values) == num_layers
        if is_list and all(value in allowed for value in values):
            return values
        known = " or ".join(map(str, allowed))
        self.problems.append(f"{key} is {values!r:.100}, and {known} for each layer is needed")
        return None

    def only(self, key: str, *allowed: Any) -> None:
        """Accept an unsupported feature only if it is off or absent."""
        value = self._values.get(key, allowed[0])
        if value not in allowed:
            known = " or ".join(map(repr, allowed))
            self.problems.append(f"{key} is {value!r:.100}, and only {known} is supported")

    def rope(
        self,
        default_theta: float | None,
        *,
        scaled: Sequence[str] = (),
        is_partial: bool = False,
    ) -> tuple[float, RopeScaling | YarnScaling | None]:
        """Read the RoPE base and scaling, of one of the types `scaled`. transformers 5 has both
        under `rope_parameters`, and earlier releases under `rope_theta` and `rope_scaling`.
        `is_partial`: a part of a head may be rotated, which `rotated_share` reads."""
        given = self._rope()
        if not isinstance(given, dict):
            self.problems.append(f"rope_scaling is {given!r:.100}, and a table is needed")
            return 1.0, None
        if any(isinstance(value, dict) for value in given.values()):
            self.problems.append("rope_parameters differ between layers, which is not supported")
            return 1.0, None
        if not is_partial and self._partial(given) not in (1.0, None):
            self.problems.append("partial_rotary_factor is not 1, and heads are rotated as a whole")
        theta = given.get("rope_theta", self._values.get("rope_theta", default_theta))
        kind = given.get("rope_type", given.get("type", "default"))
        base = self._number("rope_theta", theta)
        if kind == "default":
            return base, None
        if kind not in scaled:
            known = " or ".join(f'"{one}"' for one in ("default", *scaled))
            self.problems.append(f"rope_type is {kind!r:.100}, and only {known} is supported")
            return base, None
        if kind == "yarn":
            return base, self._yarn(given)
        values = {ours: self._number(key, given.get(key)) for ours, key in _LLAMA3.items()}
        original = int(values.pop("original_max_position"))
        return base, RopeScaling(**values, original_max_position=original)

    def rotated_share(self, default: float) -> float:
        """Read the share of a head that is rotated."""
        given = self._rope()
        share = self._partial(given) if isinstance(given, dict) else None
        return self._number("partial_rotary_factor", default if share is None else share)

    def _rope(self) -> Any:
        return self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}

    def _partial(self, given: Mapping[str, Any]) -> Any:
        key = "partial_rotary_factor"
        return given.get(key, self._values.get(key))

    def _yarn(self, given: Mapping[str, Any]) -> YarnScaling:
        known = {*_YARN.values(), "rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if unknown := sorted(given.keys() - known):
            self.problems.append(f"YaRN's {', '.join(unknown)} is not supported")
        values: dict[str, Any] = {
            ours: self._number(key, given[key])
            for ours, key in _YARN.items()
            # null and 0 mean the default, too.
            if given.get(key) and key != "truncate"
        }
        needed = ("factor", "original_max_position")
        if missing := [_YARN[name] for name in needed if name not in values]:
            self.problems.append(f"YaRN's {', '.join(missing)} is missing")
            return YarnScaling(factor=1.0, original_max_position=1)
        original = int(values.pop("original_max_position"))
        truncate = given.get("truncate", True)
        return YarnScaling(**values, original_max_position=original, truncate=bool(truncate))

    def _number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.problems.append(f"{key} is {value!r:.100}, and a number above 0 is needed")
            return 1.0
        return float(value)

    def accept_quantization(self, method: str) -> None:
        """Accept weights that are quantized in this way, which the family reads."""
        self._quantization = method

    def check(self) -> None:
        """Raise ConfigError with all problems so far."""
        quantization = self._values.get("quantization_config")
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if quantization is not None and (kind is None or kind != self._quantization):
            self.problems.append(
                f"its weights are quantized ({kind or 'in an unknown way'}), which are not loaded; "
                "take the model as bfloat16, or have transformers dequantize it: "
                "from_pretrained(DIR, dtype=torch.bfloat16), dequantize(), save_pretrained(OUT)"
            )
        if self.problems:
            raise ConfigError(
                f"config.json is of a model that cannot be built here: {'; '.join(self.problems)}."
            )


def rope_values(theta: float, scaling: RopeScaling | YarnScaling | None) -> dict[str, Any]:
    """Return the RoPE settings of a config.json, in the form that all releases read."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    kind, names = ("yarn", _YARN) if isinstance(scaling, YarnScaling) else ("llama3", _LLAMA3)
    found = {theirs: getattr(scaling, ours) for ours, theirs in names.items()}
    values = {key: value for key, value in found.items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **values}}


def differences(ours: "DataclassInstance", theirs: "DataclassInstance") -> list[str]:
    """Return the dimensions in which two models of a family differ, except run settings."""
    found = []
    for field in fields(ours):
        name = _EFFECTIVE.get(field.name, field.name)
        here, there = (getattr(dims, name, getattr(dims, field.name)) for dims in (ours, theirs))
        if is_dataclass(here) and is_dataclass(there):
            assert not isinstance(here, type) and not isinstance(there, type)
            found += differences(here, there)
        elif here != there and field.name not in _RUN_TIME:
            found.append(f"{field.name} is {there} in its config.json and {here} here")
    return found


def is_model_of(
    values: Mapping[str, Any],
    dims: "DataclassInstance",
    read: Callable[[Mapping[str, Any]], "DataclassInstance"],
) -> bool:
    """Whether the model of a config.json, which `read` reads, has these dimensions: whether
    transformers has such a model."""
    try:
        return not differences(dims, read(values))
    except ConfigError:
        return False
