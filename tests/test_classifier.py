"""`ImageClassifier`: the contract of the strategies, its loss, metrics, schedulers and checkpoints."""

import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import DigitsDataModule, SyntheticDataModule
from cnnstrategies.data.preprocessing import IMAGENET, Preprocessing
from cnnstrategies.models.classifier import balanced_weights
from cnnstrategies.models.logits import main_logits
from cnnstrategies.networks import SmallCNN
from cnnstrategies.pretrained import TRAINED_WITH
from tests.conftest import PlainCNN, quiet_trainer

SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731


@pytest.mark.light
def test_loss_is_mean_cross_entropy_for_classes_and_mixtures():
    model = ImageClassifier(nn.Identity(), num_classes=4, label_smoothing=0.1)
    logits, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1)
    torch.testing.assert_close(model.loss(logits, targets), expected)
    torch.testing.assert_close(model.loss(logits, F.one_hot(targets, 4).float()), expected)
    halves = (model.loss(logits[:3], targets[:3]) + model.loss(logits[3:], targets[3:])) / 2
    torch.testing.assert_close(halves, expected)


@pytest.mark.light
def test_a_weighted_loss_does_not_depend_on_the_division_of_the_batch():
    weights = [1.0, 0.0, 2.0, 5.0]
    model = ImageClassifier(nn.Identity(), num_classes=4, class_weights=weights, label_smoothing=0.1)
    logits, targets = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 3])
    each = [model.loss(logits[[i]], targets[[i]]) for i in range(6)]
    torch.testing.assert_close(model.loss(logits, targets), torch.stack(each).mean())
    model = ImageClassifier(nn.Identity(), num_classes=4, class_weights=weights)
    losses = F.cross_entropy(logits, targets, reduction="none") * torch.tensor(weights)[targets]
    torch.testing.assert_close(model.loss(logits, targets), losses.mean())
    torch.testing.assert_close(model.loss(logits, F.one_hot(targets, 4).double()), losses.mean())
    assert "class_weights" not in model.state_dict()


@pytest.mark.light
@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_multilabel_and_regression_have_loss_metrics_and_predictions(task):
    model = ImageClassifier(nn.Identity(), num_classes=3, task=task)
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 3), torch.randint(2, (40, 3)).float()
    each = [model.loss(logits[[i]], targets[[i]]) for i in range(40)]
    torch.testing.assert_close(model.loss(logits, targets), torch.stack(each).mean())
    model.log = lambda *_, **__: None
    for part in range(0, 40, 8):
        model.validation_step((logits[part : part + 8], targets[part : part + 8]), 0)
    measured = {name: float(metric.compute()) for name, metric in model.val_metrics.items()}
    predicted = model.predict_step((logits, torch.arange(40)), 0)
    if task == "multilabel":
        weighted = ImageClassifier(nn.Identity(), num_classes=3, task=task, class_weights=[1.0, 3.0, 1.0])
        ones = torch.tensor([[0.0, 1.0, 0.0]])
        assert float(weighted.loss(0 * ones, ones)) == pytest.approx(5 / 3 * math.log(2)), (
            "the weight applies to classes that are present"
        )
        torch.testing.assert_close(model.loss(logits, targets), F.binary_cross_entropy(logits.sigmoid(), targets))
        torch.testing.assert_close(predicted["probabilities"], logits.sigmoid())
        ranked = targets.gather(0, logits.argsort(dim=0, descending=True))
        precision = ranked.cumsum(dim=0) / torch.arange(1, 41)[:, None]
        assert measured["map"] == pytest.approx(float(((precision * ranked).sum(0) / ranked.sum(0)).mean()), abs=0.02)
        both = ((logits > 0) * targets).sum(dim=0)
        assert measured["f1"] == pytest.approx(
            float((2 * both / ((logits > 0).sum(0) + targets.sum(0))).mean()), rel=1e-5
        )
        assert model.quality in measured
    else:
        torch.testing.assert_close(model.loss(logits, targets), F.mse_loss(logits, targets))
        assert torch.equal(predicted["values"], logits)
        assert measured["mae"] == pytest.approx(float((logits - targets).abs().mean()), rel=1e-5)
        assert measured["rmse"] == pytest.approx(float(F.mse_loss(logits, targets)) ** 0.5, rel=1e-5)
    assert measured["loss"] == pytest.approx(float(model.loss(logits, targets)), rel=1e-5)
    with pytest.raises(
        ConfigurationError, match=rf"task={task} needs targets of shape \(40, 3\), .* has targets of shape \(40,\)"
    ):
        model.loss(logits, targets[:, 0])


