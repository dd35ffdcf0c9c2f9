"""What file operations make durable."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("at_once", [1, 3, 4, 5, 9, 100])
def test_buffers_are_written_whole_if_the_system_writes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    whole = os.pwritev

    def short(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return whole(descriptor, [b"".join(views)[:at_once]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    contents = [b"abcd", b"", b"e", b"fgh", b"ijklmno"]
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    Files().pwritev(descriptor, [memoryview(one) for one in contents], 2)
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"\0\0abcdefghijklmno"
