"""A signal ends a run within seconds, whatever the main thread is doing."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from conftest import run_forked

from cnnstrategies.commands.run import interrupt
from cnnstrategies.commands.run.interrupt import heeds_signals

FORKED = """
import os, signal, time
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from cnnstrategies.commands.run.interrupt import heeds_signals
signal.signal(signal.SIGTERM, lambda *_: None)
with heeds_signals(lambda: print("ended"), seconds=0.1):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    time.sleep(0.5)
    signal.signal(signal.SIGTERM, lambda *_: print("told"))  # A handler that takes over has its own grace period.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
print("went on")
"""
both = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


def tell(signum: int) -> None:
    """Send a signal to this process a moment later."""
    subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -{int(signum)} {os.getpid()}"])


def end() -> None:
    print("the others end", flush=True)


@both
def test_a_process_whose_main_thread_ignores_the_signal_is_ended(signum):
    def run() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with heeds_signals(end, seconds=0.2):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signum})  # The system delivers the signal to the other thread.
            tell(signum)
            ctypes.CDLL(None).sleep(1000)

    assert run_forked(run) == (128 + signum, "the others end\n")


class Decided(threading.Event):
    """An event that waits until the main thread has noticed the signal, and records whether it has."""

    noticed: ClassVar[list[bool]] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.noticed.append(super().wait(60))
        return self.noticed[-1]


@both
def test_a_process_whose_main_thread_notices_the_signal_ends_by_itself(signum, monkeypatch):
    monkeypatch.setattr(interrupt, "threading", SimpleNamespace(**vars(threading) | {"Event": Decided}))

    def run() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with heeds_signals(end, seconds=0.1):
            try:
                tell(signum)
                time.sleep(1000)
            except KeyboardInterrupt:
                while not Decided.noticed:
                    time.sleep(0.01)
                assert Decided.noticed == [True]
                time.sleep(0.1)  # If the process were to be ended, it would be ended now.
        print("noticed", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)

    assert run_forked(run) == (0, "noticed True\n")


def test_a_signal_to_a_fresh_fork_does_not_end_its_parent():
    """A rank that got a signal directly after its fork, before it had handlers of its own, once ended the whole run."""
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout == "told\nwent on\n"
