"""Records whose disk fails. RLIMIT_FSIZE makes the kernel write a record in part."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchtitan_lite.core.output_files import OutputFaults, RecordFile

_RECORDS = [f"{number:09}\n".encode() for number in range(100)]


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def faults(reports: list[str]) -> OutputFaults:
    return OutputFaults(reports.append)


def test_records_wait_and_are_written_in_order(
    tmp_path: Path, faults: OutputFaults, reports: list[str]
) -> None:
    path = tmp_path / "folder" / "file"
    file = RecordFile(path, faults)
    for record in _RECORDS[:10]:
        file.append(record)
    with _largest_file(157):
        for record in _RECORDS[10:40]:
            file.append(record)
        # The record that was written in part is cut.
        assert path.read_bytes() == b"".join(_RECORDS[:15])
        assert faults.is_failing and faults.summary() == [
            "file: 25 records not written (No space left on device)"
        ]
    for record in _RECORDS[40:]:
        file.append(record)
    file.close()
    assert path.read_bytes() == b"".join(_RECORDS)
    (outage,) = faults.ended_outages()
    assert (outage["written_late"], outage["lost"], outage["outputs"]) == (26, 0, ["file"])
    assert len(reports) == 2 and "file cannot be written: No space left" in reports[0]
    assert faults.summary() == [] and faults.ended_outages() == []


def test_the_oldest_records_are_lost_beyond_the_limit(tmp_path: Path, faults: OutputFaults) -> None:
    path = tmp_path / "file"
    file = RecordFile(path, faults, max_waiting_bytes=50)
    with _largest_file(20):
        for record in _RECORDS[:20]:
            file.append(record)
    file.close()
    assert path.read_bytes() == b"".join([*_RECORDS[:2], *_RECORDS[15:20]])
    assert faults.ended_outages()[0]["lost"] == 13
    assert faults.summary() == ["file: 13 records not written (File too large)"]


def test_several_outputs_have_one_outage(
    tmp_path: Path, faults: OutputFaults, reports: list[str]
) -> None:
    files = [RecordFile(tmp_path / name, faults) for name in ("one", "other")]
    with _largest_file(10):
        for _ in range(3):
            for file in files:
                file.append(_RECORDS[0])
    for file in files:
        assert not faults.ended_outages()
        file.close()
    (outage,) = faults.ended_outages()
    assert outage["outputs"] == ["one", "other"] and outage["written_late"] == 4
    assert len(reports) == 2


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_deleted_file_is_made_again(tmp_path: Path, faults: OutputFaults, what: str) -> None:
    path = tmp_path / "folder" / "file"
    file = RecordFile(path, faults)
    file.append(b"lost\n")
    if what == "file":
        path.unlink()
    else:
        shutil.rmtree(path.parent)
    file.append(b"kept\n")
    file.close()
    assert path.read_bytes() == b"kept\n"


def test_a_failed_preparation_is_repeated(tmp_path: Path, faults: OutputFaults) -> None:
    answers = [OSError(5, "Input/output error"), OSError(5, "Input/output error"), None]

    def prepare() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    file = RecordFile(tmp_path / "file", faults, prepare)
    file.append(b"1\n")
    file.append(b"2\n")
    file.append(b"3\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"1\n2\n3\n" and not answers


def test_a_file_that_is_written_once_is_lost(faults: OutputFaults, reports: list[str]) -> None:
    with faults.tolerating("trace"):
        raise OSError(28, "No space left on device")
    assert not faults.is_failing and len(reports) == 1
    assert faults.summary() == ["trace: 1 records not written (No space left on device)"]


_PRINTS = """
import sys
from torchtitan_lite.core.standard_streams import make_streams_patient
make_streams_patient()
for number in range(3):
    print(number, flush=True)
print("error", file=sys.stderr)
"""


def test_prints_to_a_full_disk_or_a_closed_pipe_do_not_raise() -> None:
    command = [sys.executable, "-c", _PRINTS + "sys.exit(7)"]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 7
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(command, stdout=writer, stderr=writer, check=False).returncode == 7
    os.close(writer)


def test_prints_follow_once_the_disk_accepts_them(tmp_path: Path) -> None:
    path = tmp_path / "output"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, -1));"
    code = limit.format(3) + _PRINTS + limit.format(-1) + "print('end', flush=True)"
    with path.open("wb") as output:
        subprocess.run([sys.executable, "-c", code], stdout=output, check=True, stderr=-3)
    assert path.read_text() == "0\n1\n2\nend\n"


def test_a_file_exists_from_the_start_and_is_complete_at_the_end(
    tmp_path: Path, faults: OutputFaults
) -> None:
    file = RecordFile(tmp_path / "records", faults)
    assert (tmp_path / "records").read_bytes() == b""
    with _largest_file(0):
        file.append(b"record")
    assert (tmp_path / "records").read_bytes() == b""
    file.close()
    assert (tmp_path / "records").read_bytes() == b"record"


def test_late_records_are_counted_once(
    tmp_path: Path, faults: OutputFaults, reports: list[str]
) -> None:
    file = RecordFile(tmp_path / "records", faults)
    for _ in range(2):
        with _largest_file(0):
            file.append(b"record")
        file.flush()
        assert "1 records were written late" in reports[-1]
    file.close()
