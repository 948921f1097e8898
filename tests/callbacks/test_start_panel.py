"""The panel at a run's start. `strategies/test_equality.py` checks it under each strategy."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cnnstrategies import ImageClassifier, ImageSegmenter
from cnnstrategies.callbacks import StartPanel, start_panel
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.data.preprocessing import IMAGENET
from cnnstrategies.networks import SmallCNN, UNet
from cnnstrategies.planning.held_bytes import HeldBytes
from cnnstrategies.planning.memory import PeakMemory
from cnnstrategies.shares.samplers import ShuffledBatches
from cnnstrategies.strategies import CompressedDDPStrategy
from cnnstrategies.strategies.predicted_memory import PredictedMemory
from cnnstrategies.strategies.protocol import StrategyFacts, facts_of
from tests.conftest import quiet_trainer
from tests.runner import panels

WHOLE = sum(parameter.numel() for parameter in SmallCNN(10, widths=[32, 64]).parameters())
HYBRID = [
    "--trainer.strategy.class_path=HybridPipelineStrategy",
    "--trainer.strategy.init_args.start_method=fork",
    "--trainer.strategy.init_args.replicas=[2,1]",
    "--trainer.strategy.init_args.cuts=[block1]",
    "--trainer.devices=3",
    "--data.init_args.global_batch_size=32",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.max_epochs=1",
    "--trainer.enable_model_summary=true",
]


@pytest.mark.cluster  # This test takes long.
def test_a_pipeline_with_batch_normalisation(run_cli, quick, monkeypatch):
    """The panel names the configured microbatches and their size; Lightning's summary shows the whole network."""
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, flush=True))
    asked = ["--trainer.strategy.init_args.microbatches=8"]
    partial = ["--data.init_args.val_split=0.97"]  # The second of the two batches has 11 images.
    code, output = run_cli("fit", *quick, *HYBRID, *asked, *partial)
    assert code == 0, output
    rows = panels.rows(output)
    assert rows["global batch"] == "32 images = 2 loading processes x 16; 2 steps an epoch"
    assert rows["images"] == "43, 10 classes\nvalidation: 1,395, 10 classes"
    assert rows["microbatches"] == "8 of 4 images (as configured)"
    assert rows["stage 0"] == "block1 on ranks 0 to 1: 9,632 parameters"
    assert rows["stage 1"] == f"pool1 to classifier on rank 2: {WHOLE - 9632:,} parameters"
    assert rows["parameters"] == f"{WHOLE:,}; 9,632 to {WHOLE - 9632:,} on a device"
    assert rows["unlike one device"].splitlines() == [
        "BatchNorm normalises over each microbatch's 4 images",
        "random draws of the network (as in dropout) are each microbatch's own",
    ]
    assert output.count("BatchNorm normalises over 4 images: a batch of 32 is cut into 8 microbatches.") == 1
    assert output.count("is cut into") == 1, "only the first batch warns"
    assert f"Total params: {WHOLE / 1000:.1f} K" in output
    assert output.count("Total params") == 1


def test_each_trainer_function_in_a_script_says_what_it_does(capsys):
    """The script uses plain loaders without a data module, and Lightning's own Trainer."""
    loader = DataLoader(TensorDataset(torch.randn(20, 1, 8, 8), torch.randint(10, (20,))), 6)
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "num_sanity_val_steps": 2}
    trainer = quiet_trainer(callbacks=[StartPanel()], **options)
    model = ImageClassifier(SmallCNN(10), 10, channels_last=True)
    model.network.classifier.requires_grad_(False)
    trainer.fit(model, loader, loader)
    trainer.validate(model, loader)
    trainer.test(model, loader)
    trainer.predict(model, loader)
    output = capsys.readouterr().out
    frozen = sum(p.numel() for p in model.network.classifier.parameters())
    whole = sum(p.numel() for p in model.parameters())
    training = panels.rows(output)
    assert training == {
        "strategy": "single_device",
        "devices": "1 CPU process on 1 node",
        "global batch": "12 images = 6 x 2 accumulated; 2 steps an epoch, 20 of 20 samples",
        "parameters": f"{whole:,}, of which {whole - frozen:,} are trained",
        "precision": "32-true, channels_last",
        "unlike one device": "nothing",
    }
    for title in ("Validation", "Test", "Prediction"):
        rows = panels.rows(output, title)
        assert rows["batch"] == "6 images"
        assert rows.keys() == training.keys() - {"global batch", "unlike one device"} | {"batch"}
    titles = ("Training", "Validation", "Test", "Prediction")
    assert [output.splitlines().count(title) for title in titles] == [1, 1, 1, 1], (
        "validation during training has no panel"
    )


