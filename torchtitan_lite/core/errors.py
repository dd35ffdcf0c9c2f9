"""User errors.

Each message states what was given, what is needed and what to change. `train.py` prints it without
a traceback; any other exception is a bug of this package and keeps its traceback.
"""

import errno
from collections.abc import Iterator
from enum import StrEnum

FAILED, DIVERGED, MACHINE_FAULT, GIVEN_UP = 1, 3, 4, 5
"""Exit statuses of `train.py`. After the first a restart may help; after the second it would train
no better; after the third it may help on another machine; after the last, of a
process that has started ranks again and again, the same failure would end them again."""
TRANSIENT = 75
"""Exit status after a failure whose cause may pass: EX_TEMPFAIL of sysexits.h."""
INTERRUPTED = 130
"""Exit status of a command ended by SIGINT, as a shell reports it."""


class UserError(Exception):
    """A problem that the user can fix: a setting, a file, a machine."""

    exit_status = FAILED
    """Exit status of the process that ends with this error."""


class ConfigError(UserError):
    """Invalid configuration, with every problem, one line each."""


class DataError(UserError):
    """A corpus, tokenizer or cache that cannot be read or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit the run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is incomplete or whose bytes have changed."""


class StorageUnavailable(CheckpointError):
    """A storage that cannot be read at the moment; what it holds may be intact."""

    exit_status = TRANSIENT


class DamagedSnapshot(CheckpointError):
    """A snapshot in shared memory that is incomplete or whose bytes have changed."""


class WriteAbandoned(Exception):
    """Raised by a tick to stop a write that is no longer wanted."""


class MeshError(UserError):
    """Degrees of parallelism that do not fit the processes or the model."""


class LayoutError(UserError):
    """A layout that contradicts itself or the tensor, or to which there is no plan."""


class PublishError(UserError):
    """Weights that are not published, not any more, or not for this subscriber."""


class TrainingDiverged(UserError):
    """Training ended by anomalies: losses or gradients that are not finite or spike."""

    exit_status = DIVERGED


class MachineFault(UserError):
    """A rank with faulty hardware, as after a recomputation of a step that differs."""

    exit_status = MACHINE_FAULT


class DamagedState(MachineFault):
    """A rank whose weights or optimizer state changed in memory: its memory is faulty, and its
    state must not be saved."""


class RedistributionError(UserError):
    """A redistribution that failed, or an implicit one where only explicit ones are allowed."""


class ReplicaError(UserError):
    """A replica that cannot take part in training with the others."""


class LighthouseError(UserError):
    """A lighthouse that cannot be started or reached, or that rejects a request."""


class RpcStatus(StrEnum):
    """Why a call failed, with the names and meanings of gRPC's statuses."""

    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    INTERNAL = "INTERNAL"


class RpcError(UserError):
    """A remote call that failed, or a server of such calls that cannot start."""

    def __init__(
        self, message: str, code: RpcStatus | None = None, *, is_final: bool = False
    ) -> None:
        """`is_final`: the server, which has proved itself, would reject the call again."""
        super().__init__(message)
        self.code, self.is_final = code, is_final


_LOST_KINDS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_LOST_ERRNOS = (errno.ELOOP, errno.EIO, errno.ENODATA)
"""Errors of a file that is missing, is of another type, was truncated, or is on a failing disk. All
others (network, open files) may be transient, and do not justify resuming from an older
checkpoint."""


def is_permanent(error: BaseException) -> bool:
    """Return whether `error` means that saved data is lost."""
    if isinstance(error, OSError):
        # Object store clients set no errno.
        return isinstance(error, _LOST_KINDS) or error.errno in _LOST_ERRNOS
    return isinstance(error, (DamagedCheckpoint, DamagedSnapshot))


_TRANSIENT_ERRNOS = {
    errno.EADDRINUSE,
    errno.EAGAIN,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EMFILE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_TRANSIENT_NAMES = {"DistNetworkError", "DistStoreError"}
"""Exceptions of torch.distributed, which is not imported here: a store that cannot listen at its
port, or that no process answers."""
_TRANSIENT_CODES = {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
"""Statuses of gRPC, which is not imported here."""


def is_transient(error: BaseException) -> bool:
    """Return whether the cause of `error` may pass: a service or a storage that cannot be reached,
    a port in use, no free file descriptor. A wrong setting or data set does not pass, whatever was
    asked for it."""
    return not isinstance(error, ConfigError | DataError) and any(map(_may_pass, _chain(error)))


def restart_may_help(error: UserError) -> bool:
    """Whether a replica may train on after an error if it is started again: its cause may pass, or
    the state of other replicas or of storage replaces its own."""
    kinds = (ReplicaError, LighthouseError, RpcError)
    return exit_status_after(error) == TRANSIENT or isinstance(error, kinds)


def exit_status_after(error: UserError) -> int:
    """Return the exit status of the process that ends with `error`."""
    is_known = error.exit_status != FAILED
    return error.exit_status if is_known or not is_transient(error) else TRANSIENT


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, UserError) and error.exit_status == TRANSIENT:
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    if type(error).__name__ in _TRANSIENT_NAMES:
        return True
    is_remote = isinstance(error, RpcError) or type(error).__module__.partition(".")[0] == "grpc"
    code = getattr(error, "code", None) if is_remote else None
    return getattr(code() if callable(code) else code, "name", None) in _TRANSIENT_CODES
