"""Questions of a loader's workers, which compare the first samples of a stream with those of other workers."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from cnnstrategies.strategies.streams.recognition import StreamDivision


class WorkerQuestions:
    """Pipes by which the workers of a loader send descriptions of their first samples, and get the stream's division.

    Args:
        context: Context of multiprocessing in which the workers are started.
        workers: Number of workers.
    """

    def __init__(self, context: Any, workers: int) -> None:
        pairs = [context.Pipe() for _ in range(workers)]
        self._answering: list[Connection] = [pair[0] for pair in pairs]
        self._asking: list[Connection] = [pair[1] for pair in pairs]

    def ask(self, worker: int, row: list[int]) -> StreamDivision:
        """Send the description of a worker's first samples, and wait for the answer. A worker calls this."""
        self._asking[worker].send(row)
        return StreamDivision(*self._asking[worker].recv())

    def answer(self, decide: Callable[[Sequence[list[int]]], StreamDivision]) -> StreamDivision:
        """Wait for all workers' descriptions, answer them, and return the answer.

        The process that has started the workers calls this. If a worker dies, torch's handler of SIGCHLD raises an
        error while this method waits.

        Args:
            decide: Function that takes the descriptions of all workers and returns the stream's division.
        """
        answer = StreamDivision(by_process=True, by_worker=True)
        try:
            answer = decide([connection.recv() for connection in self._answering])
        finally:  # A worker that waits for an answer would not end.
            for connection in self._answering:
                connection.send(tuple(answer))
            for connection in self._answering + self._asking:
                connection.close()
        return answer
