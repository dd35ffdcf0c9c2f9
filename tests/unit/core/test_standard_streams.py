"""Output that a disk or a pipe refuses waits for the next write. An exit loses none."""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from torchtitan_lite.core import process_exit, standard_streams
from torchtitan_lite.core.standard_streams import _patient, _PatientStream


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def test_what_was_printed_before_the_stream_is_replaced_comes_first(
    pipe: tuple[int, int],
) -> None:
    read, write = pipe
    former = io.TextIOWrapper(io.BufferedWriter(io.FileIO(write, "wb", closefd=False)))
    former.write("before ")
    stream = _patient(former, write)
    assert stream is not former
    stream.write("after")
    stream.flush()
    assert os.read(read, 100) == b"before after"


def test_output_is_written_at_once(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert _PatientStream(write).write(b"output") == 6
    assert os.read(read, 100) == b"output"


def test_lost_output_is_counted_once(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = pipe
    monkeypatch.setattr(standard_streams, "_MAX_WAITING_BYTES", 4)
    stream = _PatientStream(write)

    def refuse(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        assert stream.write(b"123456") == 6
    for content, expected in ((b"7", b"\n[2 bytes of output are lost]\n34567"), (b"8", b"8")):
        stream.write(content)
        assert os.read(read, 100) == expected


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_exit_flushes_what_was_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(BaseException):
        pass

    def leave(status: int) -> None:
        raise Exited(status)

    output = io.BytesIO()
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(output)))  # pyright: ignore
    print("the end", end="", file=getattr(sys, name))
    with pytest.raises(Exited, match="3"):
        process_exit.exit_process(3)
    assert output.getvalue() == b"the end"
