"""``cnnstrategies sweep``: what it searches, and what is left of it; its runs only pretend here."""

import contextlib
import multiprocessing
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from cnnstrategies.commands.tune import sweep
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.sweeping.plan import Choice, Range, read

with contextlib.suppress(ImportError):  # Here, so that it is imported once for all tests.
    from optuna.trial import TrialState

    from cnnstrategies.sweeping import report, study, trial

LR = "model.init_args.optimizer.init_args.lr"
PLAN = {"parameters": {LR: {"low": 0.001, "high": 1.0, "log": True}}, "metric": "val_acc", "trials": 4}
# As good as its learning rate is near to 0.1, and better after each validation.
FIT = """
    import json, os, socket, sys
    lr = float(open(sys.argv[-1]).read().split("lr: ")[1].split("}")[0])
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(os.environ["CNNSTRATEGIES_SWEEP"])
    talk = talk.makefile("rw")
    for epoch in range(3):
        talk.write(json.dumps({"value": epoch - abs(lr - 0.1)}) + "\\n")
        talk.flush()
        if json.loads(talk.readline())["prune"]:
            break
"""


def write(**changes):
    Path("sweep.yaml").write_text(yaml.safe_dump({**PLAN, **changes}))


@pytest.fixture
def pretend(monkeypatch):
    """Has the trials run a few lines in place of ``fit``."""
    pytest.importorskip("optuna")
    draw = report.draw

    def become(text=FIT, draws=False):
        Path("pretended_fit.py").write_text(textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setattr(trial, "COMMAND", "pretended_fit")
        monkeypatch.setattr(report, "draw", draw if draws else lambda *args: None)

    become()
    return become


def run():
    sweep.main(["sweep", "--config", "quickstart", "--sweep", "sweep.yaml"])


def trials(**changes):
    write(**changes)
    return study.Study(Path("sweeps/sweep"), read(Path("sweep.yaml"))).trials


def test_the_best_values_are_written_and_a_second_call_goes_on(pretend, capsys):
    write(trials=2)
    run()
    pretend(draws=True)
    before = trials(trials=2)
    write()
    run()
    done = trials()
    assert [one.params for one in done[:2]] == [one.params for one in before]
    assert len(done) == 4
    best = min(done, key=lambda one: abs(one.params[LR] - 0.1))
    text = Path("sweeps/sweep/best.yaml").read_text()
    assert yaml.safe_load(text) == {"model": {"init_args": {"optimizer": {"init_args": {"lr": best.params[LR]}}}}}
    assert f"# trial {best.number} of 4: val_acc" in text
    assert Path("sweeps/sweep/sweep.png").is_file()
    assert "--config sweeps/sweep/best.yaml" in capsys.readouterr().out


def test_a_bad_trial_ends_early_and_a_failed_one_does_not_end_the_sweep(pretend, monkeypatch):
    pretend(FIT + "    sys.exit('the third has an accident' if '0002' in sys.argv[-1] else 0)\n")

    class Last(study.NopPruner):
        def prune(self, study, trial):
            return trial.number == 3 and trial.last_step == 1

    monkeypatch.setattr(study, "pruner_of", lambda plan: Last())
    write()
    run()
    done = trials()
    assert [one.state for one in done] == [*[TrialState.COMPLETE] * 2, TrialState.FAIL, TrialState.PRUNED]
    assert done[2].user_attrs["cause"] == "the third has an accident"
    assert [len(one.intermediate_values) for one in done] == [3, 3, 3, 2]


def test_what_was_stopped_is_done_again_and_the_rest_is_kept(pretend, capsys):
    """Ctrl-C in the third trial: its program ends, and the next call begins with its values."""
    stop = f"if '0002' in sys.argv[-1]: os.kill({os.getpid()}, {int(signal.SIGINT)}); sys.stdin.read(); signal.pause()"
    pretend(FIT.replace("import json", "import signal, json") + f"    {stop}\n")
    write()
    run()
    assert "Stopped: the same command goes on" in capsys.readouterr().out
    interrupted = trials()[2]
    assert Path("sweeps/sweep/best.yaml").is_file()
    pretend()
    run()
    done = trials()
    assert [one.number for one in done] == [0, 1, 3, 4]
    assert done[2].params == interrupted.params


@pytest.mark.parametrize("code", [-signal.SIGTERM, 128 + signal.SIGTERM])
def test_a_trial_that_is_stopped_before_the_sweep_is_has_not_failed(pretend, code):
    """A scheduler signals all processes of a job, in any order."""
    end = f"os.kill(os.getpid(), {int(signal.SIGTERM)})" if code < 0 else f"sys.exit({code})"
    pretend(FIT + f"    if '0002' in sys.argv[-1]: {end}\n")
    write()
    run()
    stopped = trials()[2]
    pretend()
    run()
    done = trials()
    assert [(one.number, one.state) for one in done] == [(n, TrialState.COMPLETE) for n in (0, 1, 3, 4)]
    assert done[2].params == stopped.params


def test_several_programs_share_the_trials(pretend):
    """Each trial is one program's, and together they do as many as were asked for."""
    write(trials=6)
    programs = [multiprocessing.get_context("fork").Process(target=run) for _ in range(2)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
    assert [program.exitcode for program in programs] == [0, 0]
    assert [one.number for one in trials(trials=6)] == list(range(6))


def test_a_configuration_that_does_not_run_is_given_up(pretend):
    pretend("raise SystemExit('no such data')")
    write(trials=20)
    with pytest.raises(ConfigurationError, match=r"first 3 trials have failed, the last with: no such data"):
        run()


def test_a_folder_is_of_one_sweep(pretend):
    write(trials=1)
    run()
    write(trials=1, metric="val_loss")
    with pytest.raises(ConfigurationError, match="another --folder"):
        run()


@pytest.mark.light
def test_the_file_says_where_values_lie():
    text = """
    parameters:
      a.lr: {low: 1e-4, high: 1, log: true}
      a.width: {low: 8, high: 64, step: 8}
      a.name: [adam, null, 1e-3, true]
    metric: val_loss
    trials: 3
    """
    Path("sweep.yaml").write_text(textwrap.dedent(text))
    plan = read(Path("sweep.yaml"))
    assert plan.parameters == {
        "a.lr": Range(1e-4, 1, log=True),
        "a.width": Range(8, 64, 8),
        "a.name": Choice(("adam", None, 1e-3, True)),
    }
    assert not plan.parameters["a.lr"].whole
    assert plan.parameters["a.width"].whole
    assert not plan.most, "less loss is better"


@pytest.mark.light
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {LR: {"low": 1, "high": 0.1}}}, "line 4: .*lr: low: 1 is not below high: 0.1"),
        ({"parameters": {LR: {"low": 0, "high": 0.1, "log": True}}}, "must be above 0"),
        ({"parameters": {LR: {"low": 0}}}, "needs high"),
        ({"parameters": {LR: [[1, 2]]}}, "one value is accepted"),
        ({"pruner": "quick"}, "median or halving or hyperband or none"),
        ({"trails": 3}, "did you mean 'trials'"),
        ({"parameters": {"model.init_args.optimiser": [1, 2]}}, "optimiser"),
        ({"parameters": {"modle": [1, 2]}}, "did you mean 'model'"),
    ],
)
def test_a_mistaken_sweep_is_refused_before_any_trial(changes, words):
    write(**changes)
    with pytest.raises(ConfigurationError, match=words):
        run()
    assert not Path("sweeps").exists()


@pytest.mark.light
def test_without_optuna_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    write()
    with pytest.raises(ConfigurationError, match=r"\.\[sweep\]"):
        run()
