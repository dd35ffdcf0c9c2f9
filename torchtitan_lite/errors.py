"""User errors. Layer: imports nothing of the project.

Each message states what was given, what is needed and what to change. `train.py` prints it without
a traceback; any other exception is a bug of this package and keeps its traceback.
"""

FAILED, DIVERGED, MACHINE_FAULT = 1, 3, 4
"""Exit statuses of `train.py`. After the first a restart may help; after the second it would train
no better; after the third it may help on another machine."""
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


class DamagedSnapshot(CheckpointError):
    """A snapshot in shared memory that is incomplete or whose bytes have changed."""


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
    """A rank whose recomputation of a step differs: its hardware is faulty."""

    exit_status = MACHINE_FAULT


class RedistributionError(UserError):
    """A redistribution that failed, or an implicit one where only explicit ones are allowed."""


class ReplicaError(UserError):
    """A replica that cannot take part in training with the others."""


class LighthouseError(UserError):
    """A lighthouse that cannot be started or reached, or that rejects a request."""


class RpcError(UserError):
    """A remote call that failed, or a server of such calls that cannot start."""

    def __init__(self, message: str, code: object = None, *, is_final: bool = False) -> None:
        """`code` is the gRPC status; None if there is none. `is_final`: the server, which has
        proved itself, would reject the call again."""
        super().__init__(message)
        self.code, self.is_final = code, is_final
