"""What machines report to the coordinator, and what it answers.

A request contains a `Report` and a `Vote`, a response a `Claim` and, if the coordinator leads, an
`Answer`. Invariant: `parse` raises ValueError for whatever is not exactly such a message.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any, Self

from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import REPORT_S
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState

SERVICE = "torchtitan_lite.Coordinator"
PURPOSE = "coordinator"
"""Purpose of its sessions, see `rpc.authentication`."""
MAX_CHARS = 2000
"""Maximum length of a text in a message."""
_MAX_NUMBER = 1 << 53


class NodeState(StrEnum):
    """Phase of a machine."""

    STANDBY = "standby"
    """No rank of it trains."""
    JOINED = "joined"
    """Its ranks start or train, as a member of `generation`."""
    FAILED = "failed"
    """A rank of it failed; the others wait for the end of the generation."""
    ENDED = "ended"
    """All its ranks have finished."""


class FailureKind(StrEnum):
    """How a rank failed."""

    NONE = ""
    DEATH = "death"
    """Its process ended."""
    EXCEPTION = "exception"
    """Its training raised an exception, possibly because of another rank."""
    USER_ERROR = "user error"
    """Its training ended with an error that a user must correct, or a faulty device."""


@dataclass(frozen=True, kw_only=True)
class _Message:
    def to_json(self) -> dict[str, Any]:
        """Return the message as an object of JSON."""
        # Flat, so that it need not be copied deeply.
        return dict(vars(self))

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Self:
        """Parse an object. Raises ValueError."""
        kinds = _kinds(cls)
        if content.keys() != kinds.keys():
            raise ValueError(f"its fields are not those of a {cls.__name__}")
        values = {}
        for name, kind in kinds.items():
            values[name] = _checked(name, content[name], kind)
        return cls(**values)


@cache
def _kinds(message: type[_Message]) -> dict[str, Any]:
    return {field.name: field.type for field in fields(message)}


def _checked(name: str, value: Any, kind: Any) -> Any:
    if kind is str:
        if type(value) is str and len(value) <= MAX_CHARS:
            return value
    elif kind is bool or kind is int or kind is float:
        is_right = type(value) is kind or (kind is float and type(value) is int)
        if is_right and abs(value) < _MAX_NUMBER:
            return value
    elif isinstance(value, str):
        return kind(value)
    raise ValueError(f"{name} is {value!r:.60}")


@dataclass(frozen=True, kw_only=True)
class Report(_Message):
    """Report of a machine, or rather of the agent on it."""

    machine: str
    """Random identity of the agent's process."""
    sequence: int
    """Number of the report. Older ones do not count."""
    name: str
    """Name of the machine for display."""
    address: str
    """Its address on the route to the coordinator."""
    run_id: str
    num_machines: int
    """Machines that train, of all replicas."""
    num_replicas: int = 1
    num_ranks: int
    """Ranks per machine with which it was started."""
    fingerprint: str
    """Fingerprint of the configuration."""
    dump_folder: str = ""
    """Absolute; empty if the machines need not share it."""
    phase: NodeState = NodeState.STANDBY
    generation: int = 0
    """The last generation of which it was a member; 0 if there is none."""
    replica: int = -1
    """The replica of that generation."""
    node_rank: int = -1
    """Its node rank in that generation."""
    mesh: str
    """Mesh of that generation per machine, as `RunMesh.to_text`; before the first one, that with
    which it was started."""
    trained_mesh: str = ""
    """Mesh of the last generation in which its ranks have committed a step; empty if there is
    none."""
    seen_generation: int = 0
    """Highest generation that any answer named."""
    seen_replica: int = -1
    """The replica of the last answer."""
    store_port: int = 0
    """Port of the store of `generation`, if it has node rank 0."""
    has_progress: bool = False
    """Whether its ranks have committed a step in `generation`."""
    is_stopping: bool = False
    """Whether it was asked to stop."""
    was_stopped: bool = False
    """Whether its ranks have ended `generation` before the last step, because one of all ranks was
    asked to stop."""
    has_lost_lease: bool = False
    """Whether it went on standby in `generation` because its lease had ended."""
    failure: FailureKind = FailureKind.NONE
    """How a rank failed in `generation`."""
    failure_text: str = ""
    failure_signature: str = ""
    """Signature of the failure, see `restart_policy.Failure`."""
    failure_rank: int = -1
    failure_status: int = 0
    failure_age_s: float = 0.0
    request: str = ""
    """Id of a resize that was requested on this machine, until it has ended."""
    request_mesh: str = ""
    ready_for: str = ""
    """Id of the resize for which its new processes are warm."""
    refused: str = ""
    """Id of the resize that it cannot follow."""
    refusal: str = ""
    """Reason of that."""
    leaving_for: str = ""
    """Mesh for which its ranks were ordered to leave `generation`; empty if they were not."""
    has_left: bool = False
    """Whether they have."""

    @property
    def is_busy(self) -> bool:
        """Whether its ranks start, train, or have not returned to standby."""
        return self.phase in (NodeState.JOINED, NodeState.FAILED)

    @property
    def machines_per_replica(self) -> int:
        return self.num_machines // self.num_replicas


