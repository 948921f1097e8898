"""``cnnstrategies scaling`` trains a user's configuration on one process and on two, and finds what is planted."""

import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT

from cnnstrategies import ConfigurationError
from cnnstrategies.commands.front.options import parse_scaling
from cnnstrategies.commands.scaling import command
from cnnstrategies.commands.scaling.probes import load_alone, one_sample, sum_alone
from cnnstrategies.commands.scaling.run import HostReads, larger
from cnnstrategies.planning.scaling import measuring

PLANTED = """
import time

from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger


class Sleeper(Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.12)


class SlowLogger(DummyLogger):
    def log_metrics(self, *args, **kwargs):
        time.sleep(0.04)
"""


@pytest.mark.warm
def test_what_is_planted_is_named_with_its_seconds_and_what_helps_is_written(tmp_path, monkeypatch, capsys):
    """On one process and two; what was tried is faster, and `fit` could take it."""
    (tmp_path / "planted.py").write_text(textwrap.dedent(PLANTED))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(measuring, "LOADING_SECONDS", 0.2)
    trainer = {
        "strategy": "ddp_fork",
        "logger": [{"class_path": "planted.SlowLogger"}],
        "callbacks": [{"class_path": "planted.Sleeper"}],
        "log_every_n_steps": 1,
    }
    (tmp_path / "planted.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    words = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--config", "planted.yaml"]
    command.main(["scaling", *words, "--devices", "1,2", "--minutes", "0.05", "--picture", "drawn.png"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1. Sleeper takes long" in said
    assert "Loggers take long" in said
    assert "`log_every_n_steps: 50`" in said
    assert "(strong scaling)" in said
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.light
def test_the_remedies_that_are_settings_are_tried_and_those_that_were_faster_kept(capsys):
    from rich.console import Console

    from cnnstrategies.planning.candidates import Effect
    from cnnstrategies.planning.scaling.reasons import Reason
    from cnnstrategies.planning.tune.contest import Row
    from cnnstrategies.planning.tune.race import Verdict

    def reason(cause, **values):
        return Reason(
            cause, "", "", 2.0, {name.replace("__", "."): value for name, value in values.items()}, Effect.NONE
        )

    verdicts = {"loader": Verdict("faster", 2.0, 1.9, 2.1, 25), "logger": Verdict("no difference", 1.0, 0.99, 1.01, 25)}

    class Pretended:
        def __init__(self):
            self.rows = {}

        def run(self, settings):
            self.rows = {one.name: Row(one, verdicts[one.name]) for one in settings}

    why = [
        reason("word only"),
        reason("loader", data__workers=2),
        reason("validation", trainer__check_val_every_n_epoch=3),
        reason("logger", trainer__log_every_n_steps=50),
    ]
    helped = command._tried(Pretended(), why, Console(soft_wrap=True))  # noqa: SLF001
    assert [one.name for one in helped] == ["loader"]
    said = capsys.readouterr().out
    assert "2.00 times as fast [1.90, 2.10]: faster" in said
    assert "no step is quicker with it" in said


@pytest.mark.light
def test_its_options_are_told_from_the_configurations():
    options, words = parse_scaling(["--devices", "4,1,2", "--config", "mine.yaml", "--try", "--trainer.devices", "4"])
    assert options.devices == [1, 2, 4]
    assert options.tries
    assert words == ["--config", "mine.yaml", "--trainer.devices", "4"]
    with pytest.raises(ConfigurationError, match="devices=1,x"):
        parse_scaling(["--devices", "1,x"])


@pytest.mark.light
def test_reads_of_values_are_counted_by_the_line_that_asks():
    loss = torch.ones(1)
    with HostReads() as reads:
        loss.item()
        line = sys._getframe().f_lineno - 1  # noqa: SLF001
        if loss * 2 > 1:
            loss.add_(1)
        loss.mean()
    assert reads.places == {f"test_scaling_command.py:{line}": 1, f"test_scaling_command.py:{line + 2}": 1}


@pytest.mark.light
def test_a_batch_has_each_sample_several_times():
    batch = {"images": torch.arange(6.0).reshape(2, 3), "name": "one", "scale": torch.tensor(2.0)}
    made = larger(batch, 3)
    assert torch.equal(made["images"], batch["images"].repeat(3, 1))
    assert made["name"] == "one"
    assert made["scale"].ndim == 0


class Waiting(torch.utils.data.Dataset):
    """Samples that need time, of the processor or not."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 300

    def __getitem__(self, index):
        return self.make(index)


@pytest.mark.light
def test_a_sample_that_waits_is_told_from_one_that_computes():
    import time

    def wait(index):
        time.sleep(0.005)
        return torch.zeros(3)

    def compute(index):
        ends = time.process_time() + 0.005
        while time.process_time() < ends:
            pass
        return torch.zeros(3)

    for make, share in ((wait, (0.0, 0.5)), (compute, (0.7, 1.1))):
        loader = torch.utils.data.DataLoader(Waiting(make), 4)
        found = one_sample(loader)
        assert found["seconds"] >= 0.005
        assert share[0] <= found["processor"] / found["seconds"] <= share[1]
    assert one_sample(SimpleNamespace(dataset=None)) == {}


@pytest.mark.light
def test_a_loader_alone_is_timed_and_what_has_no_group_is_not_summed():
    loader = torch.utils.data.DataLoader(Waiting(lambda index: torch.zeros(3)), 4)
    assert load_alone(loader, 0.05)["rate"] > 0
    assert load_alone([], 0.05)["rate"] is None
    assert sum_alone(torch.nn.Linear(3, 2)) == {"seconds": None, "bytes": 32}
