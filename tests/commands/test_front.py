"""The part of the command line that runs before a command's code is imported: help, recipes, parsing of options."""

import contextlib
import gc
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from cnnstrategies import ConfigurationError, commands
from cnnstrategies.cli import main
from cnnstrategies.commands.arguments import command, help, options, recipes
from cnnstrategies.commands.arguments.command import Configuration
from cnnstrategies.commands.arguments.keys import ROOTS, with_underscores
from cnnstrategies.commands.arguments.options import COMMANDS, PROGRAMS, WatchOptions
from tests.conftest import ROOT


def test_help_names_every_command_and_needs_no_torch():
    program = "import sys; from cnnstrategies.cli import main\n"
    program += "".join(f"main({words!r})\n" for words in ([], ["--help"], *([name, "--help"] for name in COMMANDS)))
    program += "main(['configs'])\n"
    program += "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    for name, declared in COMMANDS.items():
        assert f"  {name} " in run.stdout
        assert declared.summary in run.stdout


def test_ctrl_c_ends_the_start_without_a_traceback():
    """Only cheap modules are imported before `main`, and the imports in `main` can be interrupted at any point."""
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


def test_garbage_collection_is_off_while_a_command_is_imported(monkeypatch):
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, "."])
    at_the_end = []
    monkeypatch.setattr(command.atexit, "register", at_the_end.append)
    lines = ("import gc", "enabled = [gc.isenabled()]", "def main(options): options.run += [*enabled, gc.isenabled()]")
    Path("late.py").write_text("\n".join(lines))
    gc.unfreeze()
    seen = []
    late = command.Command("late", "", "", "late", WatchOptions)
    monkeypatch.setattr(command.Command, "parse", lambda *_: (WatchOptions(seen), []))
    late.run([])
    assert seen == [False, True]
    assert gc.get_freeze_count() > 0, "later collections skip the imported objects as well"
    assert at_the_end == [gc.unfreeze], "otherwise bindings like triton's print that they leak"


def keys_of(text):
    return set(re.findall(r"^  (?:-\w(?: \w+)?, )?--([\w.]+)", text, re.MULTILINE))


