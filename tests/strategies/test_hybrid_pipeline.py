"""The hybrid pipeline trains the same model as one process, with what users switch on."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from digit_runs import ADAMW, assert_same_run, logged, train

from cnnstrategies.pipeline.stage import StageModule
from cnnstrategies.strategies import HybridPipelineStrategy

hybrid = partial(HybridPipelineStrategy, start_method="fork")
CASES: dict[str, tuple[HybridPipelineStrategy, int, dict[str, Any]]] = {
    "adamw, clipping by value, 1-1 compiled": (
        hybrid(replicas=[1, 1], cuts=["1"], microbatches=4), 2,
        {"model": {"optimizer": ADAMW}, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "sgd, clipping, 2-1 gpipe": (
        hybrid(
            replicas=[2, 1], cuts=["2"], microbatches=4, schedule="gpipe", placement="replicas",
            activation_checkpointing="always",
        ), 3, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "devices", "options"), CASES.values(), ids=CASES)
def test_equals_one_process(
    strategy: HybridPipelineStrategy, devices: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()

    def note(stage: StageModule, backend: str, dynamic: bool) -> None:
        (here / f"compiled by {os.getpid()}").write_text(backend)

    monkeypatch.setattr(StageModule, "compile", note)  # What compiled stages train: `test_compiled.py`.
    single = train("single", **options)
    if "model" in options:
        options["model"]["compile_backend"] = "aot_eager"
    assert_same_run(train("piped", strategy, devices, **options), single)
    for got, expected in zip(logged("piped"), logged("single"), strict=True):
        assert got == pytest.approx(expected, rel=1e-6)
    backends = [path.read_text() for path in Path().glob("compiled by *")]
    assert backends == ["aot_eager"] * (2 if "model" in options else 0)
