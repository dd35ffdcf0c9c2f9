"""The errors that a user can meet. Layer: imports nothing of the project.

Each message says what was given, what is needed and what to change. `train.py` prints these
without a traceback, since the message is the whole story; any other exception is a bug of ours
and keeps its traceback.
"""

FAILED, DIVERGED, MACHINE_FAULT = 1, 3, 4
"""Exit statuses of `train.py`. To start it again may help; would train no better; may help, but not
on that machine."""
INTERRUPTED = 130
"""Exit status of a command that SIGINT ends, as a shell reports it."""


class UserError(Exception):
    """Something that the user can mend: a setting, a file, a machine."""

    exit_status = FAILED
    """Of the process that ends with it."""


class ConfigError(UserError):
    """The configuration is wrong. Carries every problem found, one line each."""


class DataError(UserError):
    """A corpus, tokenizer or cache cannot be read or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete or its bytes are not those that were written."""


class DamagedSnapshot(CheckpointError):
    """A snapshot in shared memory is incomplete or its bytes are not those that were written."""


class MeshError(UserError):
    """The degrees of parallelism do not fit the processes or the model."""


class LayoutError(UserError):
    """A layout contradicts itself or the tensor, or no plan leads from one layout to another."""


class TrainingDiverged(UserError):
    """A step, or too many in a row, had a loss or gradient that is not finite or that spikes."""

    exit_status = DIVERGED


class MachineFault(UserError):
    """A rank came to other numbers when it computed the same again."""

    exit_status = MACHINE_FAULT


class RedistributionError(UserError):
    """State could not be moved, or would have been moved though nobody asked for it."""


class ReplicaError(UserError):
    """This replica can take no part in training with the others, as it is."""


class LighthouseError(UserError):
    """A lighthouse cannot be started or reached, or refuses what it is told."""
