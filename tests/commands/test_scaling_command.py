"""``cnnstrategies scaling`` trains a configuration with planted slow parts on one and two processes, and names them."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from cnnstrategies import ConfigurationError
from cnnstrategies.callbacks import Pruning, SampleWeights
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.scaling import command, probes, run
from cnnstrategies.commands.scaling.probes import load_alone, one_sample, sum_alone
from cnnstrategies.commands.scaling.recorder import TimelineRecorder
from cnnstrategies.commands.scaling.run import (
    HostReads,
    ScalingControl,
    checkpoint_folder,
    default_callbacks,
    larger,
    part_of_hook,
)
from cnnstrategies.commands.tune.step_control import run_rank
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.scaling import measuring
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.timeline import (
    BARRIER,
    BUFFERS,
    EXCHANGE,
    GRADIENTS,
    LOG,
    WAITING,
)
from cnnstrategies.planning.tune.contest import CandidateResult
from cnnstrategies.planning.tune.race import RaceVerdict
from cnnstrategies.planning.tune.trial import FAILED, TrialError
from cnnstrategies.recording import clock as clock_module
from tests.conftest import ROOT

PLANTED = """
import time

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger


class Sleeper(Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.12)


class SlowLogger(DummyLogger):
    ended = None

    def log_metrics(self, *args, **kwargs):
        # A tenth of each step, so that the logger is a cause also on a slow machine.
        part = 0.0 if self.ended is None else 0.1 * (time.monotonic() - self.ended)
        time.sleep(max(0.04, part))
        self.ended = time.monotonic()

"""
OWN = """
import dataclasses

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor


class Own(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def configure_optimizers(self):
        made = SGD(self.parameters(), 0.1)
        once = OneCycleLR(made, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        each = {"scheduler": once, "interval": "step"}
        return [made], [each, {"scheduler": ReduceLROnPlateau(made), "monitor": "val_loss"}]

    def training_step(self, batch, batch_idx):
        return self.net(batch.rows).square().mean()


class Meets(Own):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64)

    def training_step(self, batch, batch_idx):
        loss = self.norm(self.net(batch.rows)).sum()
        self.trainer.strategy.barrier()
        self.log("loss", loss, sync_dist=True)
        request = torch.distributed.all_reduce(loss.detach(), async_op=True)
        request.wait()
        return loss


class Plain(Own):
    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.2)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.randn(20, 64), 8, collate_fn=lambda rows: Batch(torch.stack(rows)))

    def val_dataloader(self):
        return DataLoader(torch.randn(8, 64), 8)
"""


@pytest.fixture
def scaling(tmp_path, monkeypatch, capsys):
    """Return a function that measures a configuration with the code of `planted.py` as briefly as possible."""
    (tmp_path / "planted.py").write_text(PLANTED + OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(measuring, "LOADING_SECONDS", 0.2)

    def run(devices, config, *words):
        (tmp_path / "planted.yaml").write_text(yaml.safe_dump(config))
        short = ["--devices", devices, "--minutes", "0.01"]
        COMMANDS["scaling"].run([*words, "--config", "planted.yaml", *short])
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.cluster  # Takes 20 s of processor time.
@pytest.mark.warm
def test_planted_causes_are_named_with_their_seconds(scaling, tmp_path):
    """The runs have one process and a pipeline of two stages, in which both ranks see the whole batch."""
    stages = {"replicas": [1, 1], "cuts": ["pool1"], "microbatches": 4, "start_method": "fork"}
    trainer = {
        "strategy": {"class_path": "cnnstrategies.strategies.HybridPipelineStrategy", "init_args": stages},
        "logger": [{"class_path": "planted.SlowLogger"}],
        "callbacks": [{"class_path": "planted.Sleeper"}],
        "log_every_n_steps": 1,
    }
    quickstart = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
    output = scaling("1,2", {"trainer": trainer}, *quickstart, "--picture", "drawn.png")
    assert "1. Sleeper takes long" in output
    assert "Loggers take long" in output
    assert "`log_every_n_steps: 50`" in output
    assert "(strong scaling)" in output
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.light
def test_the_line_of_the_user_that_raised_an_error_is_named(capsys):
    """The named line is the user's, not a line of Lightning or torch before or after it in the traceback."""

    class Breaks:
        def on_train_batch_end(self):
            torch.nn.Linear(3, 2)(torch.ones(1, 4))

    with pytest.raises(SystemExit, match="1"):
        run_rank(lambda: Breaks().on_train_batch_end())
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"{FAILED}RuntimeError: ")
    assert re.search(r", in .*Breaks.on_train_batch_end \(test_scaling_command.py:\d+\)$", last_line)


