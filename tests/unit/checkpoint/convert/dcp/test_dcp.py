"""Conversion from and to torch DCP checkpoints with torchtitan's names."""

import errno
import pickle
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.harness.jobs import qwen3_like
from tests.harness.ranks import WorkerPool
from tests.unit.models.tiny import DEEPSEEK as TINY_DEEPSEEK
from torchtitan_lite.checkpoint.convert.dcp.dcp_folder import DcpFolder
from torchtitan_lite.checkpoint.convert.dcp.from_dcp import ConversionResult, convert_from_dcp
from torchtitan_lite.checkpoint.convert.dcp.keys import (
    RELEASES,
    KeyMap,
    Release,
    halves_from_pairs,
    pairs_from_halves,
)
from torchtitan_lite.checkpoint.convert.dcp.to_dcp import convert_to_dcp
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage, open_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.models import deepseek_v3, llama3, qwen3
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import RotaryEmbedding, rotate
from torchtitan_lite.nn.spec import ModelSpec

DIMS = llama3.Llama3Dims(
    dim=36, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10, hidden_dim=50, vocab_size=67
)
LLAMA = llama3.spec_of(DIMS, "odd")
TIED = llama3.spec_of(replace(DIMS, tied_embeddings=True), "tied")
DEEPSEEK = deepseek_v3.spec_of(TINY_DEEPSEEK, "tiny")
QWEN = qwen3.spec_of(
    qwen3_like(DIMS, hidden_dim=None, moe=MoEDims(num_experts=3, top_k=2, hidden_dim=14)),
    "experts",
)
GROUP = {"lr": 0.5, "betas": (0.9, 0.95), "fused": None}


@dataclass
class Theirs:
    """The state that torchtitan passes to DCP."""

    state: dict[str, Any]

    def save(self, folder: Path) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            save(self.state, checkpoint_id=folder, no_dist=True)
        return folder

    def tensors(self) -> dict[str, torch.Tensor]:
        flat = {f"optimizer.{key}": value for key, value in self.state["optimizer"].items()}
        both = flat | self.state
        return {key: value for key, value in both.items() if isinstance(value, torch.Tensor)}


def theirs(spec: ModelSpec, release: Release, *, prefix: str = "") -> Theirs:
    """Return a state of random values; layers are named as in `release`."""
    draws = torch.Generator().manual_seed(1)
    keys, model = KeyMap(spec), spec.build()
    weights: dict[str, torch.Tensor] = {}
    slots: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        key, _ = keys.to_torchtitan(f"model.{name}", release)
        weights[prefix + key] = torch.randn(value.shape, generator=draws)
    if spec.tied_units is not None:
        first, second = (
            keys.to_torchtitan(f"model.{u}.weight", release)[0] for u in spec.tied_units
        )
        weights[prefix + second] = weights[prefix + first]
    for name, value in model.named_parameters():
        key, _ = keys.to_torchtitan(f"model.{name}", release)
        for slot in ("exp_avg", "exp_avg_sq"):
            slots[f"state.{key}.{slot}"] = torch.randn(value.shape, generator=draws)
        slots[f"state.{key}.step"] = torch.tensor(7.0)
        slots |= {f"param_groups.{key}.{option}": value for option, value in GROUP.items()}
    rest = {
        "train_state": {"step": 7, "ntokens_seen": 7000},
        "lr_scheduler": {"last_epoch": 7},
        "dataloader": {"dp_rank_0": b"anything", "world_size": 1},
    }
    return Theirs({**weights, "optimizer": slots, **rest})


def import_dcp(
    dcp: Path, out: Path, spec: ModelSpec, **options: Any
) -> tuple[ConversionResult, Any]:
    done = convert_from_dcp(DcpFolder(dcp), open_storage(str(out)), spec, run_config={}, **options)
    return done, StoredSnapshot(*open_parent_storage(done.where))


def tensors_of(snapshot: StoredSnapshot) -> dict[str, torch.Tensor]:
    return {name: read_tensor(snapshot, name) for name in snapshot.tensors}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "spec", [LLAMA, TIED, QWEN, DEEPSEEK], ids=["llama3", "tied", "experts", "deepseek"]
)
def test_round_trip_is_bit_identical(tmp_path: Path, spec: ModelSpec, release: Release) -> None:
    original = theirs(spec, release)
    done, ours = import_dcp(
        original.save(tmp_path / "given"), tmp_path / "ours", spec, file_bytes=9999
    )
    assert (done.step, done.model_only) == (7, False)
    assert done.skipped == ("optimizer.param_groups", "lr_scheduler", "dataloader")
    assert ours.saved.values["train_state"] == {"step": 7, "tokens": 7000}
    assert len(list((tmp_path / "ours" / "step-7").glob("*.safetensors"))) > 3

    back = tmp_path / "back"
    convert_to_dcp(ours, back, spec, release=release, param_group=GROUP)
    dcp_to_torch_save(back, tmp_path / "back.pt")
    got = Theirs(torch.load(tmp_path / "back.pt", weights_only=True))
    assert_same(got.tensors(), original.tensors())
    for part in ("train_state", "lr_scheduler", "optimizer"):
        plain = {k: v for k, v in original.state[part].items() if not isinstance(v, torch.Tensor)}
        assert {k: v for k, v in got.state[part].items() if k in plain} == plain

    _, again = import_dcp(back, tmp_path / "again", spec)
    assert_same(tensors_of(again), tensors_of(ours))