@pytest.mark.light
@pytest.mark.parametrize("task", ["classes", "multilabel", "regression"])
def test_predictions_are_means_over_mirror_images(task):
    """The network returns an image of one row as logits, so that the mirror image has the reversed logits."""
    model = ImageClassifier(nn.Flatten(), num_classes=3, task=task, test_flips=True)
    model.log = lambda *_, **__: None
    logits = 10 * torch.randn(20, 3)
    targets = torch.randint(3, (20,)) if task == "classes" else torch.randint(2, (20, 3)).float()
    values = {"classes": lambda x: x.softmax(1), "multilabel": torch.sigmoid, "regression": lambda x: x}[task]
    mean = (values(logits.double()) + values(logits.double().flip(1))) / 2
    predicted = model.predict_step((logits[:, None, None], torch.arange(20)), 0)
    torch.testing.assert_close(predicted[model.learning_task.predicted], mean.float())
    measured = model.validation_step((logits[:, None, None], targets), 0)["logits"]
    torch.testing.assert_close(values(measured), mean.float())
    loss = {
        "classes": lambda: F.nll_loss(mean.log(), targets),
        "multilabel": lambda: F.binary_cross_entropy(mean, targets.double()),
        "regression": lambda: F.mse_loss(mean, targets.double()),
    }[task]()
    assert float(model.val_metrics["loss"].compute()) == pytest.approx(float(loss), rel=1e-4)
    assert torch.equal(model.training_step((logits[:, None, None], targets), 0), model.loss(logits, targets))


@pytest.mark.light
def test_auxiliary_logits_count_with_their_weight():
    model = ImageClassifier(nn.Identity(), num_classes=4, aux_weight=0.3)
    main, auxiliary, targets = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6) % 4
    expected = F.cross_entropy(main, targets) + 0.3 * F.cross_entropy(auxiliary, targets)
    torch.testing.assert_close(model.loss((main, auxiliary), targets), expected)
    assert main_logits((main, auxiliary)) is main
    googlenet = torchvision.models.googlenet(weights=None, num_classes=4, init_weights=False)
    images = torch.randn(2, 3, 64, 64)
    outputs = googlenet.train()(images)
    assert torch.isfinite(model.loss(outputs, targets[:2]))
    assert main_logits(googlenet.eval()(images)).shape == (2, 4)


@pytest.mark.light
def test_preprocessing_that_differs_from_the_pretrained_weights_warns():
    network = nn.Flatten()
    setattr(network, TRAINED_WITH, Preprocessing(mean=(0.5, 0.5, 0.5)))
    data = DigitsDataModule()
    with warnings.catch_warnings(action="error"):
        ImageClassifier(network, 10).check_data(data)
        data.preprocessing = Preprocessing(mean=(0.5, 0.5, 0.5), image_size=32)
        ImageClassifier(network, 10).check_data(data)
    data.preprocessing = IMAGENET
    with pytest.warns(
        UserWarning, match=r"expect the preprocessing bilinear, mean 0.5 .* has the preprocessing bilinear, mean 0.485"
    ):
        ImageClassifier(network, 10).check_data(data)


def test_one_fit_with_mixing(tmp_path):
    torch.manual_seed(0)
    options = {"mixup_alpha": 0.3, "cutmix_alpha": 1.0, "channels_last": True, "class_weights": "balanced"}
    model = ImageClassifier(SmallCNN(10), 10, SGD, **options)
    seen = []
    step = model.training_step
    model.training_step = lambda batch, batch_idx: seen.append(batch) or step(batch, batch_idx)
    run = quiet_trainer(max_epochs=2, limit_train_batches=2)
    run.fit(model, datamodule=DigitsDataModule(batch_size=32))
    training_images_are_mixed_and_channels_last(model, seen)
    metrics_are_those_of_all_validation_samples(model, run)
    a_checkpoint_made_in_python_loads_with_weights_only(model, run, tmp_path)


