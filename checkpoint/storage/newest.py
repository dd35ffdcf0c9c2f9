"""The newest few of what was opened, by path. Layer: imports nothing of the project."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Newest(Generic[_T]):
    """Keeps the `most` files that were asked for last, for any thread. One that falls out is let go
    of, so that it closes once nobody uses it any more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _T] = OrderedDict()

    def get(self, path: str, opens: Callable[[], _T]) -> _T:
        """What is kept of `path`; what `opens` returns where there is nothing."""
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        # Not under the lock: on a shared filesystem it may take its time.
        made = opens()
        with self._lock:
            # Another thread may have been faster.
            found = self._kept.setdefault(path, made)
            self._kept.move_to_end(path)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return found

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._kept.clear()
