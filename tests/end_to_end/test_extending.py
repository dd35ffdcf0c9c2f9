"""A user's package that extends a run, and a training script: the examples of the docs, run
unchanged from a temporary folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.docs_commands import copy_configs
from tests.harness.ranks import REPOSITORY, run_command, run_program
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.models import model_spec, plain_dims

_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)


def write_files(page: str, folder: Path) -> None:
    for name, text in _FILE.findall((REPOSITORY / "docs" / page).read_text()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def call(*words: str, folder: Path, status: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


_OTHER_RUN = """
from pathlib import Path
from types import SimpleNamespace
from torchtitan_lite.api import SinkContext
from my_package.extensions import LossFile

folder = Path("outputs/fruits")
context = SinkContext(folder=folder, resume_step=0, continues=False, total_steps=1, run_config={})
sink = LossFile(context)
sink.step(SimpleNamespace(step=1, loss=2.5))
# Before it is closed.
assert (folder / "losses.jsonl").read_text() == "[1, 2.5]\\n"
assert len((folder / "losses.jsonl.old").read_text().splitlines()) == 5
"""


@pytest.mark.matrix
def test_example_package(tmp_path: Path) -> None:
    write_files("extending.md", tmp_path)
    command = ("train", "--config", "fruits.toml", "--training.cache_folder=cache")
    text = run_command(*command, folder=tmp_path)
    assert "step 4/4" in text and "tiny_llama nano, " in text
    folder = tmp_path / "outputs" / "fruits"
    losses = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    large = [record for record in records if record.get("event") == "large_norm"]
    assert large and {record["fruit"] for record in large} == {"pear"}
    resolved = (folder / "config.toml").read_text()
    assert 'name = "pear"' in resolved and "max_norm_after = 0.01" in resolved
    # As a process that was killed after later steps leaves it.
    with (folder / "losses.jsonl").open("a") as file:
        file.write("[5, 0.0]\n[6, 0.")
    # The run resumes, and a changed override reaches the hook.
    run_command(*command, "--training.steps=5", "--fruit.name=plum", folder=tmp_path)
    assert '"plum"' in (folder / "metrics.jsonl").read_text()
    losses = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5] and losses[-1][1] > 0
    call("-c", _OTHER_RUN, folder=tmp_path)
    generate = ("generate", str(folder / "checkpoint"), "--prompt=3 apples")
    assert "is not one of" in run_command(*generate, folder=tmp_path, status=1)
    more = ("--custom-import=my_package.extensions", "--max-new-tokens=4")
    text = run_command(*generate, *more, folder=tmp_path)
    assert "3 apples" in text
    # The writer processes know the storage, too.
    vault = f"vault://{tmp_path}/vault"
    stored = ("--job.dump_folder=outputs/stored", f"--checkpoint.folder={vault}")
    run_command(*command, *stored, "--checkpoint.async_mode=async", folder=tmp_path)
    resumed = run_command(*command, *stored, "--training.steps=5", folder=tmp_path)
    assert "step 5/5" in resumed and "step 4/5" not in resumed
    assert "imports torch" not in resumed
    inspected = ("inspect", vault, "--verify", more[0])
    text = run_command(*inspected, folder=tmp_path)
    assert "step-5" in text and "tok_embeddings.weight.average" not in text


def test_a_family_built_on_another_one_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files("extending.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(REGISTRY.models, "tiny_llama", "my_package.tiny_llama")
    try:
        spec = model_spec(ModelConfig(name="tiny_llama", flavor="nano"))
        dims = plain_dims(spec.dims) | {"bias": True}
        other = model_spec(ModelConfig(name="tiny_llama", flavor="mine", dims=dims))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
            del sys.modules[name]
    assert (spec.name, spec.num_layers, other.dims.bias) == ("tiny_llama", 2, True)
    assert spec.hugging_face is not None and other.hugging_face is None
    assert other.unknown_to_transformers == (
        "tiny_llama mine is unknown to transformers (as model_type 'llama', out_bias is True in "
        "its config.json and False here)"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--fruit.nome=x"], "Did you mean fruit.name?"),
        (["--fruit.name=3", "--training.max_norm_after=much"], 'max_norm_after: given "much"'),
        (["--experimental.custom_import=nowhere.at_all"], "there is no module nowhere"),
        (["--job.custom_config_module=json"], "the module has no class JobConfig"),
        (["--experimental.custom_import=.foo"], "is not the dotted name of a module"),
    ],
)
def test_mistakes_are_one_line_errors(arguments: list[str], error: str, tmp_path: Path) -> None:
    write_files("extending.md", tmp_path)
    command = ("train", "--config", "fruits.toml", *arguments)
    text = run_command(*command, folder=tmp_path, status=1)
    assert error in text and len(text.splitlines()) == 1


def test_help_lists_the_keys(tmp_path: Path) -> None:
    write_files("extending.md", tmp_path)
    command = ("train", "--config", "fruits.toml", "--help", "fruit")
    text = run_command(*command, folder=tmp_path)
    assert "Which fruit the texts are about." in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the script of the docs has trained, on a small corpus."""
    folder = tmp_path_factory.mktemp("trained")
    write_files("python_api.md", folder)
    copy_configs(folder)
    assert "finished True, step 3, llama3" in run_program("train_in_python.py", folder=folder)
    return folder


def test_python_api_script(trained: Path) -> None:
    texts, *rest = run_program("use_in_python.py", folder=trained).partition("rank 0 has")
    assert texts.startswith("'import os") and texts.count("length\n") == 2
    assert rest == ["rank 0 has", " (2048, 128) of (2048, 128)\n"]


@pytest.mark.matrix
def test_python_api_script_on_two_ranks(trained: Path) -> None:
    texts = run_program("use_in_python.py", folder=trained).partition("rank 0 has")[0]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "use_in_python.py")
    on_two = call(*torchrun, folder=trained)
    assert texts in on_two
    for rank in range(2):
        assert f"rank {rank} has (1024, 128) of (2048, 128)\n" in on_two
