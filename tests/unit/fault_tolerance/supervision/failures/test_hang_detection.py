"""A hanging rank is distinguished from ranks that wait for it; damaged heartbeats and flight
recorders are rejected."""

import json
import math
import os
import random
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.core.rank.heartbeat import Heartbeat, HeartbeatMemory, HeartbeatWriter, parse
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    CollectiveCall,
    FlightRecord,
    find_mismatch,
    read_flight_record,
)
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import (
    RankStatus,
    StallDetector,
    blocking_ranks,
    hang_cause,
    hang_reason,
    stray_ranks,
)

LIMITS = {Phase.COMPUTE: 10.0, Phase.DATA: 10.0, Phase.COMMUNICATION: 30.0}


def seen(number: int, phase: Phase, *, since_s: float = 0.0, state: str = "S") -> RankStatus:
    pid = 1000 + number
    heartbeat = Heartbeat(pid, phase, 57, since_s, LIMITS.get(phase, math.inf), 10.0)
    return RankStatus(number, pid, heartbeat, state)


def call(number: int, group: str = "dp") -> CollectiveCall:
    return CollectiveCall(group, number, "gloo:all_reduce", "Float [4]")


def late_at(ranks: list[RankStatus], *times_s: float) -> list[set[int]]:
    stalls = StallDetector()
    return [stalls.update(ranks, now_s) for now_s in times_s]


def test_a_rank_is_late_after_some_consecutive_looks() -> None:
    assert late_at([seen(0, Phase.COMPUTE)], 9.9, 10.5, 11.2, 11.6) == [set(), set(), set(), {0}]


def test_a_suspended_machine_is_not_a_hang() -> None:
    stalls = StallDetector()
    assert stalls.update([seen(0, Phase.COMPUTE)], 5) == set()
    # All ranks are late at the first look, and progress before the next.
    assert stalls.update([seen(0, Phase.COMPUTE)], 500) == set()
    assert stalls.update([seen(0, Phase.COMPUTE, since_s=500.5)], 501.5) == set()


@pytest.mark.parametrize("phase", [Phase.START, Phase.QUORUM, Phase.HEALING, Phase.CHECKPOINT])
def test_phases_without_a_limit_never_time_out(phase: Phase) -> None:
    assert late_at([seen(0, phase)], 1000, 2000) == [set(), set()]


@pytest.mark.parametrize("phase", list(Phase))
def test_a_stopped_rank_is_late_in_every_phase(phase: Phase) -> None:
    stopped = seen(0, phase, state="T", since_s=100)
    assert late_at([stopped], 100, 109, 110.5, 112)[1:] == [set(), set(), {0}]
    # Not yet at the limit.
    assert late_at([stopped], 100, 110, 111) == [set()] * 3
    # Only while it is stopped: here it resumed in between.
    stalls = StallDetector()
    stalls.update([stopped], 100)
    stalls.update([seen(0, Phase.QUORUM, since_s=100)], 105)
    assert stalls.update([stopped], 109.5) == set()


def test_a_rank_without_a_heartbeat_is_not_judged() -> None:
    assert late_at([RankStatus(0, 1, None, "T")], 1000, 2000) == [set(), set()]


def numbers(
    ranks: list[RankStatus], late: set[int], flight_records: dict[int, FlightRecord] | None = None
) -> list[int]:
    return [one.number for one in blocking_ranks(ranks, late, flight_records or {})]


def test_the_culprit() -> None:
    waits, works = seen(0, Phase.COMMUNICATION), seen(1, Phase.COMPUTE)
    assert numbers([waits, works], {0, 1}) == [1]
    assert numbers([waits, works], {1}) == [1]
    assert numbers([waits], {0}) == [0]
    # The stopped rank is the culprit, although another rank is late and it is not yet.
    stopped = seen(2, Phase.COMMUNICATION, state="T")
    assert numbers([waits, works, stopped], {1}) == [2]


