"""Text samples in validation: the same on every mesh, greedy or sampled."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import ODD_EXPERTS, mesh_for, odd_config
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import EXPERT_MESHES, MESHES
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.models import qwen3
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.parallel.inference import inference_degrees
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.trainer import train

Pools = Callable[[int], WorkerPool]
ALL_MESHES = {**MESHES, **{f"experts {name}": row for name, row in EXPERT_MESHES.items()}}
SAMPLES: dict[str, Any] = {
    "training.steps": 2,
    "training.held_out_fraction": 0.3,
    "validation.enable": True,
    "validation.local_batch_size": 1,
    "validation.steps": 1,
    "validation.freq": 1,
    "validation.samples": 2,
    "validation.sample_prompt": "def ",
    "validation.sample_tokens": 6,
}
EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}
UNSHARDABLE_EXPERTS = replace(ODD_EXPERTS, moe=MoEDims(num_experts=4, top_k=2, hidden_dim=21))
"""Of a width that tensor parallelism cannot divide: every rank of the replica has all of them."""


def sampled(folder: Path, overrides: dict[str, Any]) -> tuple[list[str], tuple[int, int]]:
    """Return the texts of the model after training, and (replicas, tp)."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    config = odd_config(folder, {**SAMPLES, **overrides})
    qwen3.FLAVORS["unshardable_experts"] = UNSHARDABLE_EXPERTS
    mesh = mesh_for(config)
    check_against(config, mesh.world_size)
    with build(config, mesh, StopRequest()) as built:
        train(built.job)
        validation = config.validation
        assert built.text_generator is not None
        texts = built.text_generator.texts(
            built.job.state,
            prompt=validation.sample_prompt,
            count=validation.samples,
            max_new_tokens=validation.sample_tokens,
            temperature=validation.sample_temperature,
        )
        degrees = inference_degrees(built.spec, mesh.world_size)
        return texts, (degrees.dp_replicate, degrees.tp)


@pytest.mark.parametrize(
    ("mesh", "changes", "shape"),
    [
        ("fsdp-2", {"training.dtype": "float32", "validation.sample_temperature": 0.0}, (1, 2)),
        pytest.param(
            "pp-2-fsdp-2", {"validation.sample_temperature": 0.0}, (2, 2), marks=pytest.mark.matrix
        ),
        pytest.param("experts ep-2-etp-2", EXPERTS, (2, 2), marks=pytest.mark.matrix),
        pytest.param("fsdp-2-tp-2", {}, (2, 2), marks=pytest.mark.matrix),
        pytest.param("pp-2-fsdp-2", {"model.flavor": "odd_tied"}, (2, 2), marks=pytest.mark.matrix),
        pytest.param("fsdp-4", {"model.flavor": "four_kv_heads"}, (1, 4), marks=pytest.mark.matrix),
        pytest.param(
            "fsdp-2", {"validation.sample_temperature": 0.0}, (1, 2), marks=pytest.mark.matrix
        ),
        pytest.param("cp-2-allgather", {}, (1, 2), marks=pytest.mark.matrix),
        pytest.param("experts pp-2-ep-2", EXPERTS, (2, 2), marks=pytest.mark.matrix),
        pytest.param("experts fsdp-2-tp-2-ep-4", EXPERTS, (2, 2), marks=pytest.mark.matrix),
        pytest.param(
            "experts ep-2",
            {**EXPERTS, "model.flavor": "unshardable_experts"},
            (1, 2),
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_samples_are_the_same_on_every_mesh(
    mesh: str, changes: dict[str, Any], shape: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    world_size, overrides = ALL_MESHES[mesh]
    alone = {"training.local_batch_size": 4, **changes}
    ((expected, _),) = pools(1).run(sampled, tmp_path / "alone", alone)
    assert len(expected) == 2 and all(expected)
    for texts, replicas_and_tp in pools(world_size).run(
        sampled, tmp_path / "run", {**overrides, **changes}
    ):
        assert texts == expected
        assert replicas_and_tp == shape
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    samples = [event for event in events if event.get("event") == "sample"]
    assert [event["step"] for event in samples] == [1, 2]
    assert [samples[-1]["1"], samples[-1]["2"]] == expected