def test_help_names_existing_options_and_full_help_comes_from_the_parser():
    of_class = {
        "trainer.strategy.OPTION",
        "model.init_args.network",
        "data.init_args.global_batch_size",
        "data.help",
        "help_full",
    }
    for name in ("fit", "predict", "plan", "tune", "submit"):
        known = keys_of(help.in_full(COMMANDS[name], ""))
        assert len(known) > 60
        assert keys_of(help.of_command(COMMANDS[name])) <= known | of_class
    assert {key.partition(".")[0] for key in keys_of(help.in_full(COMMANDS["fit"], ""))} >= ROOTS.keys()
    assert keys_of(help.in_full(COMMANDS["fit"], "stop")) == {
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
    with pytest.raises(ConfigurationError, match=r"no configuration with the name .*; did you mean 'quickstart'"):
        recipes.find("quikstart")
    main(["configs"])
    assert [line for line in capsys.readouterr().out.splitlines() if not line.endswith(".")] == [], "cut off"
    main(["configs", "quickstart"])
    assert capsys.readouterr().out.strip() == Path(ROOT / "configs/quickstart.yaml").read_text().strip()


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="MkDocs is not installed")
def test_the_reference_has_every_command(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import hooks

    source = (ROOT / "docs/reference/cli.md").read_text()
    page = hooks.with_options(source)
    assert "<!--" not in page
    for name, declared in COMMANDS.items():
        section = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section, name
        assert all(f"`{option.row[0]}`".replace("|", r"\|") in section[1] for option in declared.options), name
    shorter = hooks.with_options(source.replace("<!-- options of doctor -->", ""))
    assert f"## doctor\n\n{COMMANDS['doctor'].description}" in shorter, "a command without a mark gets a section"


def test_a_command_is_added_as_the_page_says(monkeypatch, tmp_path, capsys):
    page = (ROOT / "docs/development/add-a-command.md").read_text()
    declaration, code, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setitem(COMMANDS, "count", None)  # Removed at the end.
    exec(compile(declaration, "options.py", "exec"), vars(options))

    def run(*words):
        with contextlib.suppress(SystemExit):
            main(["count", *words])
        return " ".join("".join(capsys.readouterr()).split())

    Path("cats").mkdir()
    missing = (
        "cnnstrategies: error: count: the command's module does not exist: write cnnstrategies/commands/count.py "
        "with a function main(options)"
    )
    assert run("cats") == missing
    (tmp_path / "count.py").write_text(code)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    for name in ("a.png", "b.png", "c.jpg"):
        Path("cats", name).touch()
    shown = run("--help")
    assert "cnnstrategies count datasets/cats --suffix .png" in shown
    assert "--suffix TEXT End of the names that count (default: .jpg)" in shown
    assert run("cats", "--suffix", ".png", "--list") == "a.png b.png 2 images"
    assert run("--at-least=1", "cats") == "1 images"
    for words, line in (
        (["cats", "--at_least", "2"], "--at_least 2: cats has only 1 images"),
        (
            ["cats", "--at-lest", "2"],
            "count: unknown option --at-lest; did you mean '--at_least'? use one of: --suffix, --at",
        ),
        (["cats", "--at_least", "few"], "--at_least: 'few' is not accepted; it must be a whole number"),
        (["cats", "--at_least"], "--at_least needs a value: Fail if there are fewer images"),
        (["cats", "dogs"], "count: cannot use 'dogs'; use one of: --suffix, --at_least, --list"),
        ([], "count: FOLDER is missing: Folder to look in"),
    ):
        assert run(*words).startswith(f"cnnstrategies: error: {line}"), words


@pytest.mark.light
def test_an_unknown_option_is_refused_with_the_commands_own():
    for name, declared in COMMANDS.items():
        if declared.configuration is not Configuration.LIGHTNING:
            flags = [option.flag for option in declared.options if not option.positional]
            with pytest.raises(
                ConfigurationError, match=f"^{name}: unknown option --qqq; use one of: {', '.join(flags)}"
            ):
                declared.parse(["--qqq", "1"])
    with pytest.raises(ConfigurationError, match=r"tune: unknown option --modle; did you mean '--model'\?"):
        COMMANDS["tune"].parse(["--modle=mine.Lit"])


@pytest.mark.light
def test_options_are_read_by_their_types_and_the_rest_belongs_to_the_configuration():
    words = ["--minutes=2", "--config", "mine.yaml", "--allow", "[precision]", "--trainer.devices", "4"]
    tuned, rest = COMMANDS["tune"].parse(words)
    assert (tuned.minutes, tuned.allow, tuned.output) == (2.0, ["precision"], Path("tuned.yaml"))
    assert rest == ["--config", "mine.yaml", "--trainer.devices", "4"]
    submitted, rest = COMMANDS["submit"].parse(["fit", "--dry-run", "--to", "ray", "--cluster.time", "1:00"])
    assert (submitted.command, submitted.dry_run, submitted.to, rest) == (
        "fit",
        True,
        "ray",
        ["--cluster.time", "1:00"],
    )
    for words, searches in (("--search true", True), ("--search=false", False), ("--search", True)):
        assert COMMANDS["plan"].parse(words.split())[0].search is searches
    planned, _ = COMMANDS["plan"].parse(["--bandwidth=null", "--cluster", "some.yaml", "--cluster.time=1"])
    assert (planned.bandwidth, planned.cluster) == (None, Path("some.yaml"))
    server, _ = PROGRAMS["cnnstrategies-server"].parse(["--config", "a", "--config=b", "--make-keys", "run.key"])
    assert (server.config, server.make_keys) == ([Path("a"), Path("b")], Path("run.key"))
    with pytest.raises(ConfigurationError, match=r"--to: 'slrm' is not accepted; did you mean 'slurm'\?"):
        COMMANDS["submit"].parse(["fit", "--to=slrm"])


@pytest.mark.light
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--run-name", "--run_name"),
        ("--trainer.max-epochs=3", "--trainer.max_epochs=3"),
        ("--trainer.strategy.start-method", "--trainer.strategy.start_method"),
        ("--model.init-args.lr-scheduler.init-args.T_max=3", "--model.init_args.lr_scheduler.init_args.T_max=3"),
        ("--cluster.sbatch+=--gpus-per-node=2", "--cluster.sbatch+=--gpus-per-node=2"),
        ("--cluster.server-sbatch+=--gpus-per-node=2", "--cluster.server_sbatch+=--gpus-per-node=2"),
        ("--run_name=my-run", "--run_name=my-run"),
        ("--config=my-run.yaml", "--config=my-run.yaml"),
        ("--model.init-args.network.dict-kwargs.a-key=1", "--model.init_args.network.dict_kwargs.a-key=1"),
        ("--cluster.kubernetes.volumes./runs-2=a-claim", "--cluster.kubernetes.volumes./runs-2=a-claim"),
        (
            "--cluster.kubernetes.resources.ephemeral-storage=1Gi",
            "--cluster.kubernetes.resources.ephemeral-storage=1Gi",
        ),
        ("--help-full", "--help_full"),
        ("my-file.yaml", "my-file.yaml"),
        ("-c", "-c"),
        ("--", "--"),
        ("-1", "-1"),
    ],
)
def test_dashes_of_an_option_become_underscores_and_values_stay(word, expected):
    assert with_underscores([word]) == [expected]


def test_options_of_the_configuration_accept_dashes(run_cli):
    words = ["--config", "quickstart", "--trainer.max-epochs", "7", "--run-name=my-run", "--stop.warning-grace=1:30"]
    code, output = run_cli("fit", *words, "--print-config")
    assert code == 0, output
    config = yaml.safe_load(output)
    assert (config["trainer"]["max_epochs"], config["run_name"], config["stop"]["warning_grace"]) == (7, "my-run", 90)
