"""The launcher that is printed on the page "Add a launcher" is detected, gives ranks and accepts submissions."""

import os
import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer

from cnnstrategies import cli
from cnnstrategies.cluster import environment as environment_module
from cnnstrategies.cluster import launchers
from cnnstrategies.cluster.environment import DoctorPlace, check_world, environment_plugins, find_place, local_rank
from cnnstrategies.cluster.launchers import registry
from cnnstrategies.cluster.run_folder import find_run
from cnnstrategies.cluster.submission import Submission
from cnnstrategies.errors import ConfigurationError
from tests.conftest import ROOT

PAGE = ROOT / "docs/development/add-a-launcher.md"
RANK = {"TOY_JOB": "17", "TOY_RANK": "3", "TOY_SIZE": "4", "TOY_LOCAL_RANK": "1", "TOY_LOCAL_SIZE": "2"}
RUN = ["submit", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}", "--to=toy", "--cluster.time=90"]
SIZE = ["--trainer.num_nodes=2", "--trainer.devices=2"]


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    """Register the page's launcher for one test, also if somebody has saved it in the package."""
    others = {name: launcher for name, launcher in registry.REGISTRY.items() if launcher.precedence != 55}
    monkeypatch.setattr(registry, "REGISTRY", others)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), {"__name__": "toy"})


def test_ranks_and_their_meeting_point_are_the_launchers(monkeypatch):
    outside = dict(os.environ)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    toy = launchers.launcher_named("toy")
    assert [launcher.name for launcher in launchers.detected(RANK)] == ["toy", "none"]
    assert launchers.rank_launcher(os.environ) is toy
    assert launchers.rank_launcher(outside) is None
    assert launchers.rank_launcher(RANK | {"TORCHELASTIC_RUN_ID": "digits"}).name == "torchrun"
    (environment,) = environment_plugins([], num_nodes=2)
    assert (environment.global_rank(), environment.world_size(), environment.node_rank()) == (3, 4, 1)
    assert (local_rank(), launchers.process_number(os.environ)) == (1, 3)
    with pytest.raises(ConfigurationError, match="toyrun has started ranks on several machines, but rank 3 does not"):
        _ = environment.main_address
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    ports = [environment.main_port]
    monkeypatch.setenv("TOY_JOB", "18")
    ports.append(environment.main_port)
    assert ports[0] != ports[1]
    assert find_place() == DoctorPlace(1, 2, 1, environment)


