"""What goes wrong while a run is built or runs is said once, in a line where that says it all."""

import errno
import itertools
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torchvision.models import resnet18

from cnnstrategies import ConfigurationError
from cnnstrategies.cli import main
from cnnstrategies.commands.front.given import given
from cnnstrategies.commands.run import lightning_cli
from cnnstrategies.commands.run.errors import check_checkpoint, check_nulls, explain_parse_error
from cnnstrategies.commands.run.failures import explain_build_error, explain_run_error, refusal_in
from cnnstrategies.errors import causes
from cnnstrategies.paramserver.core.view import RemovedError, RunEnded, ServersUnreachableError

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"


def raised(function) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


def wrapped() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "events.out")
    except OSError as error:
        raise RuntimeError("unexpected pos 64 vs 0") from error


LINES = {
    "ours": (ConfigurationError("num_classes=1:\n a classifier"), "num_classes=1: a classifier"),
    "disk": (raised(wrapped), "No space left on device: events.out; make room, and go on with --ckpt_path=last"),
    "channels": (
        raised(lambda: nn.Conv2d(3, 4, 3)(torch.zeros(2, 1, 8, 8))),
        "the network takes images with 3 channels, and those of the data have 1",
    ),
    "another network": (
        raised(lambda: nn.Linear(2, 3).load_state_dict(nn.Linear(3, 3).state_dict())),
        "ckpt_path: the checkpoint is of another network than `model` describes: size mismatch for weight",
    ),
    "gone": (
        FileNotFoundError(errno.ENOENT, "No such file or directory", b"runs/digits/events"),
        "No such file or directory: runs/digits/events: its folder is not there, or no longer; a run needs its own",
    ),
    "another file": (FileNotFoundError(errno.ENOENT, "No such file or directory", "labels.csv"), None),
    "read-only": (
        OSError(errno.EROFS, "Read-only file system", "/mnt/runs"),
        "Read-only file system: /mnt/runs; give the right to it, or let results go elsewhere",
    ),
    "read-only configuration": (
        TypeError("File is not creatable since parent directory not writable: '/mnt/config.yaml'"),
        "cannot write /mnt/config.yaml: give the right to it",
    ),
    "package": (ModuleNotFoundError("Requirement 'mlflow>=1.0.0' not met."), "a package is missing: "),
    "user's": (ValueError("boom"), None),
    "no such metric to stop by": (
        RuntimeError(
            "Early stopping conditioned on metric `valid_loss` which is not available. Pass in or modify your "
            "`EarlyStopping` callback to use any of the following: `lr-SGD`, `a_step`, `val_acc`, `val_loss`"
        ),
        "monitor of EarlyStopping: the module does not log 'valid_loss'; did you mean 'val_loss'? logged: val_acc, v",
    ),
    "no such metric to keep by": (
        MisconfigurationException(
            "`ModelCheckpoint(monitor='valid_acc')` could not find the monitored key in the returned metrics: "
            "['val_acc', 'epoch']. HINT: Did you call `log('valid_acc', value)` in the `LightningModule`?"
        ),
        "monitor of ModelCheckpoint: the module does not log 'valid_acc'; did you mean 'val_acc'? logged: epoch, ",
    ),
    "interval": (
        ValueError(
            "`val_check_interval` (100) must be less than or equal to the number of the training batches (2). If you"
        ),
        "trainer.val_check_interval=100: an epoch has 2 batches; give no more, a part such as 0.5, or set ",
    ),
    "no rate to find": (
        AttributeError(
            "When using the learning rate finder, either `model` or `model.hparams` should have one of these fields: "
            "('lr', 'learning_rate'). If your model has a different name for the learning rate, set it with"
        ),
        "trainer.callbacks: LearningRateFinder sets lr or learning_rate of the model, which has neither: leave it out",
    ),
    "port": (
        RuntimeError(
            "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: "
            "-98, name: EADDRINUSE, message: address already in use"
        ),
        "MASTER_PORT=29500: another program has this port: set a free one, or, on a single machine, none",
    ),
    "inner channels": (raised(lambda: nn.Conv2d(64, 4, 3)(torch.zeros(2, 32, 8, 8))), None),
}


