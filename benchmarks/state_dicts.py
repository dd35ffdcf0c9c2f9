"""Training states of the benchmarks by shape, and their layouts under techniques of parallelism.

No process is started and no tensor is allocated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_lite.distributed.redistribute import HolderMesh, Layout

Shapes = dict[str, tuple[int, ...]]
_NORMS = ("norm", "attention_norm", "ffn_norm")
_ROW_PARALLEL = ("wo", "w2")


def llama(dim: int, hidden: int, vocabulary: int, num_layers: int) -> Shapes:
    """The parameters of a Llama with half as many KV heads as query heads."""
    shapes: Shapes = {"embedding": (vocabulary, dim), "norm": (dim,)}
    for layer in range(num_layers):
        shapes |= _named(layer, _attention(dim))
        shapes |= _named(layer, {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)})
    return shapes


def moe(dim: int, hidden: int, vocabulary: int, num_layers: int, num_experts: int) -> Shapes:
    """The parameters of an MoE with stacked experts, and both moments of AdamW."""
    shapes: Shapes = {"embedding": (vocabulary, dim), "norm": (dim,)}
    for layer in range(num_layers):
        up, down = (num_experts, hidden, dim), (num_experts, dim, hidden)
        shapes |= _named(layer, _attention(dim) | {"router": (num_experts, dim)})
        shapes |= _named(layer, {"experts.w1": up, "experts.w2": down, "experts.w3": up})
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    return {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}


def _attention(dim: int) -> Shapes:
    return {
        "wq": (dim, dim),
        "wk": (dim // 2, dim),
        "wv": (dim // 2, dim),
        "wo": (dim, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }


def _named(layer: int, shapes: Shapes) -> Shapes:
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


STATES = {
    # 101 tensors, 109 MB in float32.
    "llama": llama(448, 1216, 6400, 11),
    "moe": moe(256, 512, 3200, 2, 8),
    # 20 tensors, 25 MB; 45 tensors, 45 MB.
    "small llama": llama(448, 1216, 3200, 2),
    "small moe": moe(256, 512, 1600, 1, 8),
    # 92 tensors, 128 MiB; 38 tensors, 31 MiB.
    "published": llama(512, 1408, 8000, 10),
    "small published": llama(384, 1024, 4000, 4),
}

Technique = Callable[[str, HolderMesh], Layout]
"""The layout of a named tensor on a mesh."""


def fsdp(name: str, mesh: HolderMesh) -> Layout:
    """Shard dim 0 over all axes; for stacked experts that is also expert parallelism."""
    return Layout(mesh, [Shard(0)] * len(mesh.shape))


def tp(name: str, mesh: HolderMesh) -> Layout:
    """Tensor parallelism over all axes."""
    return Layout(mesh, [_tensor_parallel(name)] * len(mesh.shape))


def dp_tp(name: str, mesh: HolderMesh) -> Layout:
    """Replicate over the first axis, tensor parallelism over the last."""
    return Layout(mesh, [Replicate(), _tensor_parallel(name)])


def fsdp_tp(name: str, mesh: HolderMesh) -> Layout:
    """Tensor parallelism over the last axis, then FSDP over the first."""
    inner = _tensor_parallel(name)
    return Layout(mesh, [Shard(0), inner], {0: (1, 0)} if inner == Shard(0) else {})


def ep_2(name: str, mesh: HolderMesh) -> Layout:
    """Shard experts over the last of three axes, and each expert over the others."""
    return _expert_parallel(name, mesh, [Shard(1), Shard(1), Shard(0)])


def ep_4(name: str, mesh: HolderMesh) -> Layout:
    """Shard experts over the last two of three axes, and each expert over the first."""
    return _expert_parallel(name, mesh, [Shard(1), Shard(0), Shard(0)])


def _tensor_parallel(name: str) -> Placement:
    kind = name.rpartition(".")[2]
    if kind in (*_NORMS, "router"):
        return Replicate()
    return Shard((1 if kind in _ROW_PARALLEL else 0) + (".experts." in name))


def _expert_parallel(name: str, mesh: HolderMesh, placements: Sequence[Placement]) -> Layout:
    return Layout(mesh, placements) if ".experts." in name else fsdp(name, mesh)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A float32 state that moves from one technique and mesh to another."""

    name: str
    state: str
    src: tuple[Technique, HolderMesh]
    dst: tuple[Technique, HolderMesh]

    def layouts(self) -> dict[str, tuple[Layout, Layout]]:
        """Source and destination by tensor."""
        (src_technique, src), (dst_technique, dst) = self.src, self.dst
        return {name: (src_technique(name, src), dst_technique(name, dst)) for name in self.shapes}

    @property
    def shapes(self) -> Shapes:
        return STATES[self.state]


def cases(num_ranks: int, *, small: bool) -> dict[str, Case]:
    """All cases on 4 or 8 ranks. DTensor supports the layouts of the cases on one mesh: FSDP and TP
    over all ranks are written as over both of two axes, which gives the same shards."""
    flat, two = HolderMesh.ranks(num_ranks), HolderMesh.ranks(num_ranks // 2, 2)
    three = HolderMesh.ranks(num_ranks // 4, 2, 2)
    size = "small " if small else ""
    listed = [
        ("FSDP -> TP", "llama", (fsdp, flat), (tp, flat)),
        ("TP -> FSDP x TP", "llama", (tp, two), (fsdp_tp, two)),
        ("FSDP x TP -> FSDP", "llama", (fsdp_tp, two), (fsdp, two)),
        ("TP x DP -> EP", "moe", (dp_tp, two), (fsdp, two)),
        ("EP 2 -> EP 4", "moe", (ep_2, three), (ep_4, three)),
    ]
    across = {
        4: [(4, 0, 2, 0), (2, 0, 4, 0), (2, 0, 3, 0), (2, 0, 2, 2)],
        8: [(8, 0, 4, 0), (4, 0, 4, 4)],
    }
    for src_size, src_first, dst_size, dst_first in across[num_ranks]:
        name = f"FSDP {src_size} -> {dst_size}" + (", disjoint" if dst_first else "")
        src = HolderMesh.ranks(src_size, first=src_first)
        dst = HolderMesh.ranks(dst_size, first=dst_first)
        listed.append((name, "llama", (fsdp, src), (fsdp, dst)))
    return {
        name: Case(name=name, state=size + state, src=src, dst=dst)
        for name, state, src, dst in listed
    }
