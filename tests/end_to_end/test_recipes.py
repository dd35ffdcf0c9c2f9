"""A dry run of each recipe of CONTRIBUTING.md: in a copy of the product, only the files that the
recipes name are changed, and one run uses a new model, optimizer, technique, sink and storage."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end.test_extending import call
from tests.harness.launch import SMALL
from tests.harness.ranks import REPOSITORY

_RECIPES = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## How to add")[2]

_NEW_FILES = {
    "A model": {
        "models/toy.py": (REPOSITORY / "tests/assets/new_family/toy.py").read_text(),
        "configs/toy.toml": '[model]\nname = "toy"\nflavor = "small"\n[training]\nsteps = 2\n',
    },
    "A technique of parallelism, or another wrapper of blocks": {
        "torchtitan_lite/parallel/frozen.py": (
            "def apply(model, parallelism):\n"
            "    for name, parameter in model.named_parameters():\n"
            "        if any(part in name for part in parallelism.frozen):\n"
            "            parameter.requires_grad_(False)\n"
        ),
    },
    "A metrics sink": {
        "torchtitan_lite/training/metrics/csv_file.py": (
            "class CsvFile:\n"
            "    def __init__(self, path):\n"
            "        self._file = path.open('w')\n"
            "    def step(self, record):\n"
            "        print(record.step, record.loss, sep=',', file=self._file)\n"
            "    def event(self, event):\n"
            "        pass\n"
            "    def close(self):\n"
            "        self._file.close()\n"
        ),
    },
    "A storage": {
        "torchtitan_lite/checkpoint/storage/counted.py": (
            "from pathlib import Path\n"
            "from torchtitan_lite.checkpoint.storage.files import Files\n"
            "from torchtitan_lite.checkpoint.storage.posix import LocalStorage\n"
            "class CountedStorage(LocalStorage):\n"
            "    def __init__(self, root):\n"
            "        super().__init__(Path(root), Files())\n"
            "        self.root = f'counted://{root}'\n"
            "        self._log = Path(root).with_suffix('.commits')\n"
            "    def commit(self, step, token, manifest):\n"
            "        super().commit(step, token, manifest)\n"
            "        with self._log.open('a') as log:\n"
            "            print(step, file=log)\n"
        ),
    },
    "An optimizer": {},
}
_EDITS = {
    "An optimizer": [
        ("torchtitan_lite/config/tables/optimizer.py", '"Muon")', '"Muon", "RMSprop")'),
        (
            "torchtitan_lite/optim/optimizer.py",
            '    "Adagrad": _adagrad,\n',
            '    "Adagrad": _adagrad,\n'
            '    "RMSprop": lambda groups, config, how: torch.optim.RMSprop(\n'
            "        groups, lr=config.lr, eps=config.eps\n"
            "    ),\n",
        ),
    ],
    "A technique of parallelism, or another wrapper of blocks": [
        (
            "torchtitan_lite/parallel/__init__.py",
            "    fsdp.apply(model,",
            "    frozen.apply(model, parallelism)\n    fsdp.apply(model,",
        ),
        (
            "torchtitan_lite/parallel/__init__.py",
            "\n__all__",
            "from torchtitan_lite.parallel import frozen\n\n__all__",
        ),
        (
            "torchtitan_lite/config/tables/parallelism.py",
            "    expert_parallel_degree:",
            '    frozen: list[str] = []\n    """Parameters to freeze."""\n'
            "    expert_parallel_degree:",
        ),
    ],
    "A metrics sink": [
        (
            "torchtitan_lite/config/tables/metrics.py",
            "    log_freq:",
            '    enable_csv: bool = False\n    """Write losses.csv."""\n    log_freq:',
        ),
        (
            "torchtitan_lite/training/metrics/__init__.py",
            "        every_step.append(JsonLines(",
            "        if config.enable_csv:\n"
            "            from torchtitan_lite.training.metrics.csv_file import CsvFile\n"
            '            every_step.append(CsvFile(folder / "losses.csv"))\n'
            "        every_step.append(JsonLines(",
        ),
    ],
    "A storage": [
        (
            "torchtitan_lite/checkpoint/storage/base.py",
            "    if (path := local_path(root)) is None:",
            '    if root.startswith("counted://"):\n'
            "        from torchtitan_lite.checkpoint.storage.counted import CountedStorage\n"
            '        return CountedStorage(root.removeprefix("counted://"))\n'
            "    if (path := local_path(root)) is None:",
        ),
    ],
}


def _copy_of_the_product(folder: Path) -> Path:
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("torchtitan_lite", "checkpoint", "models"):
        shutil.copytree(REPOSITORY / name, copy / name, symlinks=True, ignore=ignored)
    (copy / "configs").mkdir()
    return copy


def test_recipes_name_every_file_that_is_changed() -> None:
    for title, files in _NEW_FILES.items():
        recipe = _RECIPES.partition(f"**{title}.**")[2].partition("\n\n**")[0]
        for path, anchor, _ in _EDITS.get(title, []):
            assert (REPOSITORY / path).read_text().count(anchor) == 1, (title, path)
            places = (path, path.removeprefix("torchtitan_lite/"), f"{Path(path).parent}/")
            assert any(f"`{place}`" in recipe for place in places), (title, path)
        for path in files:
            folder = str(Path(path).parent).replace("torchtitan_lite/checkpoint", "checkpoint")
            assert f"`{folder}" in recipe, (title, path)


@pytest.mark.matrix
def test_a_run_uses_and_resumes_what_the_recipes_add(tmp_path: Path) -> None:
    copy = _copy_of_the_product(tmp_path)
    for files in _NEW_FILES.values():
        for path, text in files.items():
            (copy / path).write_text(text)
    for edits in _EDITS.values():
        for path, anchor, replacement in edits:
            source = (copy / path).read_text()
            (copy / path).write_text(source.replace(anchor, replacement))
    checkpoints = tmp_path / "checkpoints"
    arguments = (
        "-m",
        "torchtitan_lite",
        "train",
        *(one for one in SMALL if not one.startswith("--config")),
        "--config=configs/toy.toml",
        "--optimizer.name=RMSprop",
        '--parallelism.frozen=["norm"]',
        "--metrics.enable_csv=true",
        "--checkpoint.enable=true",
        f"--checkpoint.folder=counted://{checkpoints}",
        f"--job.dump_folder={tmp_path / 'run'}",
    )
    call(*arguments, folder=copy)
    call(*arguments, "--training.steps=4", folder=copy)
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [one["step"] for one in records if "loss" in one and "lr" in one] == [1, 2, 3, 4]
    assert [one["step"] for one in records if one.get("event") == "resume"] == [2]
    rows = (tmp_path / "run/losses.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["3", "4"]
    assert (tmp_path / "checkpoints.commits").read_text().split()[-2:] == ["2", "4"]
    names = {
        name for path in checkpoints.glob("step-4/**/*.safetensors") for name in load_file(path)
    }
    optimizer = {name for name in names if name.startswith("optimizer.")}
    assert any("square_avg" in name for name in optimizer)
    assert not any("exp_avg" in name or "norm" in name for name in optimizer)
