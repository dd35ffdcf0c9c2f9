"""The settings of RoPE in a config.json.

transformers 5 has them under `rope_parameters`; earlier releases have the base as `rope_theta` and
the scaling under `rope_scaling`, which wins if both are there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_lite.nn.hugging_face.config import HuggingFaceConfig, similar_key
from torchtitan_lite.nn.rope import (
    AlphaScaling,
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
)

_MAX = "max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_NAMES: dict[str, tuple[type[Any], Mapping[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "dynamic": (DynamicScaling, {"factor": "factor"}),
    "ntk_alpha": (AlphaScaling, {"alpha": "alpha", "factor": "factor"}),
    "llama3": (
        RopeScaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position": _ORIGINAL,
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            "original_max_position": _ORIGINAL,
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
            "truncate": "truncate",
            "attention_factor": "attention_factor",
        },
    ),
    "longrope": (
        LongRopeScaling,
        {
            "short_factor": "short_factor",
            "long_factor": "long_factor",
            "original_max_position": _ORIGINAL,
            "max_position": _MAX,
            "factor": "factor",
            "attention_factor": "attention_factor",
        },
    ),
}
"""The kinds of scaling: the class, and the names of its fields in transformers."""
_FORMER_KINDS = {"su": "longrope"}
_LISTS = ("short_factor", "long_factor")
_OPTIONAL = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"}
ALL_SCALINGS = tuple(name for name in _NAMES if name != "ntk_alpha")
_BESIDE_ALPHA = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
"""Settings that HunYuan has beside alpha, without effect."""


def read_rope(
    config: HuggingFaceConfig,
    default_theta: float | None,
    *,
    scaled: Sequence[str] = ALL_SCALINGS,
    is_partial: bool = False,
    has_alpha: bool = False,
    theta_key: str = "rope_theta",
) -> tuple[float, Scaling | None]:
    """Read the base and the scaling, of one of the types `scaled`. `is_partial`: a part of a head
    may be rotated, which `rotated_share` reads. `has_alpha`: a dynamic scaling with `alpha` is a
    fixed one. `theta_key` is the name of the base beside `rope_scaling`."""
    settings = _settings(config)
    top = config.given(theta_key, default_theta)
    if not isinstance(settings, Mapping):
        config.problems.append(f"rope_scaling is {settings!r:.100}, and a table is needed")
        return 1.0, None
    if any(isinstance(value, Mapping) for value in settings.values()):
        config.problems.append("rope_parameters differ between layers, which is not supported")
        return 1.0, None
    return read_table(
        config, settings, top, scaled=scaled, is_partial=is_partial, has_alpha=has_alpha
    )


def rotated_share(config: HuggingFaceConfig, default: float, key: str = _PARTIAL) -> float:
    """Read the share of a head that is rotated, of which `key` is the name beside
    `rope_scaling`."""
    settings = _settings(config)
    given = _partial(config, settings, key) if isinstance(settings, Mapping) else None
    share = config.checked_number(key, default if given is None else given)
    if share > 1:
        config.problems.append(f"{key} is {share}, and at most 1, the whole head, is needed")
        return 1.0
    return share


def read_table(
    config: HuggingFaceConfig,
    settings: Mapping[str, Any],
    theta: float | None,
    *,
    scaled: Sequence[str] = ALL_SCALINGS,
    is_partial: bool = False,
    has_alpha: bool = False,
) -> tuple[float, Scaling | None]:
    """Read the base, which is `theta` if it is absent, and the scaling from a table of settings."""
    if not is_partial and _partial(config, settings) not in (1.0, None):
        config.problems.append("partial_rotary_factor is not 1, and heads are rotated as a whole")
    base = config.checked_number("rope_theta", settings.get("rope_theta", theta))
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = _FORMER_KINDS.get(kind, kind)
    if kind not in ("default", *scaled):
        supported = " or ".join(f'"{known_kind}"' for known_kind in ("default", *scaled))
        config.problems.append(f"rope_type is {kind!r}, and only {supported} is supported")
        return base, None
    if has_alpha and kind == "dynamic" and settings.get("alpha"):
        kind = "ntk_alpha"
        settings = {key: value for key, value in settings.items() if key not in _BESIDE_ALPHA}
    made, names = _NAMES.get(kind, (None, {}))
    known = {*names.values(), "rope_type", "type", "rope_theta", _PARTIAL, _ORIGINAL}
    unknown = [
        f"{key} ({settings[key]!r:.60}{similar_key(key, known - settings.keys())})"
        for key in sorted(settings.keys() - known)
        if settings[key] is not None
    ]
    if unknown:
        config.problems.append(f"{', '.join(unknown)} of RoPE ({kind}) is not supported")
    if made is None:
        return base, None
    values = {
        ours: _value(config, key, value)
        for ours, key in names.items()
        if (value := _given(config, settings, key)) is not None
    }
    optional = {*_OPTIONAL, *(("factor",) if kind == "longrope" else ())}
    missing = [key for ours, key in names.items() if ours not in values and ours not in optional]
    if missing:
        config.problems.append(f"{', '.join(missing)} of RoPE ({kind}) is missing")
        return base, None
    return base, made(**values)


def rope_values(
    theta: float, scaling: Scaling | None, theta_key: str = "rope_theta"
) -> dict[str, Any]:
    """Return the settings in the form that all releases read."""
    return {theta_key: theta, "rope_scaling": rope_table(scaling)}


def rope_table(scaling: Scaling | None) -> dict[str, Any] | None:
    """Return the settings of a scaling; None without one."""
    if scaling is None:
        return None
    kind, names = next(
        (kind, names) for kind, (made, names) in _NAMES.items() if isinstance(scaling, made)
    )
    fields = {theirs: getattr(scaling, ours) for ours, theirs in names.items()}
    values = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in fields.items()
        if value is not None and key != _MAX
    }
    return {"rope_type": "dynamic" if kind == "ntk_alpha" else kind, **values}


def _settings(config: HuggingFaceConfig) -> Any:
    before, after = config.given("rope_scaling"), config.given("rope_parameters")
    return before or after or {}


def _partial(config: HuggingFaceConfig, settings: Mapping[str, Any], key: str = _PARTIAL) -> Any:
    top = config.given(key)
    return settings.get(_PARTIAL, top)


def _given(config: HuggingFaceConfig, settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting; None if it is absent, null or, of those that may be absent, 0."""
    value = settings.get(key)
    if key == _ORIGINAL:
        # As in transformers: that of the model wins, and its maximum is the default.
        value = config.given(_ORIGINAL) or value or config.given(_MAX)
    elif key == _MAX:
        value = config.given(_MAX)
    is_zero = value == 0 and value is not False
    return None if is_zero and key in _OPTIONAL - {"attention_factor"} else value


def _value(config: HuggingFaceConfig, key: str, value: Any) -> Any:
    if key == "truncate":
        return bool(value)
    if key in _LISTS and isinstance(value, list):
        return tuple(config.checked_number(key, item) for item in value)
    number = config.checked_number(key, value)
    if key not in (_ORIGINAL, _MAX):
        return number
    if number % 1:
        config.report_not_whole(key, value)
    return int(number)
