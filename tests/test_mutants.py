"""For each important promise of the package, a faulty version makes a test fail; see `mutants/faulty.py`.

``make mutants`` runs the faulty versions whose tests take long; see `long_mutants.py`.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.faulty import MUTANTS, Mutant
from tests.runner import patience

for file in sorted(Path(__file__).with_name("mutants").glob("*.py")):
    importlib.import_module(f"tests.mutants.{file.stem}")


@pytest.fixture
def places(mutant: Mutant) -> list[tuple[Any, str]]:
    """Return the places of the mutated function.

    As a fixture this runs in pytest's own process: a search through all modules in a forked process would copy their
    memory.
    """
    return list(mutant.places())


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if not mutant.takes_long], ids=str)
def test_a_test_fails_if(mutant: Mutant, places: list[tuple[Any, str]], request: pytest.FixtureRequest) -> None:
    arguments = {name: request.getfixturevalue(name) for name in mutant.fixtures} | mutant.arguments
    mutant.put_in(places)
    patience.limit = 3.0  # The test waits for something that does not happen in most mutants.
    with pytest.raises(mutant.noticed_by):
        mutant.killed_by(**arguments)
