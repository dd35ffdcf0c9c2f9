"""A real run that publishes its weights."""

import atexit
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.harness import launch
from torchtitan_lite.checkpoint.shared_memory import free_run
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.serving.publish.sources import PUBLISHED_FILE


@contextmanager
def publishing_run(
    folder: Path, *more: str, steps: int = 100_000, ranks: int = 2
) -> Iterator[None]:
    """Train, publish and save each step until the end of the block, with `more` arguments. What a
    killed run leaves in shared memory stays for a restart in the same folder, and is freed at the
    end of the process."""
    atexit.register(_free, folder)
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    arguments = [
        *launch.SMALL,
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--training.dtype=float32",
        "--publish.enable=true",
        "--checkpoint.enable=true",
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=0",
        "--checkpoint.async_mode=disabled",
        *more,
    ]
    process = launch.start(ranks, arguments, log)
    try:
        launch.wait_until(
            lambda: (folder / PUBLISHED_FILE).exists() or process.poll() is not None, 120
        )
        assert process.poll() is None, log.read_text()[-4000:]
        yield
    finally:
        launch.end(process)


def _free(folder: Path) -> None:
    with suppress(OSError, CheckpointError):
        free_run(json.loads((folder / PUBLISHED_FILE).read_text())["run_id"])
