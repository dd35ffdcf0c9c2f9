"""Tokenization of a stream's documents, in this process or in worker processes.

Invariant: results have the order of the requests and do not depend on the number of workers, or on
workers that die.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.processes import die_with_parent
from torchtitan_lite.data.token_cache import tokenize
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

PendingTokens = Callable[[], list[np.ndarray]]
"""Returns the ids (uint32) of each document, once they are ready. To be called once, in the order
of the requests."""
_MAX_DEATHS = 3
"""Deaths of workers over one request."""


class DocumentTokenizer:
    """Tokenizes documents in the calling thread."""

    max_pending = 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def submit(self, texts: list[str]) -> PendingTokens:
        """Tokenize `texts` once the result is requested."""
        return lambda: tokenize(self._tokenizer, texts)

    def close(self) -> None:
        """Do nothing: there are no workers."""


class TokenizationWorkers:
    """Tokenizes documents in worker processes, which are started at the first request."""

    def __init__(self, tokenizer_folder: Path, num_workers: int) -> None:
        self._folder = tokenizer_folder
        self._workers: list[_Worker | None] = [None] * num_workers
        self.max_pending = num_workers
        """Maximum requests whose results are not taken: one per worker, so that neither end of a
        pipe blocks the other."""
        self._num_requests = 0

    def submit(self, texts: list[str]) -> PendingTokens:
        """Start to tokenize `texts`. Waiting for the result raises DataError if workers die again
        and again."""
        place = self._num_requests % len(self._workers)
        self._num_requests += 1
        self._send(place, texts)
        return lambda: self._result(place, texts)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            if worker is not None:
                worker.kill()
        self._workers = [None] * len(self._workers)

    def _send(self, place: int, texts: list[str]) -> None:
        worker = self._workers[place]
        if worker is None:
            worker = self._workers[place] = _Worker(self._folder)
        # One that has died is replaced when the result is requested.
        worker.send(texts)

    def _result(self, place: int, texts: list[str]) -> list[np.ndarray]:
        for _ in range(_MAX_DEATHS):
            worker = self._workers[place]
            assert worker is not None
            try:
                return worker.receive()
            except EOFError:
                logger.warning("A worker process for tokenization died: it is replaced.")
                worker.kill()
                self._workers[place] = None
                self._send(place, texts)
        raise DataError(
            f"worker processes for tokenization died {_MAX_DEATHS} times over the same documents, "
            f"with training.dataloader.num_workers = {len(self._workers)}. Check the memory of "
            "this machine, or set it to 0 to tokenize in the ranks."
        )


class _Worker:
    """A worker process, and the pipe to it."""

    def __init__(self, tokenizer_folder: Path) -> None:
        # A forked process would inherit the locks of this one's threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(there, os.getpid(), str(tokenizer_folder)), daemon=True
        )
        self._process.start()
        # The end of the process is the end of the pipe.
        there.close()

    def send(self, texts: list[str]) -> None:
        """Send a request, unless the process has died."""
        try:
            self._pipe.send(texts)
        except OSError:
            return

    def receive(self) -> list[np.ndarray]:
        """Return the result of the request. Raises EOFError if the process has died, and DataError
        if it failed."""
        try:
            tokens, error = self._pipe.recv()
        except OSError:
            raise EOFError from None
        if error:
            raise DataError(f"the tokenizer failed on a document: {error}")
        return tokens

    def kill(self) -> None:
        """Kill the process, which has no state, and wait for its end."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, parent: int, tokenizer_folder: str) -> None:
    """Answer requests until the parent dies."""
    die_with_parent()
    if os.getppid() != parent:
        return
    # Ctrl-C ends the ranks in order, and they their workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker is one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(tokenizer_folder)
    while True:
        texts = pipe.recv()
        try:
            answer = tokenize(tokenizer, texts), ""
        except Exception as error:
            answer = [], f"{type(error).__name__}: {error}"
        pipe.send(answer)
