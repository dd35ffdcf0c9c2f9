"""The model that a run trains."""

from torchtitan_lite.config.schema import Config
from torchtitan_lite.models import model_spec
from torchtitan_lite.nn.lora import with_adapters
from torchtitan_lite.nn.spec import ModelSpec


def trained_spec(config: Config) -> ModelSpec:
    """Return the spec of the model that `config` trains: that of [model], with adapters if they are
    enabled. Raises ConfigError as `model_spec` and `with_adapters` do."""
    spec = model_spec(config.model)
    return with_adapters(spec, config.lora) if config.model.uses_lora else spec
