"""Facts about experts in a config.json: which layers have them, and shared ones."""

from dataclasses import dataclass
from typing import Any

from torchtitan_lite.nn.hugging_face.config import HuggingFaceConfig


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
class LayerBlocks:
    """The kind of each layer's block. Absent: the first layers are dense, and the others have
    experts."""

    count: str
    """Key of the number of these dense layers, if there is no list."""
    default: int

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        layers = range(dims["num_layers"])
        count = config.integer(self.count, self.default, least=0)
        kinds = config.per_layer("mlp_layer_types", len(layers), ("dense", "sparse"))
        dims["dense_layers"] = tuple(
            n for n in layers if (n < count if kinds is None else kinds[n] == "dense")
        )

    def write(self, dims: Any) -> dict[str, Any]:
        dense = dims.dense_layers
        kinds = ["dense" if n in dense else "sparse" for n in range(dims.num_layers)]
        return {"mlp_layer_types": kinds}


class SparseRange:
    """Layers with experts: each last one of some, from a first to a last one, which is that of the
    model if it is -1."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        step = config.integer("moe_layer_interval", 1)
        first = config.integer("moe_layer_start_index", 1, least=0)
        last = config.integer("moe_layer_end_index", -1, least=-1)
        layers = range(dims["num_layers"])
        last = layers[-1] if last == -1 else last
        dims["dense_layers"] = tuple(n for n in layers if not first <= n <= last or (n + 1) % step)

    def write(self, dims: Any) -> dict[str, Any]:
        sparse = [n for n in range(dims.num_layers) if n not in dims.dense_layers]
        return {
            "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
            "moe_layer_start_index": sparse[0] if sparse else dims.num_layers,
            "moe_layer_end_index": sparse[-1] if sparse else -1,
        }


@dataclass(frozen=True)
class SharedExperts:
    """The number of shared experts, each as wide as the others."""

    theirs: str
    default: int | None
    least: int = 1
    """Smallest number."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        count = config.size(self.theirs, self.default, least=self.least)
        dims["moe.shared_hidden_dim"] = count * dims["moe.hidden_dim"]

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: dims.moe.shared_hidden_dim // dims.moe.hidden_dim}
