"""The example notebook trains under every strategy that forks, can be stopped, and trains again in the same kernel."""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from cnnstrategies import ConfigurationError
from cnnstrategies.strategies.pickling import explain_pickling
from tests.conftest import ROOT, quiet_trainer
from tests.runner.forked import kill_group

NOTEBOOK = ROOT / "docs/examples/notebook.ipynb"
FORKING = [name for name, entry in StrategyRegistry.items() if entry["init_params"].get("start_method") == "fork"]
OWN = [name for name in FORKING if StrategyRegistry[name]["strategy"].__module__.startswith("cnnstrategies")]
# One name for each class of strategies; the others differ in options.
CLASSES = {StrategyRegistry[name]["strategy"]: name for name in sorted(OWN, key=len, reverse=True)}
STOPPED = """from pathlib import Path
import os
from lightning.pytorch import Callback

class Began(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero and trainer.current_epoch == 1:
            Path("began").touch()

long = trainer(100_000)
long.callbacks.append(Began())
Path("kernel").write_text(str(os.getpid()))
long.fit(module, data)
"""
AFTER = "print('after', trainer(1).validate(module, data, verbose=False))"


def interrupt() -> None:
    """Do what the stop button does: send SIGINT to the kernel's process group, when the training has begun."""
    deadline = time.monotonic() + 100
    while not Path("began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(int(Path("kernel").read_text()), signal.SIGINT)


def text_of(cell: Any) -> str:
    """Return the text of a cell's outputs."""
    outputs = cell["outputs"]
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") + output.get("evalue", "")
        for output in outputs
    )


@pytest.mark.extra
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="nbclient or ipykernel is not installed; `make test-extras` installs them",
)
@pytest.mark.parametrize("strategy", ["ddp_fork", *CLASSES.values()])
def test_a_notebook_trains_is_stopped_and_trains_again(strategy: str) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.reads(NOTEBOOK.read_text(), 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('"hybrid_pipeline_fork"', repr(strategy))
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (STOPPED, AFTER)]
    notebook.cells[-2].metadata["tags"] = ["raises-exception"]
    threading.Thread(target=interrupt, daemon=True).start()
    nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute(cwd=".")
    assert not kill_group(int(Path("kernel").read_text())), "processes were left behind"
    training, again, stopped, after = [cell for cell in notebook.cells if cell.cell_type == "code"][-4:]
    assert "Epoch 1: 100%" in text_of(training), "the progress bar is shown"
    assert "tensor(" in text_of(training)
    assert float(text_of(again).split("then ")[1]) > 0.8
    assert "Epoch 1" in text_of(stopped)
    assert "after [{'accuracy'" in text_of(after)


def test_strategies_that_cannot_start_from_a_notebook_name_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    for name in OWN:
        for other in (name.removesuffix("_fork"), name.replace("_fork", "_spawn")):
            with pytest.raises(ConfigurationError, match=rf"strategy='{name}', or \w+\(..., start_method='fork'\)"):
                quiet_trainer(other, 2)
        quiet_trainer(name, 2)


def test_ranks_are_not_forked_after_cuda_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = quiet_trainer("ddp_fp16_fork", 2).strategy.launcher
    explain_pickling(launcher, "fork", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigurationError, match=r"has used a GPU, .*restart the kernel"):
        launcher.launch(print, trainer=SimpleNamespace())


@pytest.mark.light
def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
