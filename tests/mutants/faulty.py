"""A guarantee is taken away: a function of the package is replaced by one that lacks it, and a test must notice.

A faulty version has a name that says what is wrong, and the arguments of the right one, after the right one itself::

    @replaces(OrderedBatches.__len__, killed_by=test_evaluation_sees_every_sample_once)
    def an_evaluation_has_one_batch_more(right: Callable[[OrderedBatches], int], self: OrderedBatches) -> int:
        return right(self) + 1

The function is named by itself and not by a text, so the type checker tells whoever renames it or changes its
arguments. A class that only inherits a method has none of its own to replace: name the one that it is written in.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Mutant:
    """One.

    Attributes:
        faulty: What takes the place of a function; its first argument is the right one.
        right: That.
        killed_by: The test that must notice.
        given: Those of the test's arguments that are no fixtures.
        noticed_by: What it raises then.
    """

    faulty: Callable[..., Any]
    right: Callable[..., Any]
    killed_by: Callable[..., object]
    given: dict[str, Any]
    noticed_by: tuple[type[BaseException], ...]

    def __str__(self) -> str:
        return self.faulty.__name__

    @property
    def fixtures(self) -> list[str]:
        """Those of the test that must notice."""
        return [name for name in inspect.signature(self.killed_by).parameters if name not in self.given]

    def put_in(self) -> None:
        """Replace the right one wherever this process has it; not to be undone."""
        right, faulty = self.right, self.faulty

        @functools.wraps(right)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return faulty(right, *args, **kwargs)

        for owner, name in list(_owners(right)):
            static = isinstance(inspect.getattr_static(owner, name), staticmethod) and inspect.isclass(owner)
            setattr(owner, name, staticmethod(replacement) if static else replacement)


def _owners(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Where a function is: in its class, or in every module that has imported it, those of tests as well."""
    *classes, name = function.__qualname__.split(".")
    if classes:
        yield functools.reduce(getattr, classes, sys.modules[function.__module__]), name
        return
    for module in list(sys.modules.values()):
        yield from ((module, name) for name, value in list(vars(module).items()) if value is function)


# All that were made, in the order of their files.
MUTANTS: list[Mutant] = []


def replaces(
    right: Callable[P, R],
    killed_by: Callable[..., object],
    noticed_by: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception),
    **given: Any,
) -> Callable[[Callable[Concatenate[Callable[P, R], P], R]], Mutant]:
    """Make a mutant of a faulty version.

    Args:
        right: The function that it replaces.
        killed_by: The test that must notice.
        noticed_by: What it raises then.
        given: Those of the test's arguments that are no fixtures.
    """

    def made(faulty: Callable[Concatenate[Callable[P, R], P], R]) -> Mutant:
        MUTANTS.append(Mutant(faulty, right, killed_by, given, noticed_by))
        return MUTANTS[-1]

    return made
