"""The faulty versions of the package whose tests take long; ``make mutants`` runs this file."""

import pytest

from tests import test_mutants
from tests.mutants.faulty import MUTANTS, Mutant

places = test_mutants.places  # A fixture.


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.takes_long], ids=str)
def test_a_test_that_takes_long_fails_if(mutant: Mutant, request: pytest.FixtureRequest) -> None:
    test_mutants.test_a_test_fails_if(mutant, request.getfixturevalue("places"), request)
