"""Wires between the processes of a run. A wire may do any harm in `FAULTS` to the bytes that it carries."""

import asyncio
import contextlib
import random
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from functools import partial

FAULTS = ("nothing", "nothing", "byte", "byte", "drop", "half", "stall")
HERE, FAR = "127.0.0.1", "127.0.0.2"  # A process listens on HERE; its wire listens on the same port of FAR.
STALL = 20.0  # seconds
LOOK = 0.02  # Seconds between two looks at whether this thread gets to run.
NOTICED = 0.5  # A longer delay of a look, in seconds, means that the thread was starved.
LATEST = 0.3  # Longest delay of bytes, in seconds.


class Wires(threading.Thread):
    """Thread that carries bytes over wires.

    Args:
        seed: Seed of the faults.
        faults: Faults from which one is drawn for each connection.
        faulty: Number of connections of each wire that faults may hit. Later connections are sound, so that every run
            ends.
        lost: Fraction of the pieces of data that are lost, on any connection.

    Attributes:
        events: The faults that have happened, each with its time.
        starved: Seconds in which this thread did not get to run. The processes of the run did not either.
    """

    def __init__(self, seed: int, faults: tuple[str, ...] = FAULTS, faulty: int = 6, lost: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.events: list[tuple[str, float]] = []
        self.starved = 0.0
        self._chance = random.Random(seed)
        self._faults = faults
        self._faulty = faulty
        self._lost = lost
        self._listeners: dict[int, socket.socket] = {}
        self._counts: Counter[int] = Counter()
        self._over = False

    def lay(self, port: int) -> None:
        """Lay a wire to a port. Call this before the thread is started."""
        self._listeners[port] = socket.create_server((FAR, port))

    def run(self) -> None:
        """Carry bytes until :meth:`end` is called."""
        asyncio.run(self._run())

    def end(self) -> None:
        """Stop the thread."""
        self._over = True
        self.join()

    async def _run(self) -> None:
        for port, listener in self._listeners.items():
            await asyncio.start_server(partial(self._connect, port), sock=listener)
        while not self._over:
            began = time.monotonic()
            await asyncio.sleep(LOOK)
            self.starved += max(0.0, time.monotonic() - began - NOTICED)

    async def _connect(self, port: int, near_in: StreamReader, near_out: StreamWriter) -> None:
        """Carry the bytes of a connection; a fault may happen in one direction, at a byte whose position is drawn."""
        chance, self._counts[port] = self._chance, self._counts[port] + 1
        fault = chance.choice(self._faults) if self._counts[port] <= self._faulty else "nothing"
        delay = chance.choice([0.0, chance.uniform(0, LATEST)])
        hit, place = chance.randrange(2), int(10 ** chance.uniform(0, 4.2))
        ends = [near_out]
        with contextlib.suppress(OSError):
            far_in, far_out = await asyncio.open_connection(HERE, port)
            ends.append(far_out)
            ways = [(near_in, far_out), (far_in, near_out)]
            carried = [
                asyncio.create_task(self._carry(*way, delay, fault if side == hit else "nothing", place))
                for side, way in enumerate(ways)
            ]
            await asyncio.wait(carried, return_when=asyncio.FIRST_COMPLETED)
            for task in carried:
                task.cancel()
        for end in ends:
            with contextlib.suppress(OSError):
                # Closing alone would not end the connection: forked processes have the socket as well.
                end.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            end.close()

    async def _carry(self, source: StreamReader, target: StreamWriter, delay: float, fault: str, place: int) -> None:
        """Carry bytes in one direction, until the connection ends."""
        deaf = False
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if fault != "nothing" and place < len(data):
                    self.events.append((fault, time.monotonic()))
                    if fault == "byte":
                        data = data[:place] + bytes([data[place] ^ 1 << self._chance.randrange(8)]) + data[place + 1 :]
                    elif fault == "drop":
                        return
                    elif fault == "half":
                        deaf = True
                        target.write_eof()
                    else:
                        await asyncio.sleep(STALL)
                    fault = "nothing"
                place -= len(data)
                await asyncio.sleep(delay)
                if self._chance.random() < self._lost:
                    self.events.append(("lost", time.monotonic()))
                elif not deaf:
                    target.write(data)
                    await target.drain()
