"""The registry of fault kinds."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos import network_faults, process_faults, storage_faults
from tests.chaos.job_view import FaultTarget


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """A way in which a machine, a process or a file fails."""

    name: str
    inject: Callable[[FaultTarget], None]
    """Injects the fault and undoes what does not recover by itself. Raises FaultNotApplicable if
    there is no target."""
    restarts_launcher: bool = False
    """Whether the fault ends the launcher, which must be restarted."""

    @property
    def label(self) -> str:
        """The name with spaces, for display."""
        return self.name.replace("_", " ")


_LAUNCHER_FAULTS = process_faults.LAUNCHER_FAULTS
FAULT_KINDS: dict[str, FaultKind] = {
    inject.__name__: FaultKind(
        name=inject.__name__, inject=inject, restarts_launcher=inject in _LAUNCHER_FAULTS
    )
    for inject in (
        *process_faults.FAULTS,
        *_LAUNCHER_FAULTS,
        *storage_faults.FAULTS,
        *network_faults.FAULTS,
    )
}
"""All kinds of faults, by name."""
