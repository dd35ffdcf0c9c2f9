"""Facts about positions in a config.json: RoPE, and windows of attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.nn.hugging_face.config import HuggingFaceConfig
from torchtitan_lite.nn.hugging_face.facts import width_per_head
from torchtitan_lite.nn.hugging_face.rope import (
    read_rope,
    read_table,
    rope_table,
    rope_values,
    rotated_share,
)
from torchtitan_lite.nn.rope import RopeBase, Scaling


@dataclass(frozen=True)
class RotatedShare:
    """The share of a head that is rotated."""

    default: float
    theirs: str = "partial_rotary_factor"

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        dims["rotated_share"] = rotated_share(config, self.default, self.theirs)

    def write(self, dims: Any) -> dict[str, Any]:
        return {self.theirs: dims.rotated_share}


class RotatedWidth:
    """The width of the rotated part of a head, of which transformers computes the share; a
    `partial_rotary_factor` takes precedence. Absent: all of it. `HeadWidth` or `Given("head_dim",
    None)` must come before it. Where transformers has no share, write `Value("rotated_width",
    "rotary_dim")`."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        head_dim = dims["head_dim"] or width_per_head(dims)
        width = config.integer("rotary_dim", head_dim)
        if width > head_dim:
            config.problems.append(
                f"rotary_dim is {width}, and at most {head_dim}, the width of a head, is needed"
            )
        dims["rotated_share"] = rotated_share(config, min(width / head_dim, 1.0))

    def write(self, dims: Any) -> dict[str, Any]:
        width = int(dims.head_size * dims.rotated_share)
        return {"rotary_dim": width, "partial_rotary_factor": dims.rotated_share}


@dataclass(frozen=True)
class OriginalLength:
    """The positions of pretraining beside those of the model, which win over those of RoPE's
    table. `Rotation` reads them."""

    default: int

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        config.set_default("original_max_position_embeddings", self.default)

    def write(self, dims: Any) -> dict[str, Any]:
        original = getattr(dims.rope_scaling, "original_max_position", dims.max_seq_len)
        return {"original_max_position_embeddings": original}


@dataclass(frozen=True)
class Rotation:
    """The base and the scaling of RoPE, where all layers have the same."""

    default_theta: float = 10000.0
    theta_key: str = "rope_theta"
    default_scaling: Scaling | None = None
    """Scaling of a config without settings of RoPE."""
    has_alpha: bool = False
    """Whether a dynamic scaling with `alpha` is a fixed one."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        is_partial = "rotated_share" in dims
        dims["rope_theta"], scaling = read_rope(
            config,
            self.default_theta,
            is_partial=is_partial,
            has_alpha=self.has_alpha,
            theta_key=self.theta_key,
        )
        if not (config.given("rope_parameters") or config.given("rope_scaling")):
            scaling = self.default_scaling
        dims["rope_scaling"] = scaling

    def write(self, dims: Any) -> dict[str, Any]:
        values = rope_values(dims.rope_theta, dims.rope_scaling, self.theta_key)
        if dims.rope_scaling is None and self.default_scaling is not None:
            values["rope_scaling"] = {"rope_type": "default"}
        return values


@dataclass(frozen=True)
class LayerTypes:
    """Kinds of layers that take turns, from the first layer on."""

    turns: tuple[str, ...]

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        config.only("layer_types", self._kinds(dims["num_layers"]), None)

    def write(self, dims: Any) -> dict[str, Any]:
        return {"layer_types": self._kinds(dims.num_layers)}

    def _kinds(self, num_layers: int) -> list[str]:
        return [self.turns[layer % len(self.turns)] for layer in range(num_layers)]


@dataclass(frozen=True)
class SameLayers:
    """A list with the kind of each layer, which is the same for all."""

    theirs: str
    kind: Any

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        config.per_layer(self.theirs, dims["num_layers"], (self.kind,))

    def write(self, dims: Any) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Window:
    """A window of attention in all layers; null: none."""

    default: int | None

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        window = config.given("sliding_window", self.default)
        dims["window"] = None if window is None else config.integer("sliding_window", self.default)

    def write(self, dims: Any) -> dict[str, Any]:
        return {"sliding_window": dims.window}


_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class LayerWindows:
    """A window of attention in some layers."""

    default: int | None
    is_windowed: Callable[[HuggingFaceConfig, dict[str, Any], int], bool]
    """Whether a layer has the window if there are no `layer_types`."""
    switch: str | None = "use_sliding_window"
    """Key without which there is no window. Unset: there is, if it has a width."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        layers = range(dims["num_layers"])
        kinds = config.per_layer("layer_types", len(layers), _KINDS)
        width = config.given("sliding_window", self.default)
        is_on = self.switch is None or config.flag(self.switch, default=False)
        has_window = is_on and width is not None
        if not has_window and _KINDS[0] in (kinds or ()):
            config.problems.append(
                f"layer_types has {_KINDS[0]}, and its window is off: sliding_window is {width!r}"
                + ("" if self.switch is None else f" and {self.switch} is false")
            )
        windowed = [
            n
            for n in layers
            if has_window
            and (self.is_windowed(config, dims, n) if kinds is None else kinds[n] == _KINDS[0])
        ]
        config.ignore("max_window_layers", "sliding_window_pattern")
        dims["windowed_layers"] = tuple(windowed) or None
        dims["window"] = config.integer("sliding_window", self.default) if windowed else None

    def write(self, dims: Any) -> dict[str, Any]:
        windowed = dims.windowed_layers or ()
        return {
            **({} if self.switch is None else {self.switch: bool(windowed)}),
            "sliding_window": dims.window,
            "layer_types": [_KINDS[n not in windowed] for n in range(dims.num_layers)],
        }


