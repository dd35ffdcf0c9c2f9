"""Facts about experts in a config.json: which layers have them, and shared ones."""

from dataclasses import dataclass
from typing import Any

from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig


@dataclass(frozen=True)
class NumDenseLayers:
    """The number of layers without experts, which are the first ones."""

    theirs: str
    default: int

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        count = config.integer(self.theirs, self.default, least=0)
        dims["dense_layers"] = tuple(range(min(count, dims["num_layers"])))

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: len(dims.dense_layers)}


@dataclass(frozen=True)
class SparseLayers:
    """Layers with experts: each last one of some, but those that are listed."""

    default: tuple[int, ...] = ()
    """Layers without experts if the list is absent."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        step = config.integer("decoder_sparse_step", 1)
        dense = config.given("mlp_only_layers")
        dense = list(self.default) if dense is None else dense
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            config.problems.append(f"mlp_only_layers is {dense!r:.100}, and numbers are needed")
            return
        layers = range(dims["num_layers"])
        dims["dense_layers"] = tuple(n for n in layers if n in dense or (n + 1) % step)

    def write(self, dims: Any) -> dict[str, Any]:
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(dims.dense_layers)}


@dataclass(frozen=True)
class SharedExperts:
    """The number of shared experts, each as wide as the others."""

    theirs: str
    default: int | None

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        count = config.integer(self.theirs, self.default)
        dims["moe.shared_hidden_dim"] = count * dims["moe.hidden_dim"]

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: dims.moe.shared_hidden_dim // dims.moe.hidden_dim}
