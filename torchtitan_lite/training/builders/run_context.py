"""Context that the builders of a run share."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint import RunIdentity
from torchtitan_lite.config import Config
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a run is asked to do, on which mesh, and where it writes."""

    config: Config
    identity: RunIdentity
    spec: ModelSpec
    mesh: Mesh
    folder: Path
    """Folder for the outputs of this replica."""
    faults: OutputFaults
    """Failures of output files."""
    phases: Phases
    stack: ExitStack
    """Closes at the end of the run what the builders open."""