def test_the_culprit_by_the_collectives() -> None:
    both = [seen(0, Phase.COMPUTE), seen(1, Phase.COMPUTE)]
    waiting, other = FlightRecord([call(7)], {"dp gloo": 7}), FlightRecord([], {"dp gloo": 6})
    assert numbers(both, {0, 1}, {0: waiting, 1: other}) == [1]
    assert numbers(both, {0, 1}, {0: other, 1: waiting}) == [0]
    # It waits too, but in another collective, in which no known rank is missing.
    for newest in (0, 6):
        elsewhere = FlightRecord([call(3, "replicas")], {"dp gloo": newest, "replicas gloo": 3})
        assert numbers(both, {0, 1}, {0: waiting, 1: elsewhere}) == [1]
    # Nothing is known about a rank that does not respond.
    assert numbers(both, {0, 1}, {0: waiting}) == [0, 1]
    assert numbers(both, {0, 1}, {0: FlightRecord([], {}), 1: waiting}) == [0]


def _recorded(*names: str, sizes: str = "Float [4]") -> FlightRecord:
    """Return the record of a rank that has called these collectives, and waits in the last."""
    calls = [CollectiveCall("dp", 5 + place, name, sizes) for place, name in enumerate(names)]
    return FlightRecord(calls[-1:], {"dp gloo": 4 + len(names)}, calls)


def test_a_rank_that_calls_other_collectives_than_most_is_the_culprit() -> None:
    ranks = [seen(number, Phase.COMPUTE) for number in range(4)]
    usual = _recorded("gloo:all_reduce", "gloo:all_gather", "gloo:broadcast")
    records = dict.fromkeys(range(4), usual)
    late = set(range(4))
    assert find_mismatch(records) is None
    # All wait in the same collective: nothing distinguishes them.
    assert hang_cause(ranks, late, records) is None
    # It has skipped a collective, and is behind, too.
    records[2] = _recorded("gloo:all_gather", "gloo:broadcast")
    found = find_mismatch(records)
    assert found is not None
    assert (found.ranks, found.cause) == ((2,), Cause.COLLECTIVE_MISMATCH)
    assert numbers(ranks, late, records) == [2]
    assert hang_cause(ranks, late, records) is Cause.COLLECTIVE_MISMATCH
    assert "calls gloo:all_gather number 5" in hang_reason(ranks, late, records, 20)
    assert found.expected.name == "gloo:all_reduce"
    records[2], records[0] = usual, records[2]
    found = find_mismatch(records)
    assert found is not None and found.ranks == (0,) and found.expected.name == "gloo:all_reduce"
    records[2], records[0] = records[0], usual
    # Of two ranks that differ, neither is known to be wrong.
    assert find_mismatch({0: usual, 2: records[2]}) is None
    assert find_mismatch({0: usual, 1: usual, 2: records[2], 3: records[2]}) is None


def test_ranks_that_exit_during_the_diagnosis_have_no_reason() -> None:
    assert hang_reason([], {0}, {}, 20) == "the ranks without progress have exited"
    records = {rank: _recorded("gloo:all_reduce") for rank in range(3)}
    records[1] = _recorded("gloo:broadcast")
    assert hang_reason([], {0}, records, 20) == "the ranks without progress have exited"


def test_a_rank_with_another_shape_is_the_culprit() -> None:
    records = {rank: _recorded("gloo:all_reduce") for rank in range(4)}
    records[1] = _recorded("gloo:all_reduce", sizes="Float [5]")
    found = find_mismatch(records)
    assert found is not None and (found.ranks, found.cause) == ((1,), Cause.SHAPE_MISMATCH)
    # Ranks exchange different amounts.
    records = {rank: _recorded("gloo:all_to_all", sizes=f"Float [{rank}]") for rank in range(4)}
    assert find_mismatch(records) is None


