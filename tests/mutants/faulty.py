"""Mutants: each mutant replaces a function of the package by a faulty version, and a test must fail.

The faulty version's name says what is wrong. Its first argument is the original function; the original function's
arguments follow::

    @replaces(OrderedBatches.__len__, killed_by=test_evaluation_sees_every_sample_once)
    def an_evaluation_has_one_batch_more(original, self):
        return original(self) + 1

Use `removes` for a mutant that does nothing, or that returns a constant::

    removes(SyncClock.leave, "a dead worker is waited for", killed_by=test_a_step_waits_for_all_workers)

Functions are given as objects and not as strings, so renaming a function or changing its arguments makes a test fail.
An inherited method cannot be replaced in the subclass: name the method of the class that defines it.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

OURS = "cnnstrategies", "tests"
FAILURES = AssertionError, pytest.fail.Exception


@dataclass(frozen=True)
class Mutant:
    """A faulty version of a function of the package, with the test that must fail.

    Attributes:
        name: Description of the fault, with underscores for spaces.
        faulty: The faulty version; its first argument is the original function.
        original: The original function.
        killed_by: The test that must fail.
        noticed_by: Exceptions that the failing test may raise.
        arguments: Arguments of the test that are not fixtures, by parameter name.
        takes_long: Whether the test takes more than 0.3 s of processor time, or depends on time. `make mutants` runs
            these mutants.
    """

    name: str
    faulty: Callable[..., Any]
    original: Callable[..., Any]
    killed_by: Callable[..., object]
    noticed_by: tuple[type[BaseException], ...]
    arguments: dict[str, Any]
    takes_long: bool

    def __str__(self) -> str:
        return self.name

    @property
    def fixtures(self) -> list[str]:
        """Names of the fixtures that the test needs."""
        return [name for name in inspect.signature(self.killed_by).parameters if name not in self.arguments]

    def places(self) -> Iterator[tuple[Any, str]]:
        """Yield each owner (class or module) of the original function, with the function's name in the owner.

        A method's owner is its class. A function's owners are all modules that have imported it, tests included.
        """
        *classes, name = self.original.__qualname__.split(".")
        if classes:
            yield functools.reduce(getattr, classes, sys.modules[self.original.__module__]), name
            return
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in OURS]:
            yield from ((module, name) for name, value in list(vars(module).items()) if value is self.original)

    def put_in(self, places: Iterable[tuple[Any, str]]) -> None:
        """Replace the original function in this process. The replacement cannot be undone."""
        original, faulty = self.original, self.faulty

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return faulty(original, *args, **kwargs)

        for owner, name in places:
            static = isinstance(inspect.getattr_static(owner, name), staticmethod) and inspect.isclass(owner)
            setattr(owner, name, staticmethod(replacement) if static else replacement)


# All mutants, in the order of their files.
MUTANTS: list[Mutant] = []


def replaces(
    original: Callable[..., Any],
    killed_by: Callable[..., object],
    noticed_by: tuple[type[BaseException], ...] = FAILURES,
    takes_long: bool = False,
    **arguments: Any,
) -> Callable[[Callable[..., Any]], Mutant]:
    """Return a decorator that makes a mutant of a faulty version.

    Args:
        original: The original function.
        killed_by: The test that must fail.
        noticed_by: Exceptions that the failing test may raise.
        takes_long: Whether the test takes more than 0.3 s of processor time.
        arguments: Arguments of the test that are not fixtures.
    """

    def made(faulty: Callable[..., Any]) -> Mutant:
        MUTANTS.append(Mutant(faulty.__name__, faulty, original, killed_by, noticed_by, arguments, takes_long))
        return MUTANTS[-1]

    return made


def removes(
    original: Callable[..., Any],
    fault: str,
    killed_by: Callable[..., object],
    gives: Any = None,
    noticed_by: tuple[type[BaseException], ...] = FAILURES,
    takes_long: bool = False,
    **arguments: Any,
) -> None:
    """Make a mutant that only returns a constant.

    Args:
        original: The original function.
        fault: The mutant's name, with spaces between words.
        killed_by: The test that must fail.
        gives: The mutant's return value.
        noticed_by: Exceptions that the failing test may raise.
        takes_long: Whether the test takes more than 0.3 s of processor time.
        arguments: Arguments of the test that are not fixtures.
    """
    name = fault.replace(" ", "_")
    MUTANTS.append(Mutant(name, lambda *_, **__: gives, original, killed_by, noticed_by, arguments, takes_long))
