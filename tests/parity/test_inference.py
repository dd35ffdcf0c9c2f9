"""Inference from a checkpoint: the same texts and the same loss on every mesh."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.jobs import FIXTURE, mesh_for, odd_config, run_job
from tests.harness.ranks import WorkerPool
from tests.harness.tolerances import PARITY_FLOAT32_LOSS, PARITY_FLOAT64
from tests.parity.meshes import CP, TP
from torchtitan_lite.cli import evaluate, generate
from torchtitan_lite.cli.parsers import parser
from torchtitan_lite.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MeshError,
    UserError,
)
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.serving.inference import open_weights

Pools = Callable[[int], WorkerPool]
RUN: dict[str, Any] = {
    "training.steps": 2,
    "training.held_out_fraction": 0.3,
    "validation.enable": True,
    "validation.local_batch_size": 3,
    "validation.freq": 2,
    "checkpoint.enable": True,
    "checkpoint.async_mode": "disabled",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model.flavor": "odd_tied"},
    "experts": {"model.name": "qwen3", "model.flavor": "many_experts"},
    # With modules of multi-token prediction, which inference leaves out.
    "deepseek": {"model.name": "deepseek_v3", "model.flavor": "odd"},
    # With states of recurrences in the cache, and prompts of unequal lengths.
    "qwen3-next": {"model.name": "qwen3_next", "model.flavor": "odd"},
}
TIED = pytest.param("llama-tied", marks=pytest.mark.matrix)
EXPERTS = pytest.param("experts", marks=pytest.mark.matrix)
DEEPSEEK = pytest.param("deepseek", marks=pytest.mark.matrix)
QWEN3_NEXT = pytest.param("qwen3-next", marks=pytest.mark.matrix)
PROMPTS = ("--prompt=def ", "--prompt=import os\n\nclass A:", "--prompt=", "--num-samples=2")


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run with a checkpoint of its last step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    pools(2).run(run_job, folder, {**RUN, **MODELS[request.param]})
    return folder


def texts(
    folder: Path, overrides: Mapping[str, Any], arguments: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The generated texts on one rank."""
    world = _world(folder, overrides)
    options = parser().parse_args(["generate", str(folder / "checkpoint"), *arguments])
    ((texts, _),) = generate.generate_per_version(options, world)
    return [asdict(text) for text in texts]


