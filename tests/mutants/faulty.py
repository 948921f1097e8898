"""A guarantee is taken away: a function of the package is replaced by one that lacks it, and a test must notice.

A faulty version has a name that says what is wrong, and the arguments of the right one, after the right one itself::

    @replaces(OrderedBatches.__len__, killed_by=test_evaluation_sees_every_sample_once)
    def an_evaluation_has_one_batch_more(right, self):
        return right(self) + 1

Where it does nothing at all, or gives the same whatever it is asked::

    removes(SyncClock.leave, "a dead worker is waited for", killed_by=test_a_step_waits_for_all_workers)

The function is named by itself and not by a text, so a test fails for whoever renames it or changes its arguments. A
class that only inherits a method has none of its own to replace: name the one that it is written in.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OURS = {"cnnstrategies", *(path.stem for path in Path(__file__).parents[1].rglob("*"))}
FAILURES = AssertionError, pytest.fail.Exception


@dataclass(frozen=True)
class Mutant:
    """One.

    Attributes:
        name: What is wrong then.
        faulty: What takes the place of a function; its first argument is the right one.
        right: That.
        killed_by: The test that must notice.
        noticed_by: What it raises then.
        given: Those of the test's arguments that are no fixtures.
    """

    name: str
    faulty: Callable[..., Any]
    right: Callable[..., Any]
    killed_by: Callable[..., object]
    noticed_by: tuple[type[BaseException], ...]
    given: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def fixtures(self) -> list[str]:
        """Those of the test that must notice."""
        return [name for name in inspect.signature(self.killed_by).parameters if name not in self.given]

    def places(self) -> Iterator[tuple[Any, str]]:
        """Where the right one is: in its class, or in every module that has imported it, those of tests as well."""
        *classes, name = self.right.__qualname__.split(".")
        if classes:
            yield functools.reduce(getattr, classes, sys.modules[self.right.__module__]), name
            return
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in OURS]:
            yield from ((module, name) for name, value in list(vars(module).items()) if value is self.right)

    def put_in(self, places: Iterable[tuple[Any, str]]) -> None:
        """Replace the right one in this process; not to be undone."""
        right, faulty = self.right, self.faulty

        @functools.wraps(right)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return faulty(right, *args, **kwargs)

        for owner, name in places:
            static = isinstance(inspect.getattr_static(owner, name), staticmethod) and inspect.isclass(owner)
            setattr(owner, name, staticmethod(replacement) if static else replacement)


# All that were made, in the order of their files.
MUTANTS: list[Mutant] = []


def replaces(
    right: Callable[..., Any],
    killed_by: Callable[..., object],
    noticed_by: tuple[type[BaseException], ...] = FAILURES,
    **given: Any,
) -> Callable[[Callable[..., Any]], Mutant]:
    """Make a mutant of a faulty version; the arguments are its attributes."""

    def made(faulty: Callable[..., Any]) -> Mutant:
        MUTANTS.append(Mutant(faulty.__name__, faulty, right, killed_by, noticed_by, given))
        return MUTANTS[-1]

    return made


def removes(
    right: Callable[..., Any],
    fault: str,
    killed_by: Callable[..., object],
    gives: Any = None,
    noticed_by: tuple[type[BaseException], ...] = FAILURES,
    **given: Any,
) -> None:
    """Make a mutant that does nothing but give a value.

    Args:
        fault: The mutant's name, in words.
        gives: What it gives.
    """
    name = fault.replace(" ", "_")
    MUTANTS.append(Mutant(name, lambda *_, **__: gives, right, killed_by, noticed_by, given))
