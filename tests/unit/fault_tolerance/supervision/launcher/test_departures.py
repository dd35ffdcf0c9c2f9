"""The departure notifier is restarted after it died, but not in a loop. Its process drops old
departures."""

import io
import time
from pathlib import Path

import pytest

from torchtitan_lite.fault_tolerance.lighthouse import client
from torchtitan_lite.fault_tolerance.supervision.launcher.departures import DepartureNotifier, main


def _polled(notifier: DepartureNotifier, now_s: float) -> str:
    """Poll until the process has ended."""
    deadline_s = time.monotonic() + 30
    while (text := notifier.poll("a:1", now_s)) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return text


def test_a_notifier_that_fails_is_restarted_with_growing_delays(tmp_path: Path) -> None:
    starts = []

    def command(address: str) -> list[str]:
        starts.append(address)
        return ["false"]

    notifier = DepartureNotifier(command, {}, tmp_path / "log", max_restarts=2)
    notifier.start("a:1")
    assert "restarts in 0.2 s" in _polled(notifier, 0.0)
    assert notifier.poll("a:1", 0.1) is None and len(starts) == 1
    # It may end within this call.
    text = notifier.poll("a:1", 0.2)
    assert len(starts) == 2
    text = text or _polled(notifier, 0.4)
    if "0.4 s" in text:
        # It was seen alive.
        text = _polled(notifier, 2.0)
    assert text.endswith("the next departure starts it again")
    assert notifier.poll("a:1", 1000.0) is None and notifier.pid is None


def test_a_killed_notifier_has_ended(tmp_path: Path) -> None:
    notifier = DepartureNotifier(lambda address: ["cat"], {}, tmp_path / "log", max_restarts=2)
    notifier.start("a:1")
    pid = notifier.pid
    assert pid is not None
    notifier.kill()
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_notifier_stays_down(tmp_path: Path) -> None:
    notifier = DepartureNotifier(lambda address: ["false"], {}, tmp_path / "log", max_restarts=2)
    notifier.start("a:1")
    _polled(notifier, 0.0)
    notifier.kill()
    assert notifier.poll("a:1", 1000.0) is None and notifier.pid is None


def test_departures_are_sent_unless_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    # The scripts of deploy/ write no time.
    lines = f"replica_00000\nreplica_00001 {now_s}\nreplica_00002 {now_s - 5}\n"
    sent = []
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.setattr(
        client, "notify_left", lambda address, name, token, left_s: sent.append(name)
    )
    assert main("a:1") == 0
    assert sent == ["replica_00000", "replica_00001"]