def training_images_are_mixed_and_channels_last(model, seen):
    assert any(((targets > 0).sum(1) == 2).any() for _, targets in seen), "a batch's weight may be 1 by chance"
    for images, targets in seen:
        assert targets.shape == (32, 10)
        torch.testing.assert_close(targets.sum(1), torch.ones(32))
        assert images.is_contiguous(memory_format=torch.channels_last)
    weight = model.network.block2[0][0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def metrics_are_those_of_all_validation_samples(model, run):
    data = run.datamodule
    logits, targets = [], []
    model.eval()
    with torch.no_grad():
        for images, classes in data.val_dataloader():
            logits.append(model.network(images))
            targets.append(classes)
    logits, targets = torch.cat(logits), torch.cat(targets)
    metrics = run.callback_metrics
    trained = data.train_source.targets.numpy()
    balanced = torch.tensor([len(trained) / (10 * (trained == label).sum()) for label in range(10)])
    losses = F.cross_entropy(logits, targets, reduction="none") * balanced[targets]
    assert float(metrics["val_loss"]) == pytest.approx(float(losses.mean()), rel=1e-5)
    assert float(metrics["val_acc"]) == pytest.approx(float((logits.argmax(1) == targets).float().mean()))
    top5 = (logits.topk(5).indices == targets[:, None]).any(1).float().mean()
    assert float(metrics["val_acc_top5"]) == pytest.approx(float(top5))
    assert {"train_loss", "train_acc", "train_loss_step"} <= set(metrics)


def a_checkpoint_made_in_python_loads_with_weights_only(model, run, tmp_path):
    run.save_checkpoint(tmp_path / "model.ckpt")
    stored = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert stored["hyper_parameters"]["mixup_alpha"] == 0.3
    assert "network" not in stored["hyper_parameters"]
    again = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True, network=SmallCNN(10))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert all(name.startswith("network.") for name in stored["state_dict"])


@pytest.mark.light
def test_schedulers_advance_by_step_epoch_or_metric():
    def scheduled(schedule, *interval):
        return ImageClassifier(PlainCNN(), 10, SGD, schedule, *interval).configure_optimizers()["lr_scheduler"]

    halves = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    assert [scheduled(halves, *interval)["interval"] for interval in ((), ("step",))] == ["epoch", "step"]
    plateau = scheduled(lambda optimizer: ReduceLROnPlateau(optimizer, "val_loss"), "step")
    assert (plateau["monitor"], plateau["interval"]) == ("val_loss", "epoch")


def test_the_network_can_be_compiled_and_keeps_its_names(monkeypatch):
    pools, compiled, compiling = [], [], torch.nn.Module.compile
    monkeypatch.setattr(torch, "set_num_threads", pools.append)
    noted = lambda module, **options: (compiled.append((module, options)), compiling(module, **options))  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", noted)
    model = ImageClassifier(PlainCNN(), 10, SGD, compile_backend="eager")
    names = list(model.state_dict())
    run = quiet_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    run.fit(model, datamodule=DigitsDataModule())
    assert list(model.state_dict()) == names
    assert compiled == [(model.network, {"backend": "eager"})]
    assert pools == [1], "a forked rank creates its thread pool before backward's threads would do so all at once"


MISTAKES = {
    "num_classes=1: use at least 2": {"num_classes": 1, "task": "multilabel"},
    r"label_smoothing=1.0 is outside \[0, 1\)": {"label_smoothing": 1.0},
    "cutmix_alpha=-0.5 is negative; use 0": {"cutmix_alpha": -0.5},
    r"class_weights=\[1.0, 2.0\]: give 10 numbers that are at least 0": {"class_weights": [1.0, 2.0]},
    "cutmix_alpha need task=classes, but the model has task=multilabel": {
        "task": "multilabel",
        "mixup_alpha": 0.1,
    },
    "class_weights=balanced needs task=classes, but the model has task=multilabel": {
        "task": "multilabel",
        "class_weights": "balanced",
    },
    "class_weights cannot be used with task=regression": {"task": "regression", "class_weights": [1.0] * 10},
}


def test_setup_resets_the_metrics():
    model = ImageClassifier(SmallCNN(num_classes=10, in_channels=1), num_classes=10)
    model.trainer = quiet_trainer()
    metric = model.test_metrics["loss"]
    metric.total.share_memory_()  # A spawned rank gets its tensors from torch in shared memory.
    metric.update(torch.tensor(2.0), 1)
    model.setup("test")
    assert not metric.total.is_shared(), "a rank's values would be added to the values of all ranks"
    assert metric.total == 0


@pytest.mark.light
def test_a_mistake_is_refused():
    for message, options in MISTAKES.items():
        with pytest.raises(ConfigurationError, match=message):
            ImageClassifier(nn.Identity(), **{"num_classes": 10, **options})


@pytest.mark.light
def test_classes_that_cannot_be_counted_are_refused():
    data = DigitsDataModule()
    data.setup("fit")
    data.train_source.targets[data.train_source.targets == 7] = 0
    for module, message in (
        (data, "the class 7 has no training images: give a list of 10 numbers"),
        (SyntheticDataModule(20), "SyntheticDataModule does not give the classes of all training images"),
        (None, "a run without a data module does not give"),
    ):
        with pytest.raises(ConfigurationError, match=f"class_weights=balanced: {message}"):
            balanced_weights(module, 10)
