"""Text in validation comes from a copy of the model that is cut for it, and is what the training
model would give."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.job import ODD_EXPERTS, mesh_for, odd_config
from tests.parity.meshes import EXPERT_MESHES, MESHES
from tests.pool import WorkerPool
from torchtitan_lite.build import build, model_on_meta
from torchtitan_lite.config.constraints import check_against
from torchtitan_lite.generate import generate, prompt_ids
from torchtitan_lite.models import qwen3
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.parallel.serving import serving_degrees
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.rng import fold
from torchtitan_lite.samples import Sampler
from torchtitan_lite.trainer import train

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
UNCUT_EXPERTS = replace(ODD_EXPERTS, moe=MoEDims(num_experts=4, top_k=2, hidden_dim=21))
"""Of a width that no tensor parallelism divides: every rank of the copy has all of them."""


def sampled(
    folder: Path, overrides: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]], list[str], tuple[int, int]]:
    """The ids that the copy gives after training, those of the training model, the copy's texts,
    and (copies, tp)."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    config = odd_config(folder, {**SAMPLES, **overrides})
    qwen3.FLAVORS["uncut_experts"] = UNCUT_EXPERTS
    mesh = mesh_for(config)
    check_against(config, mesh.world_size)
    with build(config, mesh, StopRequest()) as built:
        train(built.job)
        tokenizer, asked = built.data.tokenizer(), config.validation
        sampler = Sampler(
            model_on_meta(config, built.spec),
            built.spec,
            mesh,
            asked,
            tokenizer,
            max_seq_len=config.training.seq_len,
            seed=0,
        )
        expected = [
            generate(
                built.job.state.model,
                built.job.schedule,
                prompt_ids(tokenizer, asked.sample_prompt),
                mesh,
                num_tokens=asked.sample_tokens,
                max_seq_len=config.training.seq_len,
                temperature=asked.sample_temperature,
                seed=fold(0, "sample", number),
                stop_id=tokenizer.eos_id,
            )
            for number in range(asked.samples)
        ]
        degrees = serving_degrees(built.spec, mesh.world_size)
        found = sampler.ids(built.job.state)
        texts = sampler.texts(built.job.state)
        return found, expected, texts, (degrees.dp_replicate, degrees.tp)


@pytest.mark.parametrize(
    ("mesh", "changes", "shape"),
    [
        ("fsdp-2", {"training.dtype": "float32", "validation.sample_temperature": 0.0}, (1, 2)),
        ("fsdp-2-tp-2", {}, (2, 2)),
        ("pp-2-fsdp-2", {"validation.sample_temperature": 0.0}, (2, 2)),
        ("experts ep-2-etp-2", EXPERTS, (2, 2)),
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
            {**EXPERTS, "model.flavor": "uncut_experts"},
            (1, 2),
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_the_copy_gives_what_the_training_model_gives(
    mesh: str, changes: dict[str, Any], shape: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    world_size, overrides = ALL_MESHES[mesh]
    outcomes = pools(world_size).run(sampled, tmp_path / "run", {**overrides, **changes})
    for found, expected, texts, copies_and_tp in outcomes:
        assert found == expected
        assert copies_and_tp == shape
        assert len(texts) == 2 and texts == outcomes[0][2]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    samples = [event for event in events if event.get("event") == "sample"]
    assert [event["step"] for event in samples] == [1, 2]
    # That of the hook is another copy of the same state.
    assert [samples[-1]["1"], samples[-1]["2"]] == outcomes[0][2]
