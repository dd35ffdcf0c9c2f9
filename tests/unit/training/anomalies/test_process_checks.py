"""What is wrong with a process is reported once."""

import resource

import pytest

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.training.anomalies import process_checks
from torchtitan_lite.training.anomalies.process_checks import ProcessChecks, reached_limits


class _Clocks:
    wall_s, boot_s = 1e9, 50.0

    def advance(self, seconds: float, jump_s: float = 0.0) -> None:
        self.boot_s += seconds
        self.wall_s += seconds + jump_s


def _checks(clocks: _Clocks, usage: dict[Cause, str]) -> ProcessChecks:
    return ProcessChecks(
        2,
        wall_s=lambda: clocks.wall_s,
        boot_s=lambda: clocks.boot_s,
        usage=lambda: dict(usage),
    )


@pytest.mark.parametrize("jump_s", [-3600.0, -2.5, 2.5, 60.0])
def test_a_clock_that_jumps_is_reported_once(jump_s: float) -> None:
    clocks = _Clocks()
    checks = _checks(clocks, {})
    # NTP slews, and steps take minutes.
    for _ in range(1000):
        clocks.advance(300, 0.0005 * 300)
        assert checks.check() == []
    clocks.advance(0.1, jump_s)
    (found,) = checks.check()
    assert (found.cause, found.rank) == (Cause.CLOCK_JUMP, 2) and f"{jump_s:+.1f}" in found.text
    assert checks.check() == []


def test_a_limit_is_reported_when_it_is_reached_and_again_after_it_was_not() -> None:
    clocks, usage = _Clocks(), {Cause.OUT_OF_DESCRIPTORS: "1 of 1"}
    checks = _checks(clocks, usage)
    assert [one.cause for one in checks.check()] == [Cause.OUT_OF_DESCRIPTORS]
    for is_reached in (True, False):
        if not is_reached:
            usage.clear()
        clocks.advance(2)
        assert checks.check() == []
    # It is about at the limit.
    usage[Cause.OUT_OF_DESCRIPTORS] = "reached"
    clocks.advance(2)
    assert checks.check() == []
    usage.clear()
    clocks.advance(61)
    assert checks.check() == []
    usage[Cause.OUT_OF_DESCRIPTORS] = "again"
    assert checks.check() == []
    clocks.advance(2)
    assert [one.text for one in checks.check()] == ["again"]


def test_a_process_that_is_interrupted_between_two_clocks_has_not_seen_a_jump() -> None:
    clocks = _Clocks()

    def interrupted() -> float:
        wall_s = clocks.wall_s
        clocks.advance(5)
        return wall_s

    checks = _checks(clocks, {})
    checks._wall_s = interrupted
    assert checks.check() == []
    checks._wall_s = lambda: clocks.wall_s
    assert checks.check() == []


def test_limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reached_limits() == {}
    monkeypatch.setattr(process_checks.resource, "getrlimit", lambda number: (4, 4))
    assert reached_limits().keys() == {Cause.OUT_OF_DESCRIPTORS, Cause.OUT_OF_MEMORY}
    with monkeypatch.context() as patch:
        # One of them lists the others.
        patch.setattr(process_checks.os, "listdir", lambda folder: list("012345"))
        assert reached_limits()[Cause.OUT_OF_DESCRIPTORS].startswith("5 of 4 file descriptors")
    infinity = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(process_checks.resource, "getrlimit", lambda number: infinity)
    assert reached_limits() == {}


def test_a_file_that_cannot_be_opened_meanwhile_ends_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_descriptor(path: str) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process_checks.resource, "getrlimit", lambda number: (10**6, 10**6))
    monkeypatch.setattr(process_checks, "open", no_descriptor, raising=False)
    assert reached_limits() == {}


def test_a_process_that_cannot_list_its_descriptors_has_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        found = reached_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.keys() == {Cause.OUT_OF_DESCRIPTORS}
