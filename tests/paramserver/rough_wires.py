"""Wires between the processes of a run, each of which may do any harm that wires do: see `FAULTS`."""

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
HERE, FAR = "127.0.0.1", "127.0.0.2"  # A wire is reached at the same port of another address.
STALL = 20.0  # seconds
LOOK = 0.02  # seconds between two looks at whether this thread gets to run
NOTICED = 0.5  # seconds that it needs at most if it does
LATEST = 0.3  # seconds that bytes may need


class Wires(threading.Thread):
    """Carries bytes, in a thread.

    Args:
        seed: What is done to which connection depends on it.
        faults: Which there are.
        faulty: How many connections of each wire are hit, the first ones: so every run comes to an end.
        lost: Which part of the pieces that come is lost, whatever the connection.

    Attributes:
        met: The faults that have come to pass, and when.
        starved: Seconds in which this thread did not get to run: nor, then, did the processes.
    """

    def __init__(self, seed: int, faults: tuple[str, ...] = FAULTS, faulty: int = 6, lost: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.met: list[tuple[str, float]] = []
        self.starved = 0.0
        self._chance = random.Random(seed)
        self._faults = faults
        self._faulty = faulty
        self._lost = lost
        self._listeners: dict[int, socket.socket] = {}
        self._counts: Counter[int] = Counter()
        self._over = False

    def lay(self, port: int) -> None:
        """Lay a wire to a port; before the thread is started."""
        self._listeners[port] = socket.create_server((FAR, port))

    def run(self) -> None:
        """Carry."""
        asyncio.run(self._run())

    def end(self) -> None:
        """Stop."""
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
        """Carry what comes on a connection, with a fault at one of its ends, when a byte with some number comes."""
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
            for one in carried:
                one.cancel()
        for end in ends:
            with contextlib.suppress(OSError):
                end.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # Processes that were forked have it, too.
            end.close()

    async def _carry(self, source: StreamReader, target: StreamWriter, delay: float, fault: str, place: int) -> None:
        """Carry bytes one way, until the connection ends."""
        deaf = False
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if fault != "nothing" and place < len(data):
                    self.met.append((fault, time.monotonic()))
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
                    self.met.append(("lost", time.monotonic()))
                elif not deaf:
                    target.write(data)
                    await target.drain()