def record(
    folder: Path, overrides: Mapping[str, Any], arguments: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The record of the evaluate command on one rank."""
    world = _world(folder, {})
    keys = [f"--{key}={value}" for key, value in overrides.items()]
    options, others = parser().parse_known_args(
        ["evaluate", str(folder / "checkpoint" / "step-2"), *arguments, *keys]
    )
    return evaluate.evaluate(options, others, world)


def _world(folder: Path, overrides: Mapping[str, Any]) -> Any:
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    # `odd_config` registers the odd flavors.
    return mesh_for(odd_config(folder, overrides))


@pytest.mark.matrix
@pytest.mark.parametrize("trained", ["llama", TIED, EXPERTS, DEEPSEEK, QWEN3_NEXT], indirect=True)
def test_the_same_texts_on_every_mesh(trained: Path, pools: Pools) -> None:
    greedy = (*PROMPTS, "--max-new-tokens=8", "--temperature=0")
    sampled = (*PROMPTS, "--max-new-tokens=8", "--temperature=1.5", "--top-p=0.8")
    alone = {}
    for arguments in (greedy, sampled):
        (alone[arguments],) = pools(1).run(texts, trained, {}, arguments)
        assert len(alone[arguments]) == 6
        assert all(1 <= len(one["ids"]) <= 8 for one in alone[arguments])
        assert (alone[arguments][0] != alone[arguments][1]) == (arguments == sampled)
    # Sharded over all ranks, replicated with split prompts, and both.
    for world_size, arguments, more in (
        (2, greedy, ()),
        (2, sampled, ("--tensor-parallel=1",)),
        (4, sampled, ("--dtype=float64",)),
    ):
        for found in pools(world_size).run(texts, trained, {}, (*arguments, *more)):
            assert found == alone[arguments]
    # One replica has no prompt.
    single = ("--prompt=def ", "--max-new-tokens=3", "--tensor-parallel=1")
    (expected,) = pools(1).run(texts, trained, {}, single)
    assert pools(2).run(texts, trained, {}, single) == [expected] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("trained", ["llama", TIED, EXPERTS, DEEPSEEK, QWEN3_NEXT], indirect=True)
def test_evaluation_gives_the_loss_of_the_trainer_on_every_mesh(
    trained: Path, pools: Pools
) -> None:
    lines = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    (logged,) = [line["loss"] for line in lines if line.get("event") == "validation"]
    (alone,) = pools(1).run(record, trained, {})
    assert alone["data"] == "held-out documents" and alone["seq_len"] == 24
    assert alone["loss"] == pytest.approx(logged, rel=PARITY_FLOAT64)
    for world_size, mesh in (
        (2, {}),
        (2, {"parallelism.data_parallel_replicate_degree": 2}),
        (2, TP),
        (2, CP),
    ):
        for found in pools(world_size).run(record, trained, mesh):
            assert found["loss"] == pytest.approx(logged, rel=PARITY_FLOAT64)
            assert found["tokens"] == alone["tokens"]


@pytest.mark.matrix
@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_a_stride_evaluates_every_held_out_token_once(trained: Path, pools: Pools) -> None:
    (packed,) = pools(1).run(record, trained, {})
    by_stride = {
        stride: pools(1).run(record, trained, {}, (f"--stride={stride}",))[0]
        for stride in (24, 12, 5)
    }
    assert packed["stride"] is None and packed["loss"] != by_stride[24]["loss"]
    assert len({found["tokens"] for found in by_stride.values()}) == 1
    # The context of a target in a long document depends on the stride.
    assert len({found["loss"] for found in by_stride.values()}) == 3
    for found in pools(2).run(record, trained, {}, ("--stride=5",)):
        assert found["loss"] == pytest.approx(by_stride[5]["loss"], rel=PARITY_FLOAT64)
        assert found["tokens"] == by_stride[5]["tokens"]


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_the_loss_on_other_data(trained: Path, pools: Pools) -> None:
    arguments = (f"--dataset-path={FIXTURE}", "--seq-len=16", "--steps=2", "--batch-size=3")
    two = pools(2).run(record, trained, {}, (*arguments, "--dtype=float32"))
    assert two[0]["loss"] == two[1]["loss"]
    recorded = {key: two[0][key] for key in ("data", "seq_len", "dtype", "processes")}
    assert recorded == {"data": str(FIXTURE), "seq_len": 16, "dtype": "float32", "processes": 2}
    # The first token of a document is not a target.
    assert 0 < two[0]["tokens"] <= 2 * 2 * 3 * 16
    (one,) = pools(1).run(record, trained, {}, (*arguments[:2], "--steps=4", "--batch-size=3"))
    assert one["tokens"] == two[0]["tokens"]
    assert one["loss"] == pytest.approx(two[0]["loss"], rel=PARITY_FLOAT32_LOSS)


def error_of(folder: Path, overrides: Mapping[str, Any], arguments: tuple[str, ...]) -> str:
    """The error of an unsupported mesh."""
    try:
        texts(folder, {}, arguments) if arguments else record(folder, overrides)
    except (ConfigError, MeshError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_unsupported_meshes_are_errors(trained: Path, pools: Pools) -> None:
    three = (*PROMPTS, "--tensor-parallel=3")
    for error in pools(2).run(error_of, trained, {}, three):
        assert "degree 3" in error and "processes (2)" in error and "one of 1, 2" in error
    pipeline = {"parallelism.pipeline_parallel_degree": 2}
    for error in pools(2).run(error_of, trained, pipeline, ()):
        assert "pipeline_parallel_degree = 2" in error and "data_parallel_shard_degree" in error


def step_after_an_error(folder: Path) -> str:
    """The weights that each rank opens after the leader could not list other ones."""
    world = _world(folder, {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_weights("unknown://run", world)
    return open_weights(str(folder / "checkpoint"), world).snapshot.where


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_all_ranks_raise_the_error_of_the_leader(trained: Path, pools: Pools) -> None:
    expected = [str(trained / "checkpoint" / "step-2")] * 2
    assert pools(2).run(step_after_an_error, trained) == expected


def error_of_a_missing_file(folder: Path) -> str:
    """The error that each rank raises if one finds no file."""
    _world(folder, {})

    def open_file() -> str:
        if torch.distributed.get_rank() == 1:
            raise DataError("rank 1 has no such file.")
        return "opened"

    try:
        return run_on_all_ranks(open_file)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def test_all_ranks_raise_the_error_of_one(pools: Pools, tmp_path: Path) -> None:
    errors = pools(2).run(error_of_a_missing_file, tmp_path / "run")
    assert errors == ["CheckpointError: rank 1 has no such file."] * 2
