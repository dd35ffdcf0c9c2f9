"""Sleeping until a number in shared memory changes: Linux's futex, for processes of one machine.

A process that spins takes the processor from those that it waits for. See futex(2); the standard
library has no name for it. Layer: imports nothing of the project.
"""

import ctypes

_SYS_FUTEX = 202
"""On x86-64."""
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, 100_000_000)
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]


def wait(address: int, known: int) -> None:
    """Sleep while the 32 bits at `address` are `known`, 0.1 s at most: who waits for long looks
    at the time in between."""
    _syscall(_SYS_FUTEX, address, _WAIT, known & 0xFFFFFFFF, ctypes.byref(_NAP), None, 0)


def wake(address: int) -> None:
    """Wake all that sleep on `address`, after what is there was changed."""
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)
