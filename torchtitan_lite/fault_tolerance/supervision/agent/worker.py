"""The process of a rank, or of a spare: it imports what training needs and waits on standby until
the agent gives it a rank.

When another rank is lost, the agent orders to abort: a thread interrupts the main thread, and
aborts the process groups, so that the collective in which the main thread waits ends. The training
unwinds like any failed one, which leaves its snapshots in shared memory, and the process returns to
standby.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from torchtitan_lite.core.errors import UserError, is_transient
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import (
    OUTPUTS_AFTER,
    abort_waits,
    allow_outputs,
    begin_generation,
)
from torchtitan_lite.core.preemption import TrainingAborted
from torchtitan_lite.core.rank.supervised import (
    RANK_CHANNEL,
    STORE_LISTENER,
    print_into_rank_log,
)
from torchtitan_lite.distributed.axis_groups import abort_all_groups, forget_groups
from torchtitan_lite.fault_tolerance.supervision.agent.channel import AgentChannel
from torchtitan_lite.fault_tolerance.supervision.agent.lease import Lease

_INTERRUPT = signal.SIGRTMIN + 2
_INTERRUPT_EVERY_S = 0.2
_IDLE_S = 1.0
"""Time without an order after which a new process uses its idle time."""
_RAISE_AGAIN_S = 1.0
"""Time in which the main thread leaves the training once the exception is raised. It may be lost in
a callback of torch, which swallows exceptions, and is raised again then."""


class RecoveryHooks:
    """Hooks of the training of one generation: reports to the agent, and interruption by it."""

    def __init__(self, channel: AgentChannel) -> None:
        self._channel = channel
        self._is_interruptible = False
        self._raise_at_s = 0.0
        self._has_progress = False
        self._has_reported = False
        self._is_leaving = threading.Event()
        self.end_reason = ""
        """Error with which the training ends, which has been logged."""
        self.may_restart = False
        """Whether a replica may train on after that error if it is started again."""
        self.was_stopped = False
        """Whether the training ended before its last step, because a rank was asked to stop."""

    @contextmanager
    def report_failure(self) -> Iterator[None]:
        """Report an exception of the block to the agent. Enter it within the process groups: peers
        fail once these are destroyed, and must not report first."""
        self._has_progress = False
        self._is_leaving.clear()
        try:
            yield
        except TrainingAborted:
            raise
        except BaseException as error:
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Report an exception to the agent, unless one of this training was reported before."""
        if not self._has_reported:
            self._has_reported = True
            last = traceback.format_exception_only(error)[-1].strip()
            ends = isinstance(error, UserError)
            self._channel.send(failed=last, may_pass=is_transient(error), ends=ends)

    def begin(self) -> None:
        """Forget what an earlier training of this process has reported."""
        self._has_reported = self.was_stopped = self.may_restart = False
        self.end_reason = ""

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise TrainingAborted in the block when the agent aborts the training."""
        self._raise_at_s = 0.0
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
    def is_leaving(self) -> bool:
        """Whether the agent has ordered all ranks to leave the training after a step."""
        return self._is_leaving.is_set()

    def order_to_leave(self) -> None:
        """Let this rank request that all stop after the same step. Called by another thread."""
        self._is_leaving.set()

    @property
    def is_interruptible(self) -> bool:
        """Whether the main thread is in `interruptible`."""
        return self._is_interruptible

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread."""
        if self._is_interruptible and time.monotonic() >= self._raise_at_s:
            self._raise_at_s = time.monotonic() + _RAISE_AGAIN_S
            raise TrainingAborted


