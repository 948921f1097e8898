"""What is promised cannot be taken away without a test that fails; see `mutants/faulty.py`."""

import importlib

import pytest
from mutants.faulty import MUTANTS, Mutant

for name in (
    "clusters",
    "commands",
    "coordinator",
    "data",
    "data_parallel",
    "hybrid_pipeline",
    "licences",
    "modules",
    "own_mistakes",
    "own_stages",
    "parameter_server",
    "pipeline",
    "planning",
    "servers",
    "verifying",
    "wires",
    "workers",
):
    importlib.import_module(f"mutants.{name}")


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_test_fails_if(mutant: Mutant, request: pytest.FixtureRequest) -> None:
    arguments = {name: request.getfixturevalue(name) for name in mutant.fixtures} | mutant.given
    mutant.put_in()
    with pytest.raises(mutant.noticed_by):
        mutant.killed_by(**arguments)