def trainer_like(strategy, world=1, loading=None, **attributes):
    attributes = {"num_nodes": 1, "accumulate_grad_batches": 1, "num_training_batches": 10, **attributes}
    attributes = {"train_dataloader": None, **attributes}
    sampling = None if world == 1 else {"num_replicas": loading or world, "rank": 0}
    return SimpleNamespace(strategy=strategy, world_size=world, distributed_sampler_kwargs=sampling, **attributes)


@pytest.mark.light
def test_the_global_batch_is_what_a_step_is_made_of():
    steps = "; 10 steps an epoch"
    for size, world, loading, accumulated, expected in (
        (8, 1, 1, 1, f"8 images{steps}"),
        (8, 4, 4, 1, f"32 images = 4 processes x 8{steps}"),
        (8, 4, 1, 1, f"8 images, loaded by one process{steps}"),
        (8, 4, 3, 1, f"24 images = 3 loading processes x 8{steps}"),
        (8, 4, 4, 3, "96 images = 4 processes x 8 x 3 accumulated; 4 steps an epoch"),
        (8, 4, 1, 5, "40 images = 8 x 5 accumulated, loaded by one process; 2 steps an epoch"),
        (None, 4, 4, 1, f"4 processes x one batch of each{steps}"),
    ):
        trainer = trainer_like(None, world, loading, accumulate_grad_batches=accumulated)
        assert start_panel.training_batch(trainer, size) == ("global batch", expected)
    dealt = SimpleNamespace(sampler=ShuffledBatches(640, 64, 0, 3, 0, drop_last=False))
    unequal = trainer_like(None, 3, train_dataloader=dealt)
    assert start_panel.training_batch(unequal, 22) == ("global batch", f"64 images = 3 processes x 21 or 22{steps}")
    part = DistributedSampler(range(48), num_replicas=4, rank=0)
    half = trainer_like(None, 2, num_training_batches=2, train_dataloader=DataLoader(range(48), 8, sampler=part))
    assert start_panel.training_batch(half, 8)[1].endswith("; 2 steps an epoch, 24 of 48 samples")
    endless = trainer_like(None, num_training_batches=float("inf"))
    assert start_panel.training_batch(endless, 8) == ("global batch", "8 images")


@pytest.mark.light
def test_the_panel_says_what_is_logged_seldom_and_computed_slowly():
    for batches, interval, rows in ((10, 10, 0), (10, 11, 1), (float("inf"), 50, 0)):
        logging = {"log_every_n_steps": interval, "loggers": [None], "fast_dev_run": False}
        shown = start_panel.logging_interval(trainer_like(None, num_training_batches=batches, **logging))
        assert len(shown) == rows
        assert rows == 0 or shown[0][1].endswith("set trainer.log_every_n_steps=10 to see each epoch")
    for device, precision, is_slow in (
        ("cpu", "16-true", True),
        ("cpu", "bf16-true", False),
        ("cuda", "16-true", False),
    ):
        trainer = trainer_like(SimpleNamespace(root_device=torch.device(device)), precision=precision)
        assert ("more slowly" in start_panel.precision(trainer, nn.Linear(2, 2))) == is_slow


@pytest.mark.light
def test_the_panel_names_images_that_chose_the_checkpoint_and_the_preprocessing():
    data = SyntheticDataModule(num_samples=20, num_classes=3)
    data.setup("test")
    data.left_out[".gif"], data.left_out["hidden"] = 2, 0
    trainer = trainer_like(None, state=SimpleNamespace(fn=TrainerFn.TESTING), datamodule=data)
    ((name, text),) = start_panel.images(trainer)
    assert name == "images"
    first, second, third = text.splitlines()
    assert first == "2" or first.startswith("2, "), "without a folder"
    assert second == "the validation images, by which best.ckpt was chosen: there are no separate test images"
    assert third == "left out: 2 .gif"
    data.test_source = data.train_source
    assert "best.ckpt" not in start_panel.images(trainer)[0][1]
    data.prepare_as(IMAGENET)
    how = "bilinear, mean 0.485 0.456 0.406, std 0.229 0.224 0.225"
    mismatch = "set by SyntheticDataModule; the pretrained weights expect 224 pixels"
    assert start_panel.images(trainer)[1] == ("preprocessing", f"{mismatch}, {how}")
    data.preprocessing, data.resize, data.image_shape = IMAGENET, 37, (3, 32, 32)
    assert start_panel.images(trainer)[1] == ("preprocessing", f"37 to 32 pixels, {how}")