@pytest.mark.warm
def test_a_users_module_can_train_for_more_steps_than_configured(scaling, monkeypatch):
    """The module's batches have a class of its own, so the command cannot make them larger.

    The timelines contain each collective of a step, and the lines of the user's code that run collectives.
    """
    measured = []
    monkeypatch.setattr(command, "reasons", lambda measurements: measured.append(measurements) or [])
    trainer = {"accelerator": "cpu", "max_epochs": 1, "strategy": "ddp_fork"}
    output = scaling("2", {"trainer": trainer, "model": "planted.Meets", "data": "planted.Data"})
    assert float(re.search(r"samples/s ([\d.]+)", output)[1]) > 1
    assert measured[0].facts.larger is None
    run = measured[0].largest
    step = [BUFFERS, BARRIER, LOG, LOG, EXCHANGE, GRADIENTS]
    kinds = [segment.collective for segment in run.rounds[0].ranks[1] if segment.collective in step]
    assert kinds == step * run.rounds[0].steps
    lines = (PLANTED + OWN).splitlines()
    numbers = {kind: int(run.places((kind,))[0].partition(":")[2]) for kind in (BARRIER, LOG, EXCHANGE)}
    places = {kind: lines[number - 1].strip() for kind, number in numbers.items()}
    assert places == {
        BARRIER: "self.trainer.strategy.barrier()",
        LOG: 'self.log("loss", loss, sync_dist=True)',
        EXCHANGE: "request.wait()",
    }
    for rank in run.ranks:
        assert rank.own == pytest.approx(sum(rank.parts[name] for name in rank.parts if not name.startswith(WAITING)))
        assert rank.parts[WAITING + LOG] > 0


@pytest.mark.light
def test_waits_are_separated_from_a_ranks_own_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = clock_module.PartClock(lambda action: None)
    recorder = TimelineRecorder(clock)

    def work(part, seconds):
        clock.begin(part)
        now[0] += seconds
        clock.end()

    def wait(kind, seconds):
        recorder.begin_waiting(kind)
        now[0] += seconds
        recorder.end_waiting()

    wait("barrier", 7.0)  # The clock does not run yet.
    clock.run()
    work("forward", 3.0)
    wait("barrier", 2.0)
    line = sys._getframe().f_lineno - 1  # noqa: SLF001
    wait("buffers", 0.5)
    work("backward", 4.0)
    recorder.end_backward()
    work("backward", 4.0)
    recorder.end_backward()
    work("data", 1.0)
    recorder.end([1.0])
    kinds = [(segment["collective"], segment["work"], segment["waited"]) for segment in recorder.segments]
    assert kinds == [
        (BARRIER, {"forward": 3.0}, 2.0),
        (BUFFERS, {}, 0.5),
        (GRADIENTS, {"backward": 3.0}, 1.0),
        (GRADIENTS, {"backward": 3.0}, 1.0),
        ("", {"data": 1.0}, 0.0),
    ]
    # The place is the line that waits, which is in the function above.
    assert recorder.segments[0]["place"].startswith("test_scaling_command.py:")
    assert int(recorder.segments[0]["place"].partition(":")[2]) < line


@pytest.mark.light
def test_the_disk_of_the_configured_checkpoints_is_measured(tmp_path):
    """The folder may not exist before the run."""
    configured = ModelCheckpoint(dirpath=tmp_path / "run" / "checkpoints")
    assert checkpoint_folder([ModelCheckpoint(), configured], "elsewhere") == tmp_path
    (tmp_path / "run").mkdir()
    assert checkpoint_folder([configured], "elsewhere") == tmp_path / "run"
    assert checkpoint_folder([ModelCheckpoint()], str(tmp_path / "run")) == tmp_path / "run"


