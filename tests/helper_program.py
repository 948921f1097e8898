"""The program of a helper process in tests. It imports little, because a spawned process imports it again."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def answer(pipe: Connection, like_torch: bool) -> None:
    """Answer each number with the same number; after None, answer with the signals that a program does not get.

    A SIGTERM arrives just when this process starts the program.

    Args:
        pipe: Connection to the rank.
        like_torch: Install the signal handlers of torch's loader workers.
    """
    if like_torch:
        from torch._C import _set_worker_signal_handlers

        _set_worker_signal_handlers()
    while (number := pipe.recv()) is not None:
        pipe.send(number)
    sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGTERM) if event == "subprocess.Popen" else None)
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    pipe.send([line.split()[1] for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))])
    while True:
        time.sleep(1000)