@pytest.mark.light
@pytest.mark.parametrize(("error", "line"), LINES.values(), ids=LINES.keys())
def test_a_line_where_it_says_it_all_and_a_traceback_where_not(error, line):
    said = explain_run_error(error)
    assert (said is None) if line is None else said.startswith(line)


def exceeds(limit: int, most: int, function) -> None:
    """Does something that a limit of the system does not allow."""
    if os.getuid() == 0:
        os.setuid(65534)  # That of processes does not count for root.
    resource.setrlimit(limit, (most, most))
    function()


EXCEEDED = {
    "files": ((resource.RLIMIT_NOFILE, 4, lambda: [os.open("/", 0) for _ in range(5)]), "Too many open files", "n"),
    "threads": ((resource.RLIMIT_NPROC, 1, threading.Thread(target=int).start), "can't start new thread", "u"),
    "processes": (
        (resource.RLIMIT_NPROC, 1, lambda: subprocess.run(["true"], check=True)),
        "[Errno 11] Resource temporarily unavailable",
        "u",
    ),
    "memory": ((resource.RLIMIT_AS, 1 << 20, lambda: bytearray(1 << 28)), "Cannot allocate memory", "v"),
    "torch's": ((resource.RLIMIT_AS, 1 << 20, lambda: torch.empty(1 << 28)), "can't allocate memory", "v"),
}


@pytest.mark.parametrize(("what", "said", "letter"), EXCEEDED.values(), ids=EXCEEDED.keys())
def test_a_limit_of_the_system_is_named(what, said, letter):
    line = explain_run_error(raised(lambda: exceeds(*what))) or ""
    assert re.match(
        rf"{re.escape(said)}: this process, or its user, may have [\d,]+ .* \(ulimit -{letter}\): allow", line
    )


def test_memory_that_torchs_import_lacks_is_named_in_a_line():
    command = f"ulimit -v 1000000; exec {sys.executable} {ROOT / 'cli.py'} validate --config quickstart"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(
        "cnnstrategies: error: failed to map segment: this process, or its user, may have 1,0"
    )
    assert ended.stderr.count("\n") == 1


@pytest.mark.light
def test_errors_that_have_led_to_each_other_are_looked_at_once():
    """As when a handler raises what it has caught, from an error that it made of it."""
    first, second = OSError(errno.ENOENT, "No such file or directory"), ValueError("it is gone")
    first.__cause__, second.__context__ = second, first
    assert list(itertools.islice(causes(first), 3)) == [first, second]


@pytest.mark.light
def test_what_a_spawned_rank_has_raised_is_explained_by_its_text():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File x\n{}\n"
    ours = "cnnstrategies.errors.ConfigurationError: broken image a.png:\n cut"
    channels = "RuntimeError: Given groups=1, expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead"
    assert refusal_in(text.format(ours)) == "broken image a.png: cut"
    assert refusal_in(text.format(channels)).startswith("the network takes images with 3 channels")
    plateau = (
        "lightning.fabric.utilities.exceptions.MisconfigurationException: ReduceLROnPlateau conditioned on metric a"
    )
    assert refusal_in(text.format(f"{plateau} which is: ['b']")).endswith("does not log 'a'; logged: b")
    full = "OSError: [Errno 28] No space left on device"
    assert refusal_in(text.format(full)).startswith("No space left on device; make room")
    assert refusal_in(text.format(f"{full}: b'runs/events'")).startswith("No space left on device: runs/events; make")
    assert refusal_in(text.format("ValueError: boom")) is None
    assert refusal_in(text.format("KeyboardInterrupt")) is None


