"""Several coordinators at once: one of them decides."""

import pytest

from tests.unit.fault_tolerance.supervision.coordinator.several_coordinators import World
from torchtitan_lite.fault_tolerance.supervision.coordinator.coordinator import Coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.leadership import Leadership
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import Report, Vote, VoterList
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    ACKNOWLEDGED_S,
    CALL_S,
    LEASE_S,
    MAX_REPORT_S,
    REPORT_S,
    report_interval_s,
)

_SHAPES = ((2, 1, 1), (2, 1, 2), (3, 2, 1), (4, 2, 2), (12, 3, 3))
"""Numbers of machines that train, of spare ones and of replicas."""


def _world(seed: int, *, is_sole: bool, has_fence: bool) -> World:
    machines, spares, replicas = _SHAPES[seed % len(_SHAPES)]
    return World(
        seed,
        num_machines=machines,
        num_spares=spares,
        num_replicas=replicas,
        is_sole=is_sole,
        has_fence=has_fence,
    )


def _disturb(world: World) -> None:
    """Let something happen that may happen at any time."""
    random, servers = world.random, world.servers
    server = random.choice([*servers]) if servers else -1
    match random.randrange(12):
        case 0 if len(servers) < 3:
            world.start_server()
        case 1 if servers:
            del servers[server]
        case 2 if servers:
            servers[server].is_paused = True
        case 3:
            for paused in [s for s in servers.values() if s.is_paused]:
                world.resume(paused)
        case 4 if servers:
            names = random.sample([*world.machines], random.randrange(len(world.machines)) + 1)
            world.cut |= {(name, server) for name in names}
        case 5:
            world.cut = set()
        case 6:
            world.max_delay_s = random.choice([0.1, 0.5, 1.5, 3.0])
        case 7:
            del world.machines[random.choice([*world.machines])]
            world.start_machine()
        case 8:
            for machine in world.machines.values():
                machine.server = random.choice([*servers]) if servers else -1
        case 9 | 10:
            # It is killed, a firewall cuts it off, or a connection is reset.
            name = random.choice([*world.machines])
            world.disconnect(name)
            match random.randrange(3):
                case 0:
                    del world.machines[name]
                    world.start_machine()
                case 1:
                    world.cut |= {(name, number) for number in servers}
                case _:
                    pass
        case 11:
            paused = world.machines[random.choice([*world.machines])]
            paused.next_report_s = world.now_s + random.uniform(1.0, 8.0)


def _disturbed(seed: int, *, is_sole: bool = False, has_fence: bool = True) -> World:
    world = _world(seed, is_sole=is_sole, has_fence=has_fence)
    world.run(30, world.check)
    for _ in range(40):
        _disturb(world)
        world.run(world.random.choice([0.5, 2.0, 6.0, 15.0]), world.check)
    return world


@pytest.mark.parametrize("seed", range(20))
def test_no_two_generations_write_at_once_whatever_happens(seed: int) -> None:
    _check(seed)


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(20, 1020, 50))
def test_no_two_generations_write_at_once_in_many_schedules(first: int) -> None:
    for seed in range(first, first + 50):
        _check(seed)