@pytest.mark.warm
def test_workers_with_dynamic_batches_all_make_the_ordered_steps(scaling):
    """An epoch has three batches, so it ends before one worker has made the ordered steps."""
    arguments = {"mode": "async", "data_dispatch": "dynamic", "start_method": "fork"}
    strategy = {"class_path": "cnnstrategies.strategies.ParameterServerStrategy", "init_args": arguments}
    trainer = {"accelerator": "cpu", "strategy": strategy}
    output = scaling("2", {"trainer": trainer, "model": "planted.Plain", "data": "planted.Data"})
    assert float(re.search(r"samples/s ([\d.]+)", output)[1]) > 1
    assert float(re.search(r"An epoch has .* ([\d.]+) s of validation", output)[1]) >= 0.2, "a batch takes 0.2 s"


@pytest.mark.cluster
@pytest.mark.warm
def test_waits_of_divided_images_are_listed_and_samples_count_once(scaling):
    """One rank of the group loads, so the loaders alone must be measured on this rank only."""
    strategy = {"class_path": "spatial", "init_args": {"start_method": "fork"}}
    output = scaling("1,2", {"trainer": {"strategy": strategy}}, "--config", str(ROOT / "configs" / "quickstart.yaml"))
    assert re.search(r"The global batch stays at 6[0-4](\.\d+)? samples, so .* \(strong scaling\)", output), output
    for row in ("rows of other devices", "sums over the parts"):
        assert float(re.search(rf"{row} 0 ([\d.]+)", output)[1]) > 0
    assert re.search(r"on 2 devices: compute [\d.]+, loader [\d.]+\.", output), output


@pytest.mark.light
@pytest.mark.parametrize(("rank", "loads"), [(0, True), (1, False), (2, True), (3, False)])
def test_only_the_rank_that_loads_for_a_group_measures_its_own_loader(rank, loads, monkeypatch):
    control, answers, measured = ScalingControl(), [], []
    trainer = SimpleNamespace(global_rank=rank, train_dataloader=SimpleNamespace(loader="own"), lightning_module=None)
    monkeypatch.setattr(control, "_trainer", trainer, raising=False)
    monkeypatch.setattr(control, "_ranks_per_batch", 2, raising=False)
    monkeypatch.setattr(control, "say", answers.append)
    monkeypatch.setattr(run, "load_alone", lambda loader, seconds: measured.append(loader) or {"samples": 3})
    control.execute({"probe": "load", "seconds": 1.0})
    assert (answers, measured) == (([{"samples": 3}], ["own"]) if loads else ([{}], []))


@pytest.mark.light
def test_a_step_that_returns_no_loss_is_also_measured():
    control = ScalingControl()
    for outputs in (None, {}, {"loss": torch.ones(1)}, torch.ones(1)):
        control.note_loss(outputs)


@pytest.mark.light
def test_callbacks_that_users_cannot_leave_out_are_not_named_as_causes():
    class Own(Callback):
        pass

    callbacks = [SampleWeights(), Pruning(0.5), Own()]
    hidden = default_callbacks(callbacks, {"Pruning"})
    names = [part_of_hook(f"[Callback]{callback.state_key}.on_train_batch_end", hidden) for callback in callbacks]
    assert names == [None, "callback Pruning", "callback Own"]


@pytest.mark.light
def test_remedies_that_are_settings_are_tried_and_kept_if_faster(capsys):
    """Each remedy is tried alone, and remedies that change learning are not tried."""
    verdicts = {
        "loader": RaceVerdict("faster", 2.0, 1.9, 2.1, 25),
        "logger": RaceVerdict("no difference", 1.0, 0.99, 1.01, 25),
    }
    shares = []

    class Pretended:
        def __init__(self, left):
            shares.append(left)
            self.rows = {}

        def run(self, settings):
            (setting,) = settings
            if setting.name == "threads":
                raise TrialError("out of memory")
            self.rows = {setting.name: CandidateResult(setting, verdicts[setting.name])}

    why = [
        Reason("word only", "", "", 2.0),
        Reason("batch", "", "", 2.0, {"data.batch_size": 128}, Effect.LEARNING),
        Reason("loader", "", "", 2.0, {"data.workers": 2}),
        Reason("validation", "", "", 2.0, {command.BETWEEN_STEPS: 3}),
        Reason("logger", "", "", 2.0, {"trainer.log_every_n_steps": 50}),
        Reason("threads", "", "", 2.0, {"threads": 1}),
        Reason("fourth", "", "", 2.0, {"fourth": 1}),
    ]
    helped = command._faster_settings(Pretended, why, Console(soft_wrap=True))  # noqa: SLF001
    assert [setting.name for setting in helped] == ["loader"]
    assert shares == [3, 2, 1]
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in printed] == [f"`{key}" for reason in why[1:] for key in reason.values]
    for line, words in zip(
        printed,
        (
            "compare the accuracy",
            "2.00 times as fast [1.90, 2.10]: faster",
            "this does not make steps faster",
            "no difference",
            "training fails now even without this setting (out of memory)",
            "only the first 3 settings are tried",
        ),
        strict=True,
    ):
        assert words in line