MODULE = "from lightning.pytorch import LightningModule\n\nclass Lit(LightningModule):\n    pass\n"
REFUSED = {
    "predict --model=mine.Lit": "predict: Lit has no forward that maps images to logits: give it one, such as",
    "fit --model=mine.Litt": "model: cannot use 'mine.Litt': module 'mine' has no attribute 'Litt'; did you mean Lit?",
    "fit --model=nowhere.Lit": "model: cannot use 'nowhere.Lit': No module named 'nowhere'",
    "fit --trainer.accelerator=gpu": "No supported gpu backend found: with --trainer.accelerator=cpu it runs here",
    "fit --trainer.logger=WandbLogger": "lightning.pytorch.loggers.WandbLogger: a package is missing: pip install '",
    "fit --model.init_args.network.init_args.in_channels=3": (
        "the network takes images with 3 channels, and those of the data have the shape (1, 8, 8): set model.init_args."
        "network.init_args.in_channels=1"
    ),
    "fit --ckpt_path=page.ckpt": "ckpt_path: page.ckpt is no checkpoint: it begins with b'not found'",
    "quantize": "no ckpt_path: give the checkpoint, --ckpt_path FILE",
}


def test_what_cannot_run_is_refused_in_a_line(quick, monkeypatch, capfd):
    Path("mine.py").write_text(MODULE)
    Path("page.ckpt").write_text("not found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, line in REFUSED.items():
        command, *options = words.split()
        with pytest.raises(SystemExit) as stopped:
            main([command, *quick, *options])
        assert stopped.value.code == 2
        said = "".join(capfd.readouterr())
        assert said.startswith(f"cnnstrategies: error: {line}"), words
        assert said.count("\n") == 1


@pytest.mark.light
def test_weights_of_other_classes_are_told_of_a_new_last_layer():
    error = raised(lambda: resnet18(weights="DEFAULT", num_classes=2))
    assert explain_build_error(error) == (
        "weights: trained for 1000 classes, and num_classes=2: class_path: cnnstrategies.pretrained.pretrained with "
        "the network's name keeps the weights and makes the last layer new"
    )


MISSING = "the following arguments are required: "
SUBTYPES = "Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>]\n  Given value: "
PARSED = [
    (
        "Parser key \"allow\":\n  Expected a <class 'list'>. Got value: precision",
        [],
        "allow: 'precision' is not accepted; it must be a list, as in [precision]",
    ),
    (
        'Parser key "trainer.strategy":\n  Expected a dot import path string: parameter_server_fork',
        [],
        "trainer.strategy: no class 'parameter_server_fork'; to give this strategy arguments write "
        "ParameterServerStrategy",
    ),
    (
        f"{MISSING}in_channels, kernel_size",
        ["--model.network=torch.nn.Conv2d"],
        "model.network: torch.nn.Conv2d needs in_channels and kernel_size: give --model.network.in_channels and "
        "--model.network.kernel_size",
    ),
    (
        f"{MISSING}monitor",
        ["--trainer.callbacks+=EarlyStopping"],
        "trainer.callbacks: EarlyStopping needs monitor: give --trainer.callbacks.monitor",
    ),
    (f"{MISSING}in_channels", [], "a class in the configuration needs in_channels: give that among its init_args"),
    (
        f"{MISSING}data, model",
        [],
        "no data and model: give a configuration, --config FILE, or the name of a recipe, as",
    ),
    # Only commands with a trainer put their name before it.
    *(
        (
            f"{MISSING}{command}model",
            ["--trainer.max_epochs=3", "--data=DigitsDataModule"],
            "no model: the configuration needs model as `cnnstrategies configs quickstart` has it, or --model CLASS",
        )
        for command in ("", "fit.")
    ),
    (f"{MISSING}model", ["--model=mine.Wraps"], "model: mine.Wraps needs model: give --model.model"),
    (
        f"{SUBTYPES}mine.Old",
        [],
        "'mine.Old' is not accepted; it must be LightningModule. It is a LightningModule of pytorch_lightning, which "
        "this package does not use: write `from lightning.pytorch import LightningModule` in place of",
    ),
    (f"{SUBTYPES}torch.nn.Conv2d", [], "'torch.nn.Conv2d' is not accepted; it must be LightningModule"),
]


class Wraps:
    def __init__(self, model: object) -> None: ...


@pytest.mark.light
def test_what_the_parser_refuses_is_said_in_a_line(monkeypatch):
    old = type("LightningModule", (), {"__module__": "pytorch_lightning.core.module"})
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Old=type("Old", (old,), {}), Wraps=Wraps))
    for message, words, line in PARSED:
        assert explain_parse_error(message, words).startswith(line)


