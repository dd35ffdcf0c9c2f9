"""Messages arrive whole and in order, and the end of the other side is noticed."""

import socket

from torchtitan_lite.rank_recovery.channel import Channel


def test_messages_arrive_in_order_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    channel, other = Channel(ours), Channel(theirs)
    assert channel.receive(wait=False) == []
    other.send(parked=True)
    other.send(failed="x" * 100_000)
    assert channel.receive(wait=True) == [{"parked": True}]
    assert channel.receive(wait=True) == [{"failed": "x" * 100_000}]
    theirs.sendall(b'{"ended"')
    assert channel.receive(wait=False) == [] and not channel.has_ended
    theirs.sendall(b": 3}\n")
    other.close()
    assert channel.receive(wait=True) == [{"ended": 3}]
    assert channel.receive(wait=True) == [] and channel.has_ended
    channel.send(exit=0)
    channel.close()
