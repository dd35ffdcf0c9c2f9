"""Which connection a stranger displaces."""

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.distributed.rpc.strangers import StrangerLimits, Strangers

LIMITS = StrangerLimits(in_all=4, per_address=2)


def test_a_stranger_displaces_the_idlest_of_its_address_or_of_all() -> None:
    strangers: Strangers[str] = Strangers(LIMITS)
    assert [strangers.add(name, name[0]) for name in ("a1", "a2", "b1")] == [None, None, None]
    strangers.touch("a1")
    assert strangers.add("a3", "a") == "a2"
    assert strangers.add("c1", "c") is None
    assert strangers.add("d1", "d") == "b1"
    strangers.discard("a1")
    strangers.discard("unknown")
    assert strangers.add("e1", "e") is None
    assert strangers.pop_idlest() == "a3"
    assert "c1" in strangers and "a3" not in strangers


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "touch", "trust"]))))
def test_strangers_are_bounded(events: list[tuple[str, str]]) -> None:
    strangers: Strangers[int] = Strangers(LIMITS)
    addresses: dict[int, str] = {}
    for number, (address, event) in enumerate(events):
        if event == "add":
            addresses[number] = address
            displaced = strangers.add(number, address)
            if displaced is not None:
                del addresses[displaced]
        elif event == "touch":
            strangers.touch(number // 2)
        else:
            strangers.discard(number // 2)
            addresses.pop(number // 2, None)
        assert {one for one in range(number + 1) if one in strangers} == addresses.keys()
        assert len(strangers) <= LIMITS.in_all
        for one in "abc":
            assert list(addresses.values()).count(one) <= LIMITS.per_address


def test_nothing_is_displaced_without_strangers() -> None:
    assert Strangers(LIMITS).pop_idlest() is None