def test_parameters_of_divided_networks_are_counted_as_a_whole():
    module = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5))
    assert start_panel.count_parameters(module) == (16, 16), "lazy parameters have no size yet"
    sharded = trainer_like(FSDPStrategy(), 4)
    assert start_panel.parameters(sharded, (1600, 1600)) == "1,600; divided over 4 devices"
    # The network is created in configure_model and divided at once, so nothing can count its parameters.
    assert start_panel.whole_network(sharded, module, (0, 0)) is None
    assert start_panel.parameters(sharded, None) == "not counted; divided over 4 devices"
    assert start_panel.whole_network(trainer_like(DDPStrategy(), 2), module, (0, 0)) == (16, 16)
    own_strategy = type("MyOwn", (DDPStrategy,), {})()
    names = [
        facts_of(strategy).display_name for strategy in (own_strategy, CompressedDDPStrategy(compression="powersgd"))
    ]
    assert names == ["MyOwn", "ddp_powersgd"], "the names that users write"

    class Divided(StrategyFacts):
        parameters_per_device = (1000, 600, 1000)

    assert start_panel.parameters(trainer_like(Divided(), 3), (2600, 2600)) == "2,600; 600 to 1,000 on a device"


def test_the_predicted_peak_and_its_parts_are_shown(run_cli, quick):
    code, output = run_cli("fit", *quick, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2")
    assert code == 0, output
    total, parts = panels.rows(output)["memory"].split(" MB of tensors, predicted: ")
    sizes = {name: float(size) for name, size in (part.split() for part in parts.split(", "))}
    assert "activations" in sizes
    assert sum(sizes.values()) == pytest.approx(float(total), abs=0.05 * (len(PeakMemory().__dict__) + 1))


def test_a_line_says_that_the_real_peak_differs(monkeypatch):
    """On a GPU torch's allocator counts the real peak. A simulated device counts nothing."""
    monkeypatch.setattr(start_panel, "predicted_memory", lambda *_: PredictedMemory([PeakMemory(10**9, 10**8)]))
    monkeypatch.setattr(start_panel, "print_table", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    lines = []
    monkeypatch.setattr(start_panel, "rank_zero_info", lines.append)
    expected = "Peak memory of rank 0 after 20 batches: 1,300 MB, 18% more than the predicted 1,100 MB"
    for kind, real, printed in (
        ("cuda", 13 * 10**8, [expected]),
        ("cuda", 12 * 10**8, []),
        ("cuda", 0, []),
        ("cpu", 13 * 10**8, []),
    ):
        lines.clear()
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, real=real: real)
        monkeypatch.setattr(SingleDeviceStrategy, "root_device", torch.device(kind))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        trainer, panel, module = quiet_trainer(max_epochs=0), StartPanel(), SmallCNN(10)
        trainer.state.fn = TrainerFn.FITTING
        panel.on_train_start(trainer, module)
        for _ in range(25):
            panel.on_train_batch_end(trainer, module, None, None, 0)
        assert lines == printed, (kind, real)


class Counts(Callback):
    """Predicts the peak of a step, and counts the bytes of the tensors that training makes."""

    def on_train_start(self, trainer, pl_module):
        self.predicted, *_ = start_panel.predicted_memory(trainer, 8).peaks
        self.held = HeldBytes().__enter__()
        self.state = sum(tensor.nbytes for tensor in (*pl_module.parameters(), *pl_module.buffers()))

    def on_train_end(self, trainer, pl_module):
        self.held.__exit__(None, None, None)

    def counted(self):
        return self.held.most + self.state


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_the_peak_is_predicted_in_each_precision(precision):
    torch.manual_seed(0)
    module = ImageSegmenter(UNet(4, widths=(8, 16, 32)), 4, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    module.example_input_array = torch.zeros(2, 3, 32, 32)
    data = TensorDataset(torch.randn(24, 3, 32, 32), torch.zeros(24, 32, 32, dtype=torch.long))
    counts = Counts()
    with panels.compared_peaks(counts.counted, 1.0, 1.3) as (callbacks, lines):
        trainer = quiet_trainer(precision=precision, max_epochs=1, callbacks=[*callbacks, counts])
        trainer.fit(module, DataLoader(data, 8))
    assert counts.predicted.total == pytest.approx(counts.counted(), rel=0.1)
    assert counts.predicted.activations > 0.4 * counts.predicted.total
    assert lines == [panels.line_on_memory(counts.predicted.total, 1.3 * counts.counted())]