def _check(seed: int) -> None:
    world = _disturbed(seed)
    world.cut, world.max_delay_s = set(), 0.1
    world.servers.clear()
    # The other coordinators are gone, and too many voters may be so, too.
    world.start_server(is_sole=True)
    world.run(120, world.check)
    machines, _, replicas = _SHAPES[seed % len(_SHAPES)]
    assert [len(names) for names in world.places().values()] == [machines // replicas] * replicas


def test_without_acknowledgments_two_coordinators_give_a_place_to_two_machines() -> None:
    """The schedules of the test above can show it."""
    assert _num_failing(is_sole=True) > 5


def test_without_a_fence_of_outputs_two_generations_write_at_once() -> None:
    """The schedules of the test above can show that, too."""
    assert _num_failing(has_fence=False) > 5


def _num_failing(**world: bool) -> int:
    """Return in how many schedules two generations write at once."""
    failed = 0
    for seed in range(40):
        try:
            _disturbed(seed, **world)
        except AssertionError:
            failed += 1
    return failed


def _started(num_machines: int, num_spares: int = 0, *, until_s: float = 30) -> World:
    world = World(
        0, num_machines=num_machines, num_spares=num_spares, num_replicas=1, is_sole=False
    )
    world.run(until_s, world.check)
    assert len(world.places()) == 1
    return world


def _lose(world: World, *names: str) -> None:
    for name in names:
        del world.machines[name]


@pytest.mark.parametrize("outage_s", [0.0, 2.0])
def test_training_continues_at_a_restarted_coordinator(outage_s: float) -> None:
    world = _started(3)
    before = world.places()
    world.servers.clear()
    world.run(outage_s, world.check)
    world.start_server()
    world.run(20, lambda: assert_equal(world.places(), before))


def assert_equal(value: object, expected: object) -> None:
    assert value == expected


def test_the_newest_of_two_coordinators_serves_all_machines_that_reach_it() -> None:
    world = _started(3)
    before, (old,) = world.places(), world.servers
    world.run(1, world.check)
    world.start_server()
    new = max(world.servers)
    for name in sorted(world.machines)[:2]:
        world.machines[name].server = new
    world.run(20, lambda: assert_equal(world.places(), before))
    assert {machine.server for machine in world.machines.values()} == {new} != {old}


def test_a_second_coordinator_with_a_minority_decides_nothing() -> None:
    world = _started(3, 1)
    (old,) = world.servers
    world.run(1, world.check)
    world.start_server()
    new = max(world.servers)
    lost, *others = sorted(world.machines)
    world.machines[lost].server = new
    world.cut = {(lost, old), *((name, new) for name in others)}
    world.run(40, world.check)
    # The first one has given its place away.
    ((_, names),) = world.places().items()
    assert sorted(names) == others
    assert not world.servers[new].coordinator.states


def test_half_of_the_voters_are_enough_for_the_coordinator_that_led() -> None:
    world = _started(2)
    _lose(world, "m1")
    world.start_machine()
    world.run(20, world.check)
    assert [len(names) for names in world.places().values()] == [2]


@pytest.mark.parametrize("is_sole", [False, True])
def test_half_of_the_voters_do_not_elect_a_coordinator(is_sole: bool) -> None:
    world = _started(2)
    _lose(world, "m1")
    world.servers.clear()
    world.start_server(is_sole=is_sole)
    world.start_machine()
    world.run(40, world.check)
    assert len(world.places()) == is_sole


def test_voters_that_are_lost_one_after_the_other_are_replaced() -> None:
    world = _started(2, 3)
    for name in ("m1", "m2", "m3"):
        _lose(world, name)
        world.run(30, world.check)
        assert [len(names) for names in world.places().values()] == [2]
    # A successor knows the last list only.
    before = world.places()
    world.servers.clear()
    world.start_server()
    world.run(20, lambda: assert_equal(world.places(), before))


@pytest.mark.parametrize(("silent_s", "is_served"), [(50.0, False), (65.0, True)])
def test_a_run_whose_voters_are_all_silent_for_long_is_over(
    silent_s: float, is_served: bool
) -> None:
    world = _started(2)
    world.machines.clear()
    world.run(silent_s)
    for _ in range(2):
        world.start_machine()
    world.run(2)
    assert [machine.leased_s > 0 for machine in world.machines.values()] == [is_served] * 2


def test_a_vote_without_a_lease_raises_the_term() -> None:
    leadership = Leadership(5)
    leadership.record("a", Vote(term=5), 0.0)
    leadership.record("b", Vote(term=1 << 30, has_lease=True), 0.0)
    assert leadership.term == 5
    leadership.record("b", Vote(term=1 << 30), 0.0)
    assert leadership.term > 1 << 30 and leadership.term % (1 << 20) == 5
    assert not leadership.is_elected


def test_a_claim_names_what_is_missing() -> None:
    leadership = Leadership(5)
    voters = VoterList((3, 0), ("a", "b", "c", "d"), ("a",)).to_text()
    leadership.record("b", Vote(term=5, answered_s=9.0, voters=voters), 9.0)
    assert leadership.claim(10.0).problem == (
        "1 of the 4 machines that elect the coordinator have acknowledged this one, and it needs "
        "3: the others are lost, or follow another one"
    )


@pytest.mark.parametrize("text", ["1", "1.0:|a", "a.0:b|", "01.0:b|", "1.0:b", "-1:a|"])
def test_a_malformed_list_of_voters_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a list of voters|invalid literal"):
        VoterList.parse(text)


def test_machines_of_a_large_run_report_less_often() -> None:
    assert report_interval_s(100) == REPORT_S and report_interval_s(2000) == 1.0
    # A report may fail within a lease, and what a voter acknowledges twice must not be too old.
    assert report_interval_s(10**6) + CALL_S < LEASE_S and 3 * REPORT_S < ACKNOWLEDGED_S


def test_voters_of_a_large_run_report_as_often_as_ever() -> None:
    coordinator = Coordinator(5 << 20, is_sole=True)
    intervals = []
    for name in ("a", "b"):
        report = Report(
            machine=name,
            sequence=1,
            name=name,
            address="10.0.0.1",
            run_id="run",
            num_machines=4000,
            num_ranks=8,
            mesh="8",
            fingerprint="2-abc",
        )
        intervals.append(coordinator.report(report, Vote(), 10.0)[0].report_s)
    # The first one is the only voter yet.
    assert intervals == [REPORT_S, MAX_REPORT_S]