def serve(
    train: Callable[[RecoveryHooks, list[str]], int],
    warm_up: Callable[[], None],
    use_idle_time: Callable[[], None],
) -> int:
    """Train whenever the agent gives this process a rank, until it orders to exit. `train` receives
    the arguments that the agent adds. `warm_up` imports what every training needs, and
    `use_idle_time` what a process should import only if it waits for its first one. Returns the
    exit status."""
    end = socket.socket(fileno=int(os.environ.pop(RANK_CHANNEL)))
    end.set_inheritable(False)
    channel = AgentChannel(end)
    recovery = RecoveryHooks(channel)
    signal.signal(_INTERRUPT, recovery.on_interrupt)
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    try:
        warm_up()
    except Exception as error:
        recovery.report(error)
        raise
    lease = Lease()
    threading.Thread(target=_receive, args=(channel, recovery, lease, orders), daemon=True).start()
    channel.send(standby=True)
    failure = ""
    for order in _orders_of(orders, use_idle_time):
        if "exit" in order:
            if order["exit"]:
                print(failure, end="", flush=True)
            return int(order["exit"])
        _take_listener(channel if order["has_listener"] else None)
        os.environ.update(order["start"])
        print_into_rank_log()
        lease.is_training, lease.has_finished = True, False
        recovery.begin()
        try:
            status = train(recovery, order["arguments"])
        except (Exception, TrainingAborted) as error:
            if not isinstance(error, TrainingAborted):
                # The start failed, before the process groups exist.
                recovery.report(error)
            failure, outcome = traceback.format_exc(), {"standby": True}
        else:
            reason, stopped = recovery.end_reason, recovery.was_stopped
            restarts = recovery.may_restart
            outcome = {
                "ended": status,
                "reason": reason,
                "stopped": stopped,
                "may_restart": restarts,
            }
        # The frames of the traceback, which held the model and its process groups, are gone. After
        # a training that has ended, another generation may follow, too.
        forget_groups()
        lease.has_finished = "ended" in outcome
        lease.is_training = False
        channel.send(**outcome)
    return 1


def _orders_of(
    orders: SimpleQueue[dict[str, Any] | None], use_idle_time: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield the orders until the channel is closed. Calls `use_idle_time` if the first one does not
    arrive soon."""
    try:
        order = orders.get(timeout=_IDLE_S)
    except Empty:
        try:
            use_idle_time()
        except Exception as error:
            # Training meets it again, if it matters.
            logger.warning("A process on standby could not prepare: %r", error)
        order = orders.get()
    while order is not None:
        yield order
        order = orders.get()


def _take_listener(channel: AgentChannel | None) -> None:
    """Let rank 0 inherit the socket of the generation's store, which has arrived at `channel`; the
    others get None. Closes that of an earlier generation that ended before its store existed."""
    unused = os.environ.pop(STORE_LISTENER, None)
    if unused is not None:
        os.close(int(unused))
    if channel is not None:
        os.environ[STORE_LISTENER] = str(channel.take_descriptor())


def _receive(
    channel: AgentChannel,
    recovery: RecoveryHooks,
    lease: Lease,
    orders: SimpleQueue[dict[str, Any] | None],
) -> None:
    """Pass orders to the main thread, and carry out those to abort and to renew the lease."""
    while not channel.has_ended:
        for order in channel.receive(wait=True):
            if "abort" in order:
                _abort(recovery)
            elif "leave" in order:
                recovery.order_to_leave()
            elif "lease" in order:
                lease.renew(float(order["lease"]))
            elif "outputs" in order:
                allow_outputs()
            else:
                if "start" in order:
                    # Here, because outputs may be allowed before the main thread has the order.
                    begin_generation(order["start"].pop(OUTPUTS_AFTER, "0"))
                orders.put(order)
    orders.put(None)


def _abort(recovery: RecoveryHooks) -> None:
    # Interrupt first, so that the main thread does not continue with the result of an aborted
    # collective: on a GPU the wait for it returns without an error.
    _interrupt(recovery)
    abort_waits()
    abort_all_groups()
    pause = threading.Event()
    while recovery.is_interruptible:
        pause.wait(_INTERRUPT_EVERY_S)
        _interrupt(recovery)


def _interrupt(recovery: RecoveryHooks) -> None:
    main = threading.main_thread().ident
    if recovery.is_interruptible and main is not None:
        signal.pthread_kill(main, _INTERRUPT)