def test_keys_may_begin_with_model(tmp_path: Path) -> None:
    plain, prefixed = theirs(LLAMA, "0.2"), theirs(LLAMA, "0.2", prefix="model.")
    _, a = import_dcp(plain.save(tmp_path / "a"), tmp_path / "from-a", LLAMA)
    _, b = import_dcp(prefixed.save(tmp_path / "b"), tmp_path / "from-b", LLAMA)
    assert_same(tensors_of(a), tensors_of(b))


def test_weights_only_stay_weights_only(tmp_path: Path) -> None:
    weights = Theirs(spec_weights(LLAMA))
    done, ours = import_dcp(weights.save(tmp_path / "a"), tmp_path / "ours", LLAMA)
    assert done.model_only and done.step == 0
    convert_to_dcp(ours, tmp_path / "back", LLAMA, release="0.2", param_group=GROUP)
    dcp_to_torch_save(tmp_path / "back", tmp_path / "back.pt")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), weights.state)


def spec_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    original = theirs(spec, "0.2").state
    return {key: value for key, value in original.items() if isinstance(value, torch.Tensor)}


def test_interleaved_rotary_pairs_become_halves() -> None:
    num_heads, width = 3, 10
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(num_heads * width, 8, generator=draws)
    x_SD = torch.randn(5, 8, generator=draws)
    rotary = RotaryEmbedding(width, 10000.0, None)
    positions = torch.arange(5)
    cos, sin = rotary(positions[None])

    ours = halves_from_pairs(weight, num_heads)
    q_BSHE = rotate((x_SD @ ours.T).view(1, 5, num_heads, width), cos, sin)

    # The definition of the paper (arXiv:2104.09864, equation 34): adjacent elements are a complex
    # number.
    pairs = torch.view_as_complex((x_SD @ weight.T).view(5, num_heads, width // 2, 2))
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(5, 5), angles)[:, None])
    q_SHE = torch.cat([turned[..., 0], turned[..., 1]], -1)
    torch.testing.assert_close(q_BSHE[0], q_SHE, atol=1e-5, rtol=0)
    assert torch.equal(pairs_from_halves(ours, num_heads), weight)