@pytest.mark.parametrize("waits", [{2}, {0, 1, 3}])
def test_a_rank_that_takes_another_branch_is_the_culprit(waits: set[int]) -> None:
    """Some ranks wait in a collective after a step, and the others compute the next one: rank 2 has
    called it alone, or has not called it."""
    ranks = [seen(n, Phase.BETWEEN if n in waits else Phase.COMPUTE) for n in range(4)]
    before, after = FlightRecord([], {"dp gloo": 6}), FlightRecord([call(7)], {"dp gloo": 7})
    records = {number: after if number in waits else before for number in range(4)}
    assert list(stray_ranks(ranks, records)) == [2]
    assert numbers(ranks, {0, 1, 2, 3}, records) == [2]
    assert hang_cause(ranks, {0, 1, 2, 3}, records) is Cause.COLLECTIVE_MISMATCH
    assert "another branch" in hang_reason(ranks, {0, 1, 2, 3}, records, 20)
    # Ranks that have not come as far may still call it: they hang.
    ranks = [seen(n, Phase.COMMUNICATION if n in waits else Phase.COMPUTE) for n in range(4)]
    assert stray_ranks(ranks, records) == {}


def test_the_cause_of_a_hang() -> None:
    ranks = [seen(number, Phase.COMPUTE) for number in range(3)]
    waits, behind = _recorded("gloo:all_reduce"), FlightRecord([], {"dp gloo": 4})
    assert hang_cause(ranks, {0, 1, 2}, {0: waits, 1: behind, 2: waits}) is Cause.HANG
    assert hang_cause([*ranks, seen(3, Phase.COMPUTE, state="T")], {0}, {}) is Cause.STOPPED
    assert hang_cause(ranks[:1], {0}, {}) is Cause.HANG


def test_the_reason_names_rank_and_collective() -> None:
    ranks = [seen(0, Phase.COMPUTE), seen(1, Phase.COMPUTE, state="T")]
    message = hang_reason(ranks, {0, 1}, {0: FlightRecord([call(7)], {"dp gloo": 7})}, 12.34)
    assert message == (
        "rank 1: no progress for 12.3 s in compute after step 57 (stopped); "
        "rank 0 waits in gloo:all_reduce number 7 of group dp (Float [4])"
    )


def test_heartbeats_are_read_as_written() -> None:
    board = HeartbeatMemory(3)
    writer = HeartbeatWriter(board.path, 1, LIMITS, 10.0)
    assert board.read(1) is None
    for step, phase in enumerate(Phase):
        before_s = time.monotonic()
        writer.entered(phase, step)
        heartbeat = board.read(1)
        assert heartbeat is not None
        assert (heartbeat.phase, heartbeat.step, heartbeat.hang_timeout_s) == (phase, step, 10.0)
        assert heartbeat.pid == os.getpid()
        assert heartbeat.limit_s == LIMITS.get(phase, math.inf)
        assert before_s <= heartbeat.since_s <= time.monotonic()
    assert board.read(0) is None and board.read(2) is None
    writer.erase()
    assert board.read(1) is None
    with pytest.raises(OSError, match="no slot for rank 3"):
        HeartbeatWriter(board.path, 3, LIMITS, 10.0)
    board.close()


def test_a_damaged_heartbeat_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "pulses"
    path.write_bytes(bytes(64))
    HeartbeatWriter(path, 0, LIMITS, 10.0).entered(Phase.COMPUTE, 3)
    full = path.read_bytes()
    assert parse(full) is not None
    assert all(parse(full[:length]) is None for length in range(48))
    for place in range(48):
        changed = bytearray(full)
        changed[place] ^= 1 << place % 8
        assert parse(bytes(changed)) is None, place
    assert parse(random.Random(0).randbytes(64)) is None
    assert parse(full[:48]) == parse(full)


