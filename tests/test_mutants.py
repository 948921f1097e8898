"""The list of mutants fits the code; `make mutants` runs them."""

import pytest
from conftest import ROOT
from mutants.run import Mutant, mutate, read


@pytest.mark.parametrize("mutant", read(), ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_names_tests_that_are_there(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    changed = mutate(text, mutant)
    assert changed != text
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        if test.startswith("tests/"):
            path, _, name = test.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