NULLS = {
    "optimizer.init_args.lr": "float or Tensor",
    "label_smoothing": "float",
    "network.init_args.widths": "Sequence[int]",
}
TAKEN = [
    *("model.init_args.lr_scheduler", "trainer.max_epochs", "trainer.logger.init_args.version", "trainer.callbacks"),
    *("checkpoint.monitor", "model.init_args.compile_backend", "data.init_args.batch_size"),
]


@pytest.mark.light
def test_null_is_refused_where_a_value_is_needed():
    for key, types in NULLS.items():
        with pytest.raises(ConfigurationError) as refusal:
            check_nulls(given([QUICKSTART, f"--model.init_args.{key}=null"]))
        assert str(refusal.value) == (
            f"model.init_args.{key}: null is not accepted; it must be {types}, or be left out"
        )
    resnet = ["--model.init_args.network=torchvision.models.resnet18", "--model.init_args.network.init_args.weights="]
    check_nulls(given([QUICKSTART, *(f"--{key}=null" for key in TAKEN), resnet[0], f"{resnet[1]}null"]))


PLACES = {
    "model: {class_path: ImageClassifier, num_classes: 3}": (
        "run.yaml: model.num_classes stands beside class_path: ImageClassifier; arguments of a class go under "
        "init_args: write model.init_args.num_classes"
    ),
    "trainer: {callbacks: [{class_path: EarlyStopping, monitor: val_loss}]}": (
        "run.yaml: trainer.callbacks.monitor stands beside class_path: EarlyStopping; arguments of a class go under "
        "init_args: write trainer.callbacks.init_args.monitor"
    ),
    "data: {class_path: DigitsDataModule, init_arg: {seed: 1}}": (
        "run.yaml: data.init_arg stands beside class_path: DigitsDataModule; did you mean 'init_args'?"
    ),
    "trainer:\n  devices: [1\n": "config: run.yaml is not YAML: while parsing ",
    "": "config: run.yaml is empty: a configuration has keys, as in ",
    "# a": "config: run.yaml is empty: a configuration has keys, as in ",
    "- a": "config: run.yaml holds a list alone: a configuration has keys, as in ",
}


@pytest.mark.light
def test_a_file_that_cannot_be_meant_is_refused():
    for text, line in PLACES.items():
        Path("run.yaml").write_text(text)
        with pytest.raises(ConfigurationError) as refusal:
            given([QUICKSTART, "--config=run.yaml"])
        assert str(refusal.value).startswith(line)


def test_null_is_null_for_what_a_class_in_a_class_takes(run_cli, quick):
    """A builder of torchvision takes no weights, and a text is not the text None."""
    resnet = ["--model.init_args.network=torchvision.models.resnet18", "--model.init_args.network.init_args.weights"]
    timm = ["--model.init_args.compile_backend=null", "--trainer.logger.init_args.version=null"]
    code, output = run_cli("fit", *quick, *resnet, "null", *timm, "--print_config")
    assert code == 0, output
    assert "weights: null" in output
    assert "None" not in output


CHECKPOINTS = {
    "runs": "ckpt_path: 'runs' is a folder; give one of its files, such as runs/version_0/last.ckpt",
    "empty": "ckpt_path: 'empty' is a folder; it has no .ckpt files: give a file",
    "foo://bucket/x.ckpt": "ckpt_path: foo://bucket/x.ckpt cannot be read (ValueError: Protocol not known: foo)",
    "memory://x.ckpt": "ckpt_path: memory://x.ckpt is not there, or cannot be reached from here",
    "http://127.0.0.1:9/x.ckpt": "ckpt_path: http://127.0.0.1:9/x.ckpt is not there, or cannot be reached from here",
}