@pytest.mark.parametrize(
    ("changes", "is_valid"),
    [
        ({}, True),
        ({"step": 0}, True),
        ({"step": -1}, False),
        ({"phase": len(Phase) - 1}, True),
        ({"phase": len(Phase)}, False),
        ({"magic": 1}, False),
        ({"limit_s": 0.0}, False),
        ({"hang_timeout_s": math.inf}, False),
    ],
)
def test_values_that_no_rank_writes_are_ignored(
    changes: dict[str, Any], is_valid: bool, tmp_path: Path
) -> None:
    """Although their checksum is right."""
    path = tmp_path / "heartbeats"
    path.write_bytes(bytes(64))
    HeartbeatWriter(path, 0, LIMITS, 10.0).entered(Phase.COMPUTE, 3)
    names = ("magic", "pid", "phase", "step", "since_s", "limit_s", "hang_timeout_s")
    values = dict(zip(names, struct.unpack_from("<IIIqddd", path.read_bytes()), strict=True))
    content = struct.pack("<IIIqddd", *{**values, **changes}.values())
    slot = content + zlib.crc32(content).to_bytes(4, "little")
    assert (parse(slot) is not None) == is_valid


def test_an_empty_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("empty", "none"):
        with pytest.raises(OSError):
            HeartbeatWriter(tmp_path / name, 0, LIMITS, 10.0)


def entry(number: int, *, retired: bool) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": False,
        "process_group": ["1", "mesh_dp"],
        "profiling_name": "gloo:all_reduce",
        "retired": retired,
    }


def test_a_flight_recorder_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"entries": [entry(1, retired=True), entry(2, retired=False)]}))
    flight = read_flight_record(path)
    assert flight is not None
    assert [one.description for one in flight.pending] == [
        "gloo:all_reduce number 2 of group mesh_dp (1) (Float [4])"
    ]
    assert flight.newest == {"mesh_dp (1) gloo": 2}


def test_calls_of_gloo_and_nccl_in_one_group_are_counted_separately(tmp_path: Path) -> None:
    """gloo has counted further than NCCL: rank 1 lacks the call of NCCL in which rank 0 waits."""
    records = {}
    nccl = {**entry(7, retired=False), "profiling_name": "nccl:all_reduce"}
    for rank, entries in enumerate([[entry(90, retired=True), nccl], [entry(90, retired=True)]]):
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps({"entries": [*entries, {**nccl, "collective_seq_id": 6,
                                                           "retired": True}]}))  # fmt: skip
        found = read_flight_record(path)
        assert found is not None
        records[rank] = found
    assert records[0].newest == {"mesh_dp (1) gloo": 90, "mesh_dp (1) nccl": 7}
    assert [call.name for call in records[0].pending] == ["nccl:all_reduce"]
    both = [seen(rank, Phase.COMMUNICATION, since_s=0) for rank in range(2)]
    assert numbers(both, {0, 1}, records) == [1]


def test_a_malformed_flight_recorder_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_flight_record(path) is None
    full = json.dumps({"entries": [entry(1, retired=True)]})
    odd: list[object] = [[], {"entries": 3}, {"entries": [{}]}, {"entries": ["x"]}, None]
    odd += [{"entries": [{**entry(1, retired=True), key: None}]} for key in entry(1, retired=True)
            if key not in ("is_p2p", "profiling_name", "retired")]  # fmt: skip
    for text in [full[:-5], "\xff", *map(json.dumps, odd)]:
        path.write_text(text)
        assert read_flight_record(path) is None, text
    # Unusual text is escaped, because it is shown to people.
    strange = {**entry(1, retired=False), "profiling_name": "a\nb\x1b" + "c" * 1000}
    path.write_text(json.dumps({"entries": [strange]}))
    flight = read_flight_record(path)
    assert flight is not None
    assert flight.pending[0].name == "ab" + "c" * 75 + "..."
    generator = random.Random(0)
    for _ in range(200):
        path.write_bytes(generator.randbytes(40))
        assert read_flight_record(path) is None
