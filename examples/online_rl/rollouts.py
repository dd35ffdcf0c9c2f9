"""Files of rollouts, from the sampler to the trainer: one per version of the weights.

A file appears complete, by a rename. Its content is a function of the seed and the version, so that
a sampler that was killed writes the same file again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from examples.online_rl.task import SAMPLES_PER_STEP
from torchtitan_lite.api import OnlineSample
from torchtitan_lite.core.errors import DataError

MAX_WAIT_S = 300.0
_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a version, in the order of the step's samples."""

    version: int
    """Version of the weights that generated them."""
    tokens: list[list[int]]
    """Prompt and answer of each; an answer may be shorter than the longest one."""
    are_targets: list[list[bool]]
    """Whether each token is part of the answer."""
    log_probs: list[list[float]]
    """Log probability of each token of the answer, under `version`; 0 elsewhere."""
    rewards: list[float]
    advantages: list[float]

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def fraction_right(self) -> float:
        """Fraction of the answers that are entirely right."""
        return self.rewards.count(1.0) / len(self.rewards)


def rollouts_file(folder: Path, version: int) -> Path:
    """Return the path of the rollouts of a version."""
    return folder / f"version-{version}.json"


def write_rollouts(folder: Path, rollouts: Rollouts) -> None:
    """Write the file of `rollouts`, which appears complete."""
    path = rollouts_file(folder, rollouts.version)
    partial = path.with_suffix(".part")
    # Python writes a float so that the same float is read.
    partial.write_text(json.dumps(asdict(rollouts)))
    partial.replace(path)


def read_rollouts(folder: Path, version: int) -> Rollouts:
    """Read the rollouts of a version; raise FileNotFoundError if there are none yet."""
    return Rollouts(**json.loads(rollouts_file(folder, version).read_bytes()))


class RolloutDataset:
    """The data set of the trainer, an `OnlineDataset`: step v + 1 trains on the rollouts of version
    v, so that sample i is number i % SAMPLES_PER_STEP of version i // SAMPLES_PER_STEP."""

    def __init__(self, folder: str | None) -> None:
        """`folder` is training.dataset_path. Raises DataError if it is not set."""
        if folder is None:
            raise DataError("training.dataset_path is not set: it is the folder of the rollouts.")
        self._folder = Path(folder)
        self._read = lru_cache(maxsize=2)(self._wait)

    def read(self, samples: Sequence[int]) -> Sequence[OnlineSample]:
        """See `OnlineDataset`. Raises DataError if there are no rollouts within MAX_WAIT_S."""
        found = []
        for sample in samples:
            version, number = divmod(sample, SAMPLES_PER_STEP)
            rollouts = self._read(version)
            length = len(rollouts.tokens[number])
            found.append(
                OnlineSample(
                    tokens=rollouts.tokens[number],
                    are_targets=rollouts.are_targets[number],
                    values={
                        "log_probs": rollouts.log_probs[number],
                        "advantages": [rollouts.advantages[number]] * length,
                    },
                )
            )
        return found

    def _wait(self, version: int) -> Rollouts:
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            try:
                return read_rollouts(self._folder, version)
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise DataError(
                        f"{rollouts_file(self._folder, version)} has not appeared within "
                        f"{MAX_WAIT_S:.0f} s. Is the sampler running?"
                    ) from None
            time.sleep(_POLL_S)