def test_a_checkpoint_that_cannot_be_read_is_refused(monkeypatch):
    Path("empty").mkdir()
    Path("runs/version_0").mkdir(parents=True)
    for name in ("best", "last"):
        Path(f"runs/version_0/{name}.ckpt").touch()
    for path, line in CHECKPOINTS.items():
        with pytest.raises(ConfigurationError) as refusal:
            check_checkpoint(path)
        assert str(refusal.value).startswith(line)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigurationError, match=r"s3://bucket/x.ckpt: a package is missing: pip install 's3fs'$"):
        check_checkpoint("s3://bucket/x.ckpt")
    Path("empty/.metadata").touch()
    check_checkpoint("empty")  # A checkpoint of shards.


MINE = """
import os
import torch
from lightning.pytorch import Callback


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank in {ranks}:
            {what}
"""
BOOM = "raise ValueError('boom')"
CHANNELS = "torch.nn.Conv2d(3, 4, 3)(batch[0])"


def fit(ranks, what, strategy="ddp", **variables):
    Path("mine.py").write_text(MINE.format(ranks=ranks, what=what))
    command = [sys.executable, str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"]
    options = [
        "--trainer.callbacks+=mine.Fails",
        f"--trainer.strategy={strategy}",
        "--trainer.enable_progress_bar=false",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:.", **variables}
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.warm
@pytest.mark.parametrize(
    "ranks", [pytest.param((0, 1), id="all_ranks"), pytest.param((1,), id="rank_1", marks=pytest.mark.cluster)]
)
def test_an_error_of_the_user_appears_once_with_its_traceback(ranks):
    ended = fit(ranks, BOOM)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("ValueError: boom") == 1
    assert ended.stderr.count("Traceback") == 1
    assert "mine.py" in ended.stderr


@pytest.mark.warm
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", (0, 1)),
        ("ddp_fork", (1,)),
        pytest.param("ddp", (1,), marks=pytest.mark.cluster),
        pytest.param("parameter_server", (0, 1), marks=pytest.mark.cluster),
    ],
)
def test_what_a_line_can_say_appears_once_without_a_traceback(strategy, ranks):
    ended = fit(ranks, CHANNELS, strategy)
    assert ended.returncode == 2, ended.stderr
    # Torch sends SIGTERM to the ranks that are left of those that it has started.
    lines = [line for line in ended.stderr.splitlines() if line and not line.startswith("SIGTERM: stopping")]
    assert len(lines) == 1
    assert lines[0].startswith("cnnstrategies: error: the network takes images with 3 channels")


@pytest.mark.cluster
@pytest.mark.warm
def test_who_debugs_sees_where_it_comes_from():
    ended = fit((1,), CHANNELS, CNNSTRATEGIES_DEBUG="1")
    assert ended.returncode != 0
    assert "mine.py" in ended.stderr


@pytest.mark.warm
def test_a_killed_rank_is_named_in_one_line():
    """Also where a rank has spoken that knows no more than that a connection is lost."""
    spoken = "__import__('cnnstrategies.runtime.processes').runtime.processes.first_to_fail(1)"
    ended = fit((1,), f"{spoken}; os.kill(os.getpid(), 9)")
    assert ended.returncode == 1, ended.stderr
    assert "The run cannot go on: rank 1 was ended by SIGKILL, as the system does when memory is short" in ended.stderr
    assert "Traceback" not in ended.stderr


WHY = "worker 1 had no answer"
ENDED = [
    *((kind(WHY), 1, f"The run cannot go on: {WHY}\n") for kind in (ServersUnreachableError, RemovedError, RunEnded)),
    (RunEnded("every worker has left", clean=True), 0, "Nothing is left to do: every worker has left\n"),
]


def test_why_a_server_worker_does_not_go_on_is_one_line(monkeypatch, capsys):
    for error, code, said in ENDED:

        def fail(_, error=error):
            raise error

        monkeypatch.setattr(lightning_cli.CLI, "__init__", fail)
        with pytest.raises(SystemExit) as ended:
            lightning_cli.main(["fit"])
        assert (ended.value.code, capsys.readouterr().err) == (code, said)
