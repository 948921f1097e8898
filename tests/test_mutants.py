"""The list of mutants fits the code; `make mutants` runs them."""

from conftest import ROOT
from mutants.run import mutate, read


def test_every_mutant_changes_one_place_and_names_tests_that_are_there() -> None:
    mutants = read()
    assert len(mutants) >= 30
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text()
        changed = mutate(text, mutant)
        assert changed != text, mutant.name
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")
        for test in mutant.tests:
            if test.startswith("tests/"):
                path, _, name = test.partition("::")
                assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), mutant.name
