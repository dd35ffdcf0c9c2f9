"""Exit statuses: which failures may pass."""

import errno
import socket

import pytest
import torch.distributed as dist

from torchtitan_lite.core.errors import (
    DIVERGED,
    FAILED,
    TRANSIENT,
    CheckpointError,
    ConfigError,
    DataError,
    LighthouseError,
    RpcError,
    RpcStatus,
    StorageUnavailable,
    TrainingDiverged,
    UserError,
    exit_status_after,
    is_transient,
)


def _chained(cause: BaseException) -> UserError:
    """Return an error that was raised because of another one, whose traceback it hides."""
    try:
        try:
            raise cause
        except BaseException:
            raise LighthouseError("the lighthouse cannot be reached") from None
    except LighthouseError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EADDRINUSE, "Address already in use"),
        ConnectionRefusedError(),
        TimeoutError(),
        RpcError("nothing answers", RpcStatus.UNAVAILABLE),
        StorageUnavailable("the bucket does not answer"),
    ],
)
def test_what_may_pass(cause: BaseException) -> None:
    assert is_transient(cause)
    assert exit_status_after(_chained(cause)) == TRANSIENT


@pytest.mark.parametrize(
    "cause",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        OSError(errno.ENOSPC, "No space left"),
        RpcError("another secret", RpcStatus.UNAUTHENTICATED),
        ModuleNotFoundError("No module named 'a'"),
        ConfigError("unknown key"),
        CheckpointError("another model"),
    ],
)
def test_what_does_not(cause: BaseException) -> None:
    assert not is_transient(cause)
    assert exit_status_after(_chained(cause)) == FAILED


def test_a_known_status_is_kept() -> None:
    error = TrainingDiverged("the loss is not finite")
    error.__context__ = TimeoutError()
    assert exit_status_after(error) == DIVERGED


def test_a_taken_port_of_a_store_may_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(dist.DistNetworkError) as caught:
            dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=True
            )
    assert is_transient(caught.value)


def test_a_wrong_data_set_does_not_pass() -> None:
    """A hub that is switched off answers a wrong name with a ConnectionError."""
    error = DataError("the data set x cannot be loaded")
    error.__cause__ = ConnectionError("offline mode is enabled")
    assert exit_status_after(error) == FAILED
    assert not is_transient(ValueError("a value with an attribute code"))
