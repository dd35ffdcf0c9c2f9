"""The command that shows the contents of checkpoints and of snapshots in shared memory."""

import json
from pathlib import Path

import pytest

from tests.harness.snapshots import trainers
from tests.unit.checkpoint.small_checkpoint import TWO_FILES, write_checkpoint
from torchtitan_lite.cli import inspect
from torchtitan_lite.cli.parsers import parser


def run_script(
    capsys: pytest.CaptureFixture[str], *arguments: object, shm: Path = Path("/"), status: int = 0
) -> str:
    """Return the output of the command, or its errors if it fails."""
    try:
        options = parser().parse_args(["inspect", *map(str, arguments)])
        assert inspect.run(options, [], shm) == status
    except SystemExit as left:
        assert left.code == status
    printed = capsys.readouterr()
    assert not (printed.out if status == 2 else printed.err)
    return printed.err if status == 2 else printed.out


def test_a_checkpoint_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=3)
    text = run_script(capsys, tmp_path / "step-3", "--tensors", "--verify")
    for words in (
        "  step 3\n",
        "format version 3, written by torchtitan_lite test",
        "mesh: dp_shard 2\n",
        "7 tensors, 16,879 bytes in 2 files",
        "parts: model 8,479 bytes, optimizer 8,400 bytes",
        "dtypes: F32 16,800 bytes, BF16 30 bytes, F64 32 bytes, BOOL 9 bytes, I64 8 bytes",
        f"model.weight: F32 300 x 7, [S0] on (dp_shard 2 of {', '.join(TWO_FILES)})",
        "intact: all checksums match",
    ):
        assert words in text
    actual = json.loads(run_script(capsys, f"{tmp_path}/step-3/", "--json"))
    assert (actual["step"], actual["model_only"], actual["verified"]) == (3, False, False)
    assert actual["bytes"] == sum(actual["bytes_by_file"].values()) == 16879
    assert "tensors" not in actual


def test_a_run_names_its_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for step in (3, 10):
        write_checkpoint(tmp_path / "checkpoint", step)
    for path in (tmp_path, tmp_path / "checkpoint"):
        steps = json.loads(run_script(capsys, path, "--json"))["steps"]
        assert [one["step"] for one in steps] == [3, 10]


def test_all_damage_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for step in (3, 4, 5):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step-3" / "manifest.json").write_text("{")
    (tmp_path / "step-4" / TWO_FILES[0]).unlink()
    path = tmp_path / "step-4" / TWO_FILES[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    # Without reading the files, the command detects only damage to the manifest.
    assert run_script(capsys, tmp_path, status=1).count("DAMAGED") == 1
    actual = json.loads(run_script(capsys, tmp_path, "--verify", "--json", status=1))["steps"]
    assert [[(one["file"], one["tensor"]) for one in step["damage"]] for step in actual] == [
        [("manifest.json", None)],
        [(TWO_FILES[0], None), (TWO_FILES[1], "optimizer.weight.momentum")],
        [],
    ]
    assert "intact: all checksums match" in run_script(capsys, tmp_path / "step-5", "--verify")


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=3)
    path = tmp_path / "step-3" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 9}))
    for arguments, needed in (
        ([], "Give either PATH or --shm"),
        ([tmp_path, "--shm"], "Give either PATH or --shm"),
        ([tmp_path, "--free"], "--free needs --shm"),
        ([tmp_path / "nothing"], "contains no checkpoint"),
        ([tmp_path / "step-3"], "has format version 9"),
        (["--shm", "--free", "0" * 32], "No run"),
        ([tmp_path, "--quick"], "unrecognized arguments: --quick"),
    ):
        output = run_script(capsys, *arguments, shm=tmp_path, status=2)
        assert needed in output
        assert len(output.splitlines()) == 1


def test_shared_memory_is_listed_and_freed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoint"
    assert "No run" in run_script(capsys, "--shm", shm=tmp_path)
    with trainers(tmp_path, root, 2) as run:
        run.start()
        run.snapshot(0, 7)
        run.snapshot(1, 8)
        run.regions[0].begin(0, 9)
        (actual,) = json.loads(run_script(capsys, "--shm", "--json", shm=tmp_path))["runs"]
        assert (actual["run_id"], actual["root"], actual["ranks"]) == (
            run.run_id,
            str(root),
            [0, 1],
        )
        assert actual["steps"] == [8]
        assert actual["bytes"] >= 6 * 12288
        assert actual["writers"] == {str(r): w.pid for r, w in enumerate(run.writers)}
        text = run_script(capsys, "--shm", "--free", shm=tmp_path)
        assert "Freed" not in text
        assert f"snapshots of rank 1 are written by process {run.writers[1].pid}" in text
        output = run_script(capsys, "--shm", "--free", run.run_id, shm=tmp_path, status=2)
        assert "still writes" in output
        for writer in run.writers:
            writer.close()
        output = run_script(capsys, "--shm", "--free", shm=tmp_path, status=2)
        assert run.run_id in output and "Confirm with --yes" in output
        assert run.folder.exists()
        text = run_script(capsys, "--shm", "--free", "--yes", shm=tmp_path)
        assert text == f"Freed run {run.run_id}.\n"
        assert not run.folder.exists()
