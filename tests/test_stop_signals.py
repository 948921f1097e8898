"""A signal ends a process within seconds, whatever the main thread is doing, and no signal handler raises."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from cnnstrategies.runtime import stop_signals
from cnnstrategies.runtime.stop_signals import (
    Repeated,
    acting_on,
    cleaned_up,
    ends_on_signals,
    interruptible,
    passing_on,
    raise_if_interrupted,
    settle,
)
from tests.runner.forked import run_forked
from tests.runner.patience import at_most

FORKED = """
import os, signal, time
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from cnnstrategies.runtime.stop_signals import acting_on
with acting_on([signal.SIGTERM], lambda signum: print("acted")):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.kill(os.getpid(), signal.SIGTERM)
print("went on")
"""
both = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


def end_others() -> None:
    print("the others end", flush=True)


def in_cpp(signum: int) -> None:
    """Wait in C code, in which no signal handler can run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})  # The system delivers the signal to another thread.
    os.kill(os.getpid(), signum)
    ctypes.CDLL(None).sleep(1000)


def in_a_fork_hook(signum: int) -> None:
    """Get the signal in a hook whose exceptions Python ignores."""
    os.register_at_fork(before=lambda: os.kill(os.getpid(), signum))
    if os.fork() == 0:
        os._exit(0)


def in_a_logging_lock(signum: int) -> None:
    """Get the signal while a log record is written. `logging` ignores exceptions and holds a lock meanwhile."""
    handler = logging.Handler()
    logging.getLogger("locked").propagate = False
    handler.emit = lambda record: os.kill(os.getpid(), signum)
    logging.getLogger("locked").addHandler(handler)
    logging.getLogger("locked").error("")


def asleep(signum: int) -> None:
    subprocess.Popen(["sh", "-c", f"kill -{int(signum)} {os.getpid()}"])


@both
@pytest.mark.parametrize("wait", [in_cpp, in_a_fork_hook, in_a_logging_lock, asleep])
def test_a_signal_ends_a_process_that_does_anything(wait, signum):
    def run() -> None:
        with ends_on_signals(), cleaned_up(end_others):
            wait(signum)
            time.sleep(1000)

    assert run_forked(run, timeout=60) == (128 + signum, "the others end\n")


def test_a_cleanup_that_waits_forever_is_given_up(monkeypatch):
    monkeypatch.setattr(stop_signals, "PATIENCE", 0.1)

    def run() -> None:
        with ends_on_signals(), cleaned_up(lambda: time.sleep(1000)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)

    assert run_forked(run, timeout=60) == (143, "")


def test_a_signal_to_a_fresh_fork_does_not_act_in_its_parent():
    """A rank that got a signal directly after its fork, before it had handlers of its own, once ended the whole run."""
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout == "child -15\nacted\nwent on\n"


def test_the_inner_action_counts_and_handlers_are_restored():
    def run() -> None:
        actions = []
        before = signal.getsignal(signal.SIGTERM)
        with acting_on([signal.SIGTERM], lambda _: actions.append("outer")):
            with acting_on([signal.SIGTERM], lambda _: actions.append("inner")):
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for(actions, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(actions, 2)
            # A handler of other code gets its signals alone.
            signal.signal(signal.SIGTERM, lambda *_: actions.append("other"))
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(actions, 3)
            signal.signal(signal.SIGTERM, before)
        assert signal.getsignal(signal.SIGTERM) == before
        print(*actions, flush=True)

    assert run_forked(run, timeout=60) == (0, "inner outer other\n")


def test_an_action_that_fails_does_not_end_the_thread():
    """Otherwise `settle` would wait forever, and each training step calls it."""

    def run() -> None:
        with acting_on([signal.SIGTERM], lambda signum: print(1 // (signum - signal.SIGTERM))):
            os.kill(os.getpid(), signal.SIGTERM)
            settle()
            settle()

    code, output = run_forked(run, timeout=60)
    assert code == 0
    assert output.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_a_forked_process_acts_on_its_own_signals_alone():
    def run() -> None:
        with acting_on([signal.SIGTERM], lambda _: os._exit(1)):
            child = os.fork()
            if child == 0:
                with ends_on_signals():
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(at_most(1000))
                    os._exit(2)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

    assert run_forked(run, timeout=60) == (0, "child 143\n")


def test_a_process_that_has_started_ranks_passes_signals_on():
    def run() -> None:
        sent: list[int] = []
        with passing_on([signal.SIGUSR1, signal.SIGTERM], lambda signum: not sent.append(signum)):
            for signum in (signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), signum)
                settle()
        print(*sent, flush=True)

    assert run_forked(run, timeout=60) == (0, f"{signal.SIGUSR1:d} {signal.SIGTERM:d}\n")


def wait_for(actions: list[str], count: int) -> None:
    while len(actions) < count:
        time.sleep(0.01)


@pytest.mark.light
def test_a_signal_counts_as_sent_again_only_later(monkeypatch):
    """`timeout` sends a signal to its program and to the process group; a parent process passes its signal on."""
    now = 0.0
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now)
    alone, passed_on = Repeated(), Repeated(expected=1)
    assert [alone.note(signal.SIGTERM), alone.note(signal.SIGTERM)] == [False, False]
    assert [passed_on.note(signal.SIGTERM), passed_on.note(signal.SIGTERM)] == [False, False]
    now = 1.5
    assert alone.note(signal.SIGTERM)
    assert alone.received == signal.SIGTERM
    assert passed_on.note(signal.SIGTERM)
    late = Repeated(expected=1)
    late.note(signal.SIGTERM)
    now = 3.0
    assert [late.note(signal.SIGTERM), late.note(signal.SIGTERM)] == [False, True]


def test_ctrl_c_interrupts_code_that_waits_and_raises_in_no_handler():
    def run() -> None:
        with interruptible():
            raise_if_interrupted()
            os.kill(os.getpid(), signal.SIGINT)
            try:
                while True:
                    time.sleep(0.01)
                    raise_if_interrupted()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        raise_if_interrupted()

    assert run_forked(run, timeout=60) == (0, "interrupted\n")
