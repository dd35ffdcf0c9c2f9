"""Strict reading of a transformers config.json: an unknown setting that changes the mathematics is
an error. Layer: above errors; `nn.rope`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.nn.rope import RopeScaling

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RUN_TIME = {
    *("attention_backend", "document_mask", "dropout", "max_seq_len"),
    *("balance_loss_weight", "bias_update_rate", "capacity_factor"),
}
"""Dimensions that are not properties of the weights."""
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}
"""Names of the RoPE scaling's fields, here and in transformers."""


class HuggingFaceConfig:
    """The values of a config.json. Problems are collected, and raised by `check`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.problems: list[str] = []

    def architecture(self, known: Sequence[str]) -> str:
        """Return the architecture, one of `known`."""
        given = self._values.get("architectures")
        found = next((one for one in given if one in known), "") if isinstance(given, list) else ""
        if not found:
            self.problems.append(
                f"its architecture is {given!r:.200}, and {' or '.join(known)} is needed"
            )
        return found

    def given(self, key: str) -> Any:
        """Return the value unchanged; None if absent."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a positive integer."""
        value = self._values.get(key, default)
        # null means the default, too.
        value = default if value is None else value
        if type(value) is not int or value < 1:
            self.problems.append(f"{key} is {value!r:.100}, and a number above 0 is needed")
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

    def only(self, key: str, *allowed: Any) -> None:
        """Accept an unsupported feature only if it is off or absent."""
        value = self._values.get(key, allowed[0])
        if value not in allowed:
            known = " or ".join(map(repr, allowed))
            self.problems.append(f"{key} is {value!r:.100}, and only {known} is supported")

    def rope(
        self, default_theta: float | None, *, stretched: bool
    ) -> tuple[float, RopeScaling | None]:
        """Read the RoPE base and scaling. transformers 5 has both under `rope_parameters`, and
        earlier releases under `rope_theta` and `rope_scaling`."""
        given = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(given, dict):
            self.problems.append(f"rope_scaling is {given!r:.100}, and a table is needed")
            return 1.0, None
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            self.problems.append("partial_rotary_factor is not 1, and heads are rotated as a whole")
        theta = given.get("rope_theta", self._values.get("rope_theta", default_theta))
        kind = given.get("rope_type", given.get("type", "default"))
        base = self._number("rope_theta", theta)
        if kind == "default":
            return base, None
        if kind != "llama3" or not stretched:
            known = '"default" or "llama3"' if stretched else '"default"'
            self.problems.append(f"rope_type is {kind!r:.100}, and only {known} is supported")
            return base, None
        values = {ours: self._number(key, given.get(key)) for ours, key in _LLAMA3.items()}
        original = int(values.pop("original_max_position"))
        return base, RopeScaling(**values, original_max_position=original)

    def _number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.problems.append(f"{key} is {value!r:.100}, and a number above 0 is needed")
            return 1.0
        return float(value)

    def check(self) -> None:
        """Raise ConfigError with all problems so far."""
        quantization = self._values.get("quantization_config")
        if quantization is not None:
            kind = quantization.get("quant_method") if isinstance(quantization, dict) else None
            self.problems.append(
                f"its weights are quantized ({kind or 'in an unknown way'}), which are not loaded; "
                "take the model as bfloat16, or have transformers dequantize it: "
                "from_pretrained(DIR, dtype=torch.bfloat16), dequantize(), save_pretrained(OUT)"
            )
        if self.problems:
            raise ConfigError(
                f"config.json is of a model that cannot be built here: {'; '.join(self.problems)}."
            )


def rope_values(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the RoPE settings of a config.json, in the form that all releases read."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    stretch = {theirs: getattr(scaling, ours) for ours, theirs in _LLAMA3.items()}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", **stretch}}


def differences(ours: "DataclassInstance", theirs: "DataclassInstance") -> list[str]:
    """Return the dimensions in which two models of a family differ, except run settings."""
    found = []
    for field in fields(ours):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if is_dataclass(here) and is_dataclass(there):
            assert not isinstance(here, type) and not isinstance(there, type)
            found += differences(here, there)
        elif here != there and field.name not in _RUN_TIME:
            found.append(f"{field.name} is {there} in its config.json and {here} here")
    return found