@pytest.mark.light
def test_options_of_scaling_are_separated_from_the_configuration():
    options, words = COMMANDS["scaling"].parse(
        ["--devices", "4,1,2", "--config", "mine.yaml", "--try", "--trainer.devices", "4"]
    )
    assert options.devices == [1, 2, 4]
    assert options.try_
    assert words == ["--config", "mine.yaml", "--trainer.devices", "4"]
    with pytest.raises(ConfigurationError, match="--devices: 'x' is not accepted; it must be a whole number"):
        COMMANDS["scaling"].parse(["--devices", "1,x"])
    with pytest.raises(ConfigurationError, match="devices=1,0: give numbers of devices"):
        COMMANDS["scaling"].parse(["--devices", "1,0"])


@pytest.mark.light
def test_host_reads_are_counted_by_the_line_that_reads():
    loss = torch.ones(1)
    with HostReads() as reads:
        loss.item()
        line = sys._getframe().f_lineno - 1  # noqa: SLF001
        if loss * 2 > 1:
            loss.add_(1)
        loss.mean()
    assert reads.places == {f"test_scaling_command.py:{line}": 1, f"test_scaling_command.py:{line + 2}": 1}


@pytest.mark.light
def test_a_larger_batch_repeats_each_sample():
    batch = {"images": torch.arange(6.0).reshape(2, 3), "name": "one", "scale": torch.tensor(2.0)}
    made = larger(batch, 3)
    assert torch.equal(made["images"], batch["images"].repeat(3, 1))
    assert made["name"] == "one"
    assert made["scale"].ndim == 0


class Waiting(torch.utils.data.Dataset):
    """Samples that take time, with or without computing."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 300

    def __getitem__(self, index):
        return self.make(index)


@pytest.mark.light
def test_waiting_samples_are_distinguished_from_computing_samples(monkeypatch, tmp_path):
    """Waiting for a core counts as computing. The test simulates the clocks, because real cores are often busy."""
    now = {"wall": 0.0, "processor": 0.0, "queued": 0.0}
    clocks = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["processor"])
    monkeypatch.setattr(probes, "time", clocks)
    status = SimpleNamespace(read_text=lambda: f"0 {now['queued'] * 1e9:.0f} 0")
    monkeypatch.setattr(probes, "Path", lambda path: status)

    def sample(processor, queued):
        def make(index):
            now["wall"] += 0.005
            now["processor"] += processor
            now["queued"] += queued
            return torch.zeros(3)

        return make

    for processor, queued, share in ((0.0, 0.0, 0.0), (0.005, 0.0, 1.0), (0.001, 0.003, 0.8)):
        loader = torch.utils.data.DataLoader(Waiting(sample(processor, queued)), 4)
        measured = one_sample(loader)
        assert measured["seconds"] == pytest.approx(0.005)
        assert measured["processor"] / measured["seconds"] == pytest.approx(share)
    assert one_sample(SimpleNamespace(dataset=None)) == {}


@pytest.mark.light
def test_a_loader_is_timed_alone_and_without_a_group_nothing_is_reduced():
    loader = torch.utils.data.DataLoader(Waiting(lambda index: torch.zeros(3)), 4)
    assert load_alone(loader, 0.05)["rate"] > 0
    assert load_alone([], 0.05)["rate"] is None
    assert sum_alone(torch.nn.Linear(3, 2), 4) == {"seconds": None, "bytes": 8}
