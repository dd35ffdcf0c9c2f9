"""Configurations for features of torchtitan that do not exist here.

Such a file has many keys that are unknown here, and one line that names the feature says more than
a list of them. Layer: above schema.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.config.keys import text_at
from torchtitan_lite.schema.job import BUILT_IN_CONFIG_MODULES, CONFIG_MODULE_KEYS
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


def unsupported_feature(
    tables: Mapping[str, Any],
) -> tuple[tuple[str, str], str] | None:
    """The key that asks for a feature of torchtitan which does not exist here, and what to say of
    it; None if no key does."""
    name = text_at(tables, ("model", "name"))
    experiment, _, family = name.partition(".")
    problem = _MODELS.get(name)
    if family and experiment in _EXPERIMENTS:
        problem = (
            f"the experiment {experiment} of torchtitan is not supported. Set model.name = "
            f"{toml_literal(family)}"
        )
    if problem is not None:
        return ("model", "name"), f"model.name = {toml_literal(name)}: {problem}."
    for section, key in CONFIG_MODULE_KEYS:
        module = text_at(tables, (section, key))
        if module.startswith("torchtitan.") and module not in BUILT_IN_CONFIG_MODULES:
            return (section, key), (
                f"{section}.{key} = {toml_literal(module)} has the keys of a feature of torchtitan "
                "that is not supported. Leave it out, with its keys. Accepted is "
                f"{', '.join(map(toml_literal, BUILT_IN_CONFIG_MODULES))}."
            )
    return None
