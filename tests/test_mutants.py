"""What is promised cannot be taken away without a test that fails; see `mutants/faulty.py`."""

import importlib
from pathlib import Path

import pytest
from mutants.faulty import MUTANTS, Mutant

for file in sorted(Path(__file__).with_name("mutants").glob("*.py")):
    importlib.import_module(f"mutants.{file.stem}")


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_test_fails_if(mutant: Mutant, request: pytest.FixtureRequest) -> None:
    arguments = {name: request.getfixturevalue(name) for name in mutant.fixtures} | mutant.given
    mutant.put_in()
    with pytest.raises(mutant.noticed_by):
        mutant.killed_by(**arguments)
