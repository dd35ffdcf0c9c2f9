"""The reference of the GPU tests: losses and norms in float32 on a CPU.

python -m tests.gpu.reference [--one-billion]

writes reference.json. Initial weights are drawn on the CPU, keyed by name, so that they do not
depend on torch's version or the device. The 1B model needs 14 GB of memory and some minutes.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.ranks import run_ranks
from tests.gpu.training import train_job

REFERENCE = Path(__file__).parent / "reference.json"
DEBUG: dict[str, Any] = {"training.steps": 8}
ONE_BILLION: dict[str, Any] = {
    "model.flavor": "1B",
    "training.local_batch_size": 1,
    "training.global_batch_size": 1,
    "training.steps": 1,
}
"""Tied embeddings; with SGD on the CPU, whose norm and loss of the first step are those of any
optimizer, and which has no state."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write the reference of the GPU tests.")
    parser.add_argument("--one-billion", action="store_true", help="the 1B model, too")
    given = parser.parse_args()
    found = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    cases = {"debug": DEBUG}
    if given.one_billion:
        cases["1B"] = ONE_BILLION | {"optimizer.name": "SGD"}
    for name, overrides in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            (values,) = run_ranks(
                train_job,
                Path(folder) / "run",
                timeout_s=1800,
                folder=folder,
                device="cpu",
                overrides=overrides,
                with_known_weights=True,
            )
        found[name] = {key: values[key] for key in ("losses", "grad_norms")}
    REFERENCE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
