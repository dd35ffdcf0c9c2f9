"""Messages arrive whole and in order, and the end of the other side is noticed."""

import socket

from torchtitan_lite.fault_tolerance.supervision.agent.channel import AgentChannel


def test_an_offer_to_an_end_that_does_not_read_is_dropped_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, other = AgentChannel(ours), AgentChannel(theirs)
        num_accepted = 0
        # This blocks forever if the offer waits.
        while channel.offer(lease=num_accepted, text="x" * 40_000):
            num_accepted += 1
        assert num_accepted and not channel.offer(lease=-1)
        received = []
        while len(received) < num_accepted:
            received += other.receive(wait=True)
            channel.offer()
        expected = [*range(num_accepted)]
        whole = [one for one in received if one.get("text") == "x" * 40_000]
        assert [one["lease"] for one in whole][:num_accepted] == expected
        assert {"lease": -1} not in received
        channel.send(abort=True)
        while {"abort": True} not in received:
            received += other.receive(wait=True)


def test_messages_arrive_in_order_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    channel, other = AgentChannel(ours), AgentChannel(theirs)
    assert channel.receive(wait=False) == []
    other.send(standby=True)
    other.send(failed="x" * 100_000)
    assert channel.receive(wait=True) == [{"standby": True}]
    assert channel.receive(wait=True) == [{"failed": "x" * 100_000}]
    theirs.sendall(b'{"ended"')
    assert channel.receive(wait=False) == [] and not channel.has_ended
    theirs.sendall(b": 3}\n")
    other.close()
    assert channel.receive(wait=True) == [{"ended": 3}]
    assert channel.receive(wait=True) == [] and channel.has_ended
    channel.send(exit=0)
    channel.close()


def test_descriptors_arrive_with_their_message() -> None:
    ours, theirs = socket.socketpair()
    channel, other = AgentChannel(ours), AgentChannel(theirs)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other.send(lease=1.0)
        other.send(listener.fileno(), start={})
        received = channel.receive(wait=True) + channel.receive(wait=False)
        assert received == [{"lease": 1.0}, {"start": {}}]
        with socket.socket(fileno=channel.take_descriptor()) as copy:
            assert copy.getsockname() == listener.getsockname()
            assert not copy.get_inheritable()
    channel.close()
    other.close()
