"""What file operations make durable."""

from pathlib import Path

from tests.unit.conftest import Fsyncs
from torchtitan_lite.checkpoint.storage.files import Files


def test_content_is_durable_before_it_has_its_name(tmp_path: Path, fsyncs: Fsyncs) -> None:
    Files().write_file(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"newer"
    assert fsyncs.synced == {tmp_path / "file.new": b"newer"}


def test_the_names_of_new_folders_are_durable(tmp_path: Path, fsyncs: Fsyncs) -> None:
    Files().make_folders(tmp_path / "a" / "b")
    assert fsyncs.synced == {tmp_path: {"a"}, tmp_path / "a": {"b"}}
    fsyncs.synced.clear()
    Files().make_folders(tmp_path / "a" / "b")
    assert fsyncs.synced == {}