def is_without_rope(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    """A default of `LayerWindows`: the window is that of layers without rotary embedding."""
    return layer in dims["layers_without_rope"]


def in_all_layers(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    """A default of `LayerWindows`: all layers have the window."""
    return True


def from_layer(default: int) -> Callable[[HuggingFaceConfig, dict[str, Any], int], bool]:
    """Return the default of `LayerWindows` in which the layers behind the first ones, by default
    `default`, have the window."""

    def is_windowed(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
        return layer >= config.integer("max_window_layers", default, least=0)

    return is_windowed


def all_but_last_of_each(default: int) -> Callable[[HuggingFaceConfig, dict[str, Any], int], bool]:
    """Return the default of `LayerWindows` in which all layers have the window but each last one of
    a pattern, of `default` layers."""

    def is_windowed(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
        return (layer + 1) % config.integer("sliding_window_pattern", default) != 0

    return is_windowed


def all_but_first_of_each(length: int) -> Callable[[HuggingFaceConfig, dict[str, Any], int], bool]:
    """Return the default of `LayerWindows` in which all layers have the window but the first one of
    each `length` layers."""

    def is_windowed(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
        return layer % length != 0

    return is_windowed


class LayerThetas:
    """The base of RoPE of each layer: one for layers with a window, one for the others, and 0 for
    those without rotary embedding. Absent: that of `Rotation`."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        layers = range(dims["num_layers"])
        thetas = config.given("layer_rope_theta")
        if thetas is None:
            return
        is_list = isinstance(thetas, list) and len(thetas) == len(layers)
        if not is_list or any(type(theta) not in (int, float) or theta < 0 for theta in thetas):
            config.problems.append(
                f"layer_rope_theta is {thetas!r:.100}, and a number for each layer is needed"
            )
            return
        windowed = dims["windowed_layers"] or ()
        inside = {float(thetas[n]) for n in layers if n in windowed and thetas[n]}
        outside = {float(thetas[n]) for n in layers if n not in windowed and thetas[n]}
        if len(inside) > 1 or len(outside) > 1:
            config.problems.append(
                f"layer_rope_theta is {thetas!r:.100}, and one number for layers with a window and "
                "one for the others are needed"
            )
            return
        dims["layers_without_rope"] = tuple(n for n in layers if not thetas[n])
        dims["rope_theta"] = next(iter(outside or inside), dims["rope_theta"])
        if inside and inside != {dims["rope_theta"]}:
            theta = next(iter(inside))
            dims["windowed_rope"] = RopeBase(theta=theta, scaling=dims["rope_scaling"])

    def write(self, dims: Any) -> dict[str, Any]:
        whole = dims.rope_theta
        inside = whole if dims.windowed_rope is None else dims.windowed_rope.theta
        thetas = [inside if dims.is_windowed(n) else whole for n in range(dims.num_layers)]
        without = dims.layers_without_rope
        return {"layer_rope_theta": [0 if n in without else t for n, t in enumerate(thetas)]}


@dataclass(frozen=True)
class LayerRotations:
    """The base and the scaling of RoPE, by whether a layer has a window. Earlier releases have a
    key for each base, and the scaling of layers without a window."""

    default_theta: float
    windowed_theta: float | None = None
    windowed_key: str | None = "rope_local_base_freq"
    """Former key of the base in windows. Unset: that of the others."""
    has_former_keys: bool = True
    """Whether earlier releases have the architecture. transformers replaces the tables of one that
    they do not have by a `rope_scaling`, null too."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        tables = config.given("rope_parameters") or {}
        before, theta, local = None, self.default_theta, self.windowed_theta
        if self.has_former_keys:
            before = config.given("rope_scaling")
            theta = config.given("rope_theta", self.default_theta)
            local = theta
            if self.windowed_key is not None:
                local = config.given(self.windowed_key, self.windowed_theta)
        if not isinstance(tables, Mapping) or not isinstance(before or {}, Mapping):
            config.problems.append(f"rope_parameters is {tables!r:.100}, and a table is needed")
            return
        if unknown := sorted(tables.keys() - set(_KINDS)):
            config.problems.append(
                f"rope_parameters has {', '.join(unknown)}, and a table for {_KINDS[0]} and one "
                f"for {_KINDS[1]} are needed"
            )
        whole = {**(tables.get(_KINDS[1]) or {}), **(before or {})}
        if whole.get("truncate", True) is not True:
            config.problems.append(
                f"truncate of RoPE is {whole['truncate']!r:.100}, which transformers does not read "
                "in the table of a kind of layers; delete it"
            )
        dims["rope_theta"], dims["rope_scaling"] = read_table(config, whole, theta)
        windowed = read_table(config, tables.get(_KINDS[0]) or {}, local)
        dims["windowed_rope"] = RopeBase(theta=windowed[0], scaling=windowed[1])

    def write(self, dims: Any) -> dict[str, Any]:
        whole = RopeBase(theta=dims.rope_theta, scaling=dims.rope_scaling)
        tables = {}
        for kind, base in zip(_KINDS, (dims.windowed_rope or whole, whole), strict=True):
            scaling = rope_table(base.scaling) or {"rope_type": "default"}
            tables[kind] = {"rope_theta": base.theta, **scaling}
        if not self.has_former_keys:
            return {"rope_parameters": tables}
        key = self.windowed_key
        return {
            "rope_parameters": tables,
            **rope_values(whole.theta, whole.scaling),
            **({} if key is None else {key: (dims.windowed_rope or whole).theta}),
        }


class LayersWithoutRope:
    """Layers without rotary embedding: marked with 0, by default each last of some."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        layers = range(dims["num_layers"])
        marks = config.per_layer("no_rope_layers", len(layers), (0, 1), may_be_longer=True)
        step = config.integer("no_rope_layer_interval", 4)
        if marks is None:
            marks = [(n + 1) % step for n in layers]
        dims["layers_without_rope"] = tuple(n for n in layers if not marks[n])

    def write(self, dims: Any) -> dict[str, Any]:
        without = dims.layers_without_rope
        return {"no_rope_layers": [int(n not in without) for n in range(dims.num_layers)]}


@dataclass(frozen=True)
class RopeInWindows:
    """Rotary embedding in the layers with a window only."""

    is_everywhere_without: bool = False
    """Whether it is in all layers if there is no window."""

    def read(self, config: HuggingFaceConfig, dims: dict[str, Any]) -> None:
        is_everywhere = self.is_everywhere_without and (
            config.has("sliding_window") and config.given("sliding_window") is None
        )
        dims["layers_without_rope"] = tuple(
            n
            for n in range(dims["num_layers"])
            if n not in (dims["windowed_layers"] or ()) and not is_everywhere
        )

    def write(self, dims: Any) -> dict[str, Any]:
        if self.is_everywhere_without and dims.window is None and dims.layers_without_rope:
            # Without a width there would be rotary embedding in all layers.
            return {"sliding_window": dims.max_seq_len}
        return {}