def _save_sharded(folder: Path) -> dict[str, torch.Tensor]:
    """On every rank: save a model under FSDP with DCP after one step; return its full tensors under
    our names, with the rows of heads in torchtitan's order."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    model = LLAMA.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    slots = {
        f"state.{name}.{slot}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }
    # Our names differ from theirs only in the prefixes that FSDP adds.
    state = {"train_state": {"step": 1, "ntokens_seen": 5}, "optimizer": slots}
    weights = dict(model.state_dict())
    save({**weights, **state}, checkpoint_id=folder)
    original = {f"model.{name}": value for name, value in weights.items()}
    original |= {f"optimizer.{key.removeprefix('state.')}": value for key, value in slots.items()}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in original.items()
    }


def test_chunks_of_several_ranks_are_assembled(
    tmp_path: Path, pools: Callable[[int], WorkerPool]
) -> None:
    expected = pools(2).run(_save_sharded, tmp_path / "given")[0]
    assert len(list((tmp_path / "given").glob("*.distcp"))) == 2
    _, ours = import_dcp(tmp_path / "given", tmp_path / "ours", LLAMA)
    heads = {"wq": DIMS.num_heads, "wk": DIMS.num_kv_heads}
    for name, value in expected.items():
        matrix = next((m for m in heads if f".{m}." in name), None)
        if matrix is not None and value.ndim:
            expected[name] = halves_from_pairs(value, heads[matrix])
    assert_same(tensors_of(ours), expected)


def test_unmapped_missing_and_misshapen_are_listed(tmp_path: Path) -> None:
    original = theirs(LLAMA, "0.3")
    original.state["layers.0.attention.wqkv.weight"] = torch.zeros(2)
    original.state["extra"] = {"seed": 3}
    del original.state["norm.weight"]
    original.state["lm_head.weight"] = torch.zeros(3, 36)
    del original.state["optimizer"]["state.tok_embeddings.weight.exp_avg"]
    original.save(tmp_path / "given")
    with pytest.raises(CheckpointError) as caught:
        import_dcp(tmp_path / "given", tmp_path / "ours", LLAMA)
    message = str(caught.value)
    assert "does not fit llama3 odd (5 problems)" in message
    for problem in (
        "layers.0.attention.wqkv.weight is unexpected",
        "extra.seed is unexpected",
        "model.norm.weight is missing",
        "model.output.weight has shape [3, 36], and the model needs [67, 36]",
        "optimizer.tok_embeddings.weight.exp_avg is missing",
    ):
        assert problem in message
    assert not list(tmp_path.glob("ours/*"))


def test_tied_weights_that_differ_are_rejected(tmp_path: Path) -> None:
    theirs(LLAMA, "0.3").save(tmp_path / "given")
    with pytest.raises(CheckpointError, match=r"lm_head.weight and tok_embeddings.weight differ"):
        import_dcp(tmp_path / "given", tmp_path / "ours", TIED)


def test_an_existing_step_is_kept(tmp_path: Path) -> None:
    theirs(LLAMA, "0.3").save(tmp_path / "given")
    import_dcp(tmp_path / "given", tmp_path / "ours", LLAMA)
    with pytest.raises(CheckpointError, match="step-7 already exists"):
        import_dcp(tmp_path / "given", tmp_path / "ours", LLAMA)


def test_a_model_of_the_same_shapes_with_other_dims_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = theirs(LLAMA, "0.3").save(tmp_path / "given")
    source, out = DcpFolder(given), open_storage(str(tmp_path / "ours"))
    monkeypatch.setattr(source, "exported_model", lambda: {"dims": {"rope_theta": 5e5}})
    with pytest.raises(CheckpointError, match=r"other model dimensions.*rope_theta"):
        convert_from_dcp(source, out, LLAMA, run_config={"model": {"dims": {"rope_theta": 1e4}}})
    assert out.steps() == []


class _Bomb:
    def __reduce__(self) -> Any:
        return (subprocess.call, (["touch", "exploded"],))


@pytest.mark.parametrize("inside", [_Bomb(), Metadata({"a": _Bomb()})], ids=["bare", "within"])  # pyright: ignore[reportArgumentType]
def test_metadata_that_would_execute_code_is_rejected(tmp_path: Path, inside: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(inside))
    with pytest.raises(
        CheckpointError, match=r"it names subprocess.call, which is not a class of DCP"
    ):
        DcpFolder(tmp_path)


def _bomb_as_value(dcp: Path) -> None:
    contents = DcpFolder(dcp).contents
    place = contents.objects["train_state.step"]
    raw = bytearray((dcp / place.file).read_bytes())
    raw[place.first : place.first + place.length] = pickle.dumps(_Bomb()).ljust(place.length, b"\0")
    (dcp / place.file).write_bytes(raw)


def _truncate(dcp: Path) -> None:
    file = dcp / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def _swap(dcp: Path) -> None:
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../given/__0_0.distcp"
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))


def _lose_chunk(dcp: Path) -> None:
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    metadata.state_dict_metadata["norm.weight"].chunks.clear()
    (dcp / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_bomb_as_value, r"__0_0.distcp is damaged at train_state.step"),
        (_truncate, r".metadata is damaged: __0_0.distcp has \d+ bytes"),
        (_swap, r"'../given/__0_0.distcp' is not the name of a data file"),
        (_lose_chunk, r"the chunks of norm.weight do not cover its shape \[36\]"),
        (lambda dcp: (dcp / ".metadata").write_bytes(b"\x80\x04nothing"), ".metadata is damaged"),
    ],
    ids=["pickle", "truncated", "path", "chunks", "garbage"],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    dcp = theirs(LLAMA, "0.3").save(tmp_path / "given")
    damage(dcp)
    with pytest.raises(DamagedCheckpoint, match=message):
        import_dcp(dcp, tmp_path / "ours", LLAMA)


class _FullDisk(Files):
    def create(self, path: Path, *, direct: bool = False) -> int:
        if path.name == "rank-00001.safetensors":
            raise OSError(errno.ENOSPC, "no space")
        return super().create(path, direct=direct)


def test_a_full_disk_leaves_no_files(tmp_path: Path) -> None:
    source = DcpFolder(theirs(LLAMA, "0.3").save(tmp_path / "given"))
    out = open_storage(str(tmp_path / "ours"), _FullDisk())
    with pytest.raises(OSError, match="no space"):
        convert_from_dcp(source, out, LLAMA, run_config={}, file_bytes=1)
    assert list((tmp_path / "ours").iterdir()) == []


def test_a_folder_without_dcp_metadata(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a torch DCP checkpoint, which has a file"):
        DcpFolder(tmp_path)
