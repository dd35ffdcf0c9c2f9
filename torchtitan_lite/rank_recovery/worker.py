"""The process of a rank, or of a spare: it imports what training needs and waits, parked, until the
agent gives it a rank.

When another rank is lost, the agent orders to abort: a thread interrupts the main thread, and
aborts the process groups, so that the collective in which the main thread waits ends.
The training unwinds like any failed one, which leaves its snapshots in shared memory, and the
process is parked again. Layer: above axis_groups and lease.
"""

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any

from torchtitan_lite.axis_groups import abort_all_groups, forget_groups
from torchtitan_lite.rank_recovery.channel import Channel
from torchtitan_lite.rank_recovery.lease import Lease

CHANNEL = "TORCHTITAN_LITE_RANK_CHANNEL"
"""Environment variable: the descriptor of this process' channel to the agent."""
_INTERRUPT = signal.SIGRTMIN + 2
_INTERRUPT_EVERY_S = 0.2
"""An interrupt may be lost in a callback of torch, which swallows exceptions."""


class TrainingAborted(BaseException):
    """The agent has aborted the training of this process. Not an Exception, so that no handler of
    errors mistakes it for one."""


class Recovery:
    """What the training of one attempt tells the agent, and where the agent may interrupt it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._is_interruptible = False
        self._has_progress = False

    @contextmanager
    def report_failure(self) -> Iterator[None]:
        """Report an exception of the block to the agent. Enter it within the process groups: peers
        fail once these are destroyed, and must not report first."""
        self._has_progress = False
        try:
            yield
        except BaseException as error:
            last = traceback.format_exception_only(error)[-1].strip()
            self._channel.send(failed=last)
            raise

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise TrainingAborted in the block when the agent aborts the training."""
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def step_committed(self) -> None:
        """Report the first committed step."""
        if not self._has_progress:
            self._has_progress = True
            self._channel.send(progress=True)

    @property
    def is_interruptible(self) -> bool:
        """Whether the main thread is in `interruptible`."""
        return self._is_interruptible

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        if self._is_interruptible:
            self._is_interruptible = False
            raise TrainingAborted


def serve(train: Callable[[Recovery], int], warm_up: Callable[[], None]) -> int:
    """Train whenever the agent gives this process a rank, until it orders to exit. Returns the exit
    status."""
    end = socket.socket(fileno=int(os.environ.pop(CHANNEL)))
    end.set_inheritable(False)
    channel = Channel(end)
    recovery = Recovery(channel)
    signal.signal(_INTERRUPT, recovery.on_interrupt)
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    warm_up()
    lease = Lease()
    threading.Thread(target=_receive, args=(channel, recovery, lease, orders), daemon=True).start()
    channel.send(parked=True)
    failure = ""
    while (order := orders.get()) is not None:
        if "exit" in order:
            if order["exit"]:
                print(failure, end="", flush=True)
            return int(order["exit"])
        os.environ.update(order["start"])
        lease.is_training = True
        try:
            status = train(recovery)
        except (Exception, TrainingAborted):
            failure, outcome = traceback.format_exc(), {"parked": True}
        else:
            outcome = {"ended": status}
        # The frames of the traceback, which held the model and its process groups, are gone. After
        # a training that has ended, another attempt may follow, too.
        forget_groups()
        lease.is_training = False
        channel.send(**outcome)
    return 1


def _receive(
    channel: Channel,
    recovery: Recovery,
    lease: Lease,
    orders: SimpleQueue[dict[str, Any] | None],
) -> None:
    """Pass orders to the main thread, and carry out those to abort and to renew the lease."""
    while not channel.has_ended:
        for order in channel.receive(wait=True):
            if "abort" in order:
                _abort(recovery)
            elif "lease" in order:
                lease.renew(float(order["lease"]))
            else:
                orders.put(order)
    orders.put(None)


def _abort(recovery: Recovery) -> None:
    # First of all, so that the main thread does not go on with the result of an aborted collective:
    # on a GPU the wait for it returns without an error.
    _interrupt(recovery)
    abort_all_groups()
    pause = threading.Event()
    while recovery.is_interruptible:
        pause.wait(_INTERRUPT_EVERY_S)
        _interrupt(recovery)


def _interrupt(recovery: Recovery) -> None:
    main = threading.main_thread().ident
    if recovery.is_interruptible and main is not None:
        signal.pthread_kill(main, _INTERRUPT)
