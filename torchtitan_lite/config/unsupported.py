"""Configurations for features of torchtitan that do not exist here.

Such a file has many keys that are unknown here, and one line that names the feature says more than
a list of them. Layer: above schema.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.schema.job import BUILT_IN_CONFIG_MODULES
from torchtitan_lite.schema.section import toml_literal

_TEXT_ONLY = "only text models can be trained"
_MODELS = {
    "flux": f"image generation (Flux) is not supported; {_TEXT_ONLY}",
    "vlm": f"vision-language models are not supported; {_TEXT_ONLY}",
    "transformers_modeling_backend": (
        "modules of transformers are not supported. To train a model that config.json of a Hugging "
        'Face folder describes, set model.flavor = "hf" and model.hf_assets_path, and leave out '
        "model.name and [hf_transformers]"
    ),
}
_EXPERIMENTS = ("simple_fsdp", "compiler_toolkit", "autoparallel", "auto_parallel")
"""Experiments of torchtitan that name a model `experiment.family`."""
_MODULE_KEYS = (("job", "custom_config_module"), ("experimental", "custom_args_module"))


def unsupported_feature(
    tables: Mapping[str, Any],
) -> tuple[tuple[str, str], str] | None:
    """The key that asks for a feature of torchtitan which does not exist here, and what to say of
    it; None if no key does."""
    name = _text(tables, "model", "name") or ""
    experiment, _, family = name.partition(".")
    problem = _MODELS.get(name)
    if family and experiment in _EXPERIMENTS:
        problem = (
            f"the experiment {experiment} of torchtitan is not supported. Set model.name = "
            f"{toml_literal(family)}"
        )
    if problem is not None:
        return ("model", "name"), f"model.name = {toml_literal(name)}: {problem}."
    for section, key in _MODULE_KEYS:
        module = _text(tables, section, key) or ""
        if module.startswith("torchtitan.") and module not in BUILT_IN_CONFIG_MODULES:
            return (section, key), (
                f"{section}.{key} = {toml_literal(module)} has the keys of a feature of torchtitan "
                "that is not supported. Leave it out, with its keys. Accepted is "
                f"{', '.join(map(toml_literal, BUILT_IN_CONFIG_MODULES))}."
            )
    return None


def _text(tables: Mapping[str, Any], section: str, key: str) -> str | None:
    table = tables.get(section)
    value = table.get(key) if isinstance(table, Mapping) else None
    return value if isinstance(value, str) else None