def test_a_wrong_number_of_ranks_is_refused_with_the_launchers_command(monkeypatch):
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    options = {"accelerator": "cpu", "strategy": "ddp", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(num_nodes=2, devices=3, plugins=environment_plugins([]), **options)
    message = "toyrun has started 4 processes, .* start the run with `toyrun --nodes=2 --per-node=3`"
    monkeypatch.setattr(environment_module, "REPORT_SECONDS", 0)
    with pytest.raises(SystemExit) as exit:  # Only rank 0 reports the error.
        check_world(trainer)
    assert exit.value.code == ConfigurationError.exit_code
    monkeypatch.setenv("TOY_RANK", "0")
    with pytest.raises(ConfigurationError, match=message):
        check_world(trainer)


def test_a_run_that_is_started_again_has_the_same_folder():
    assert find_run(None, "hash", {"TOY_JOB": "17"}) == "toy_17"
    assert find_run("mine", "hash", {"TOY_JOB": "17"}) == "mine"


def test_a_submission_is_shown_and_queued(capsys):
    cli.main([*RUN, *SIZE, "--dry_run", "--cluster.partition=short"])
    shown = capsys.readouterr()
    assert "#TOY --nodes=2 --time=90\n" in shown.out
    assert re.search(r"\ntoyrun --nodes=2 --per-node=2 \S+ -m cnnstrategies fit --config \S+/config.yaml\n", shown.out)
    assert shown.err == "Note: --to toy ignores these keys: cluster.partition\n"
    assert not list(Path().iterdir())
    with pytest.raises(SystemExit):
        cli.main([*RUN, *SIZE, "--trainer.enable_checkpointing=false"])
    assert "a job that Toy starts again would start from the beginning each time" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*RUN, *SIZE])
    assert "toysub is not installed: run submit on a login node of a Toy cluster" in capsys.readouterr().err
    assert not [file for file in Path().rglob("*") if file.is_file()], "a refused job leaves nothing behind"
    program = Path("toysub").absolute()
    program.write_text('#!/bin/sh\ntest -e "$1" && echo 17\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    cli.main([*RUN, *SIZE])
    queued = capsys.readouterr().out
    assert queued.startswith("Submitted job 17: 2 nodes x 2 tasks\n")
    (folder,) = Path("toy").iterdir()
    assert {file.name for file in folder.iterdir()} == {"config.yaml", "job.sh"}
    queues_again_in_the_same_folder(folder, capsys)
    program.write_text("#!/bin/sh\necho Welcome to Toy\necho 18\n")
    with pytest.raises(SystemExit):
        cli.main([*RUN, *SIZE])
    assert r"returned 'Welcome to Toy\n18' instead of a job id on one line" in capsys.readouterr().err
    assert len(list(Path("toy").iterdir())) == 2, "the job may be in the queue"


def queues_again_in_the_same_folder(folder, capsys):
    """The run is submitted twice more under one name; another submission takes the files of the third at first."""
    first = {file.name: file.read_text() for file in folder.iterdir()}
    again = [*RUN, *SIZE, f"--run_name={folder.name}", "--trainer.max_epochs=7"]
    cli.main(again)
    assert "\nThis job uses config-2.yaml and job-2.sh, and continues the run " in capsys.readouterr().out
    assert f" --config {folder.resolve()}/config-2.yaml\n" in (folder / "job-2.sh").read_text()
    assert yaml.safe_load((folder / "config-2.yaml").read_text())["trainer"]["max_epochs"] == 7
    prepare = Submission.prepare_data

    def other_submission(self):
        (folder / "job-3.sh").touch()
        prepare(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Submission, "prepare_data", other_submission)
        cli.main(again)
    capsys.readouterr()
    third = {"job-3.sh", "config-4.yaml", "job-4.sh"}
    assert {file.name for file in folder.iterdir()} == {*first, "config-2.yaml", "job-2.sh", *third}
    assert first == {name: (folder / name).read_text() for name in first}, "the files of the queued job have changed"


def test_the_help_and_a_refusal_name_the_launcher(capsys):
    names = launchers.job_launchers()
    expected = ["kubernetes", "ray", "toy", "slurm"]
    assert [name for name in names if name in expected] == expected
    cli.main(["submit", "--help"])
    assert "|".join(names) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["submit", "fit", "--to=elsewhere"])
    assert ", ".join(names) in capsys.readouterr().err


def test_two_launchers_cannot_have_the_same_name_or_precedence():
    toy = type(launchers.launcher_named("toy"))
    with pytest.raises(ValueError, match="classes Toy and Again have the same name 'toy'"):
        launchers.register(type("Again", (toy,), {"precedence": 56}))
    message = "classes Toy and Again have the same precedence 55: .* 50 ray, .*55 toy, .*60 slurm"
    with pytest.raises(ValueError, match=message):
        launchers.register(type("Again", (toy,), {"name": "again"}))


def test_a_launcher_without_a_required_member_is_refused():
    with pytest.raises(TypeError, match="class Bare does not define title, precedence, detect: "):
        launchers.register(type("Bare", (launchers.Launcher,), {"name": "bare"}))


def test_the_pages_table_has_the_names_and_precedences_of_the_launchers():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(name, str(launchers.launcher_named(name).precedence)) for name, _ in rows]
    mine = [launcher.name for launcher in launchers.launchers() if launcher.name != "toy"]
    assert [name for name, _ in rows] == mine
