"""The rows of torchtitan 0.2.2's integration tests of features, on its llama3 debug file.

The rows are data: names, numbers of ranks and overrides. torchtitan's suite checks that a row ends;
here each row must also have the losses of one process. With TORCHTITAN_REPOSITORY, a clone, the
file, tokenizer and schedule are torchtitan's own.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import tolerances
from tests.harness.jobs import FIXTURE, Outcome, run_config
from tests.harness.launch import run, steps_of
from tests.harness.ranks import WorkerPool, run_command
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.data.tokenizer import train_tokenizer
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import parse_command_line

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]
Pools = Callable[[int], WorkerPool]

CLONE = os.environ.get("TORCHTITAN_REPOSITORY")
ROWS = json.loads((Path(__file__).parent / "torchtitan_0_2_2_features.json").read_text())
NEEDS_GPU = {"fsdp+flex_attn", "fsdp+flex_attn+per_op_sac"}
REAL_COMMAND = {"model_only_hf_checkpoint", "test_generate"}
"""Rows about features outside the training step."""
DEBUG_FILE = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 1
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
dataset = "c4_test"
[parallelism]
pipeline_parallel_schedule = "Interleaved1F1B"
[checkpoint]
interval = 10
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
[validation]
dataset = "c4_validation"
freq = 5
steps = 10
"""
"""Values of torchtitan's debug_model.toml that are not defaults here."""
MATHEMATICS = ("--model.", "--quantize.", "--optimizer.")
"""Overrides of a row that the reference needs too; the schedule file changes the mathematics
otherwise."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of the rows."""

    folder: Path
    file: Path
    data: tuple[str, ...]
    """Overrides: a dataset in place of torchtitan's, small sizes, a path for each relative path."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("features")
    file, tokenizer, schedule = (folder / name for name in ("debug.toml", "tokenizer", "order.csv"))
    tokenizer.mkdir()
    if CLONE is None:
        file.write_text(DEBUG_FILE)
        train_tokenizer([FIXTURE.read_text()], 400).save(tokenizer)
        schedule.write_text("\n".join(_order(rank) for rank in (0, 1)))
    else:
        for path, name in (
            ("torchtitan/models/llama3/train_configs/debug_model.toml", file),
            ("tests/assets/custom_schedule.csv", schedule),
            ("tests/assets/tokenizer/tokenizer.json", tokenizer / "tokenizer.json"),
            ("tests/assets/tokenizer/tokenizer_config.json", tokenizer / "tokenizer_config.json"),
        ):
            command = ["git", "-C", CLONE, "show", f"v0.2.2:{path}"]
            name.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    data = (
        f"--model.hf_assets_path={tokenizer}",
        "--training.dataset=jsonl",
        f"--training.dataset_path={FIXTURE}",
        f"--training.cache_folder={folder}/cache",
        "--training.seq_len=32",
        "--job.device=cpu",
    )
    return Inputs(folder, file, data)


def _order(rank: int) -> str:
    """Return an order in which both stages of a rank run forward, then backward in parts, two
    microbatches at a time."""
    stages, rounds = (rank, rank + 2), range(8)
    forward = [f"{stage}F{n}" for stage in stages for n in rounds]
    backward = [
        f"{stage}{part}{n}"
        for first in range(0, 8, 2)
        for stage in reversed(stages)
        for n in (first, first + 1)
        for part in "IW"
    ]
    return ",".join(forward + backward)


def overrides(inputs: Inputs, row: Sequence[str], folder: Path, steps: int) -> list[str]:
    """Return the row's overrides, followed by those that make the run small."""
    validates = "--validation.enable" in row
    args = [word.replace("{hugging_face}", f"{folder}/hf/step-2") for word in row]
    args = [
        str(inputs.folder / "order.csv") if word.endswith("custom_schedule.csv") else word
        for word in args
    ]
    if validates:
        held_out = ["--validation.dataset=jsonl", f"--validation.dataset_path={FIXTURE}"]
        args += [*held_out, "--validation.steps=1", "--validation.freq=1"]
    args += [*inputs.data, f"--job.dump_folder={folder}", f"--training.steps={steps}"]
    # The schedule file has eight microbatches.
    batch = 8 if any("schedule_csv" in word for word in row) else 32
    return [f"--config={inputs.file}", *args, f"--training.global_batch_size={batch}"]


@pytest.fixture(scope="module")
def reference(pools: Pools, inputs: Inputs) -> Iterator[Callable[[Sequence[str]], list[float]]]:
    """Return the losses of three steps in one process, with the row's overrides that change the
    mathematics."""
    result: dict[tuple[str, ...], list[float]] = {}

    def losses(row: Sequence[str]) -> list[float]:
        batch = overrides(inputs, row, inputs.folder, 3)[-1]
        kept: list[str] = []
        for index, word in enumerate(row):
            if word.startswith(MATHEMATICS):
                value = row[index + 1 : index + 2]
                kept += [word, *(one for one in value if not one.startswith("--"))]
        key = (*kept, batch)
        if key not in result:
            folder = inputs.folder / f"reference-{len(result)}"
            (outcome,) = pools(1).run(run_row, [*overrides(inputs, kept, folder, 3), batch])
            result[key] = outcome.losses
        return result[key]

    yield losses


def run_row(arguments: Sequence[str]) -> Outcome:
    """Train with these arguments in a pool's worker."""
    config, _ = parse_command_line(arguments)
    return run_config(config)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_row(
    row: dict,
    pools: Pools,
    inputs: Inputs,
    reference: Callable[[Sequence[str]], list[float]],
    tmp_path: Path,
) -> None:
    if row.get("disabled"):
        pytest.skip("torchtitan has disabled it")
    first = row["runs"][0]
    if row["name"] in NEEDS_GPU:
        config, _ = parse_command_line(overrides(inputs, first, tmp_path / "run", 2))
        with pytest.raises(ConfigError, match="(?i)flex.* GPU"):
            check_against(config, row["ranks"])
        return
    if row["name"] in REAL_COMMAND:
        _real_command(row, inputs, reference, tmp_path)
        return
    expected, done = reference(first), 0
    for number, words in enumerate(row["runs"], 2):
        resumes = number > 2 and "--checkpoint.enable" in words
        folder = tmp_path / ("run" if resumes or number == 2 else f"run-{number}")
        arguments = overrides(inputs, words, folder, number)
        for outcome in pools(row["ranks"]).run(run_row, arguments, timeout_s=400):
            begun = done if resumes else 0
            if "--checkpoint.exclude_from_loading" in words:
                assert outcome.finished
                continue
            wanted = pytest.approx(expected[begun:number], rel=tolerances.PARITY_FLOAT32_LOSS)
            assert outcome.losses == wanted
        done = number


def _real_command(
    row: dict, inputs: Inputs, reference: Callable[[Sequence[str]], list[float]], folder: Path
) -> None:
    """Rows whose first run produces the input of the second."""
    ranks, (first, second) = row["ranks"], row["runs"]
    run(ranks, overrides(inputs, first, folder / "run", 2), folder / "log")
    losses = [line["loss"] for line in steps_of(folder / "run")]
    assert losses == pytest.approx(reference(first)[:2], rel=tolerances.PARITY_FLOAT32_LOSS)
    if second:
        run(ranks, overrides(inputs, second, folder / "run", 1), folder / "log")
        (again,) = [line["loss"] for line in steps_of(folder / "run")][-1:]
        # The run begins with trained weights, on the first samples.
        assert again < losses[0]
        return
    text = run_command("generate", f"{folder}/run/checkpoint", "--prompt=import", "--device=cpu")
    assert "tokens/s" in text