class RunState(StrEnum):
    """State of a replica, which is the run if it has no others."""

    REBUILDING = "rebuilding"
    """A coordinator that was restarted learns from reports what runs. Nothing changes meanwhile."""
    FORMING = "forming"
    """The next generation waits for machines. All ranks go on standby."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Answer(_Message):
    """Answer to a report."""

    state: RunState
    """State of the replica."""
    replica: int = 0
    """Replica of which this machine is a member, or for which it is a spare one."""
    generation: int
    """Number of its present or last generation."""
    node_rank: int = -1
    """Node rank of this machine in it; -1: a spare."""
    store_address: str = ""
    """Address of the generation's store; empty until node rank 0 has reported it."""
    store_port: int = 0
    is_blamed: bool = False
    """Whether a rank of this machine ended the previous generation."""
    reason: str = ""
    """Why the previous generation or the run ended."""
    status: int = 0
    """Exit status of the ended run."""
    num_joined: int = 0
    joined: str = ""
    """Names of the machines that have joined the replica."""
    mesh: str = ""
    """Mesh of the generation."""
    withholds_outputs: bool = False
    """Whether the generation must not write what others see yet: a machine that was probably lost
    may still have a lease."""
    resize: str = ""
    """Id of the present resize; empty if there is none."""
    resize_mesh: str = ""
    resize_state: ResizeState = ResizeState.ACCEPTED
    """ACCEPTED: members start missing processes. READY: all ranks leave the generation. LEFT: the
    generation is the first one on the new mesh."""
    request: str = ""
    """Id of the request in the report."""
    request_state: ResizeState = ResizeState.ACCEPTED
    request_reason: str = ""
    """Reason why that was rejected or has failed."""


@dataclass(frozen=True, kw_only=True)
class Vote(_Message):
    """Which coordinator a machine has acknowledged."""

    term: int = 0
    """The highest term that it was offered; 0 before the first."""
    answered_s: float = 0.0
    """`Claim.answered_s` of the last answer in this term."""
    voters: str = ""
    """The newest list of voters that it knows, as `VoterList.to_text`."""
    has_lease: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim(_Message):
    """Whether a coordinator leads."""

    term: int
    """The term that it offers."""
    leads: bool
    """Whether the answer counts, and is a lease."""
    answered_s: float
    """Time of the answer by its own clock."""
    report_s: float = REPORT_S
    """Interval at which this machine should report."""
    voters: str = ""
    problem: str = ""
    """Why it does not lead."""


@dataclass(frozen=True)
class VoterList:
    """The machines that elect a coordinator."""

    version: tuple[int, int] = (0, 0)
    """Term and number of the change; (0, 0) for one that no leader has proposed."""
    voters: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    """Those of the list that it replaces, until enough of both lists know of the change."""

    @property
    def lists(self) -> Iterator[tuple[str, ...]]:
        """The lists that decisions need."""
        yield self.voters
        if self.former:
            yield self.former

    @property
    def all(self) -> frozenset[str]:
        return frozenset(self.voters + self.former)

    def to_text(self) -> str:
        """Return the list as a field of a message: empty if no leader has proposed it."""
        if not any(self.version):
            return ""
        term, index = self.version
        return f"{term}.{index}:{','.join(self.voters)}|{','.join(self.former)}"

    @staticmethod
    def parse(text: str) -> "VoterList":
        """Parse a field. Raises ValueError."""
        if not text:
            return VoterList()
        version, _, names = text.partition(":")
        term, _, index = version.partition(".")
        voters, _, former = names.partition("|")
        parsed = VoterList((int(term), int(index)), _names(voters), _names(former))
        if not voters or parsed.to_text() != text:
            raise ValueError(f"{text!r:.60} is not a list of voters")
        return parsed


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
