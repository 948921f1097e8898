"""What the command line says before a command's code is imported: help, recipes, and where it looks."""

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from cnnstrategies import ConfigurationError, commands
from cnnstrategies.cli import main
from cnnstrategies.commands.arguments import help, recipes, table
from cnnstrategies.commands.arguments.keys import ROOTS
from cnnstrategies.commands.arguments.table import COMMANDS


def test_help_names_every_command_and_needs_no_torch():
    program = "import sys; from cnnstrategies.cli import main\n"
    program += "".join(f"main({words!r})\n" for words in ([], ["--help"], *([name, "--help"] for name in COMMANDS)))
    program += "main(['configs'])\n"
    program += "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    for name, command in COMMANDS.items():
        assert f"  {name} " in run.stdout
        assert command.line in run.stdout


def test_ctrl_c_ends_the_start_without_a_traceback():
    """Nothing that takes milliseconds is imported before `main`, and what it imports may be interrupted anywhere."""
    program = (
        "import os, re, signal, sys; known = set(sys.modules); from cnnstrategies import cli; new = set(sys.modules)\n"
        "class Interrupts:\n    def find_spec(self, *_): os.kill(os.getpid(), signal.SIGINT)\n"
        "assert len(new - known - {'signal'}) < 8, new - known\n"
        "sys.meta_path.insert(0, Interrupts()); cli."
    )
    for function in ("main", "server"):
        run = subprocess.run(
            [sys.executable, "-c", f"{program}{function}()"], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert (run.returncode, run.stderr) == (130, "")


def test_no_garbage_is_looked_for_while_a_command_is_imported(monkeypatch):
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, "."])
    at_the_end = []
    monkeypatch.setattr(table.atexit, "register", at_the_end.append)
    lines = ("import gc", "enabled = [gc.isenabled()]", "def main(args): args += [*enabled, gc.isenabled()]")
    Path("late.py").write_text("\n".join(lines))
    gc.unfreeze()
    seen = []
    table.Command("", "", "late").run(seen)
    assert seen == [False, True]
    assert gc.get_freeze_count() > 0, "nor later among what was imported"
    assert at_the_end == [gc.unfreeze], "bindings as triton's print that they are leaked"


def keys_of(text):
    return set(re.findall(r"^  (?:-\w(?: \w+)?, )?--([\w.]+)", text, re.MULTILINE))


def test_what_help_names_is_there_and_full_help_is_the_parsers():
    of_class = {
        "trainer.strategy.OPTION",
        "model.init_args.network",
        "data.init_args.global_batch_size",
        "data.help",
        "help_full",
    }
    for name in ("fit", "predict", "plan", "tune", "submit"):
        known = keys_of(help.in_full(name, ""))
        assert len(known) > 60
        assert keys_of(help.of_command(name)) <= known | of_class
    assert {key.partition(".")[0] for key in keys_of(help.in_full("fit", ""))} >= ROOTS.keys()
    assert keys_of(help.in_full("fit", "stop")) == {
        "stop", "stop.grace", "stop.warning_signal", "stop.warning_grace", "stop.on_each_node"
    }  # fmt: skip


def test_recipes_are_found_by_name_and_files_come_first(run_cli, capsys):
    code, output = run_cli("fit", "--config", "quickstart", "--config=strategy/hybrid_pipeline", "--print_config")
    assert code == 0
    assert "DigitsDataModule" in output
    assert "HybridPipelineStrategy" in output
    assert recipes.find("configs/data/cifar10.yaml").samefile(ROOT / "configs/data/cifar10.yaml")
    Path("quickstart").write_text("seed_everything: 1\n")
    assert recipes.find("quickstart") == Path("quickstart")
    Path("quickstart").unlink()
    with pytest.raises(ConfigurationError, match="no recipe of this name; did you mean 'quickstart'"):
        recipes.find("quikstart")
    main(["configs"])
    assert [line for line in capsys.readouterr().out.splitlines() if not line.endswith(".")] == [], "cut off"
    main(["configs", "quickstart"])
    assert capsys.readouterr().out.strip() == Path(ROOT / "configs/quickstart.yaml").read_text().strip()


@pytest.mark.light
def test_the_reference_has_every_command():
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE)
    assert set(COMMANDS) <= {name for heading in headings for name in heading.split(", ")}
