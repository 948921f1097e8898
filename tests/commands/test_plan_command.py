"""``cnnstrategies plan`` on the configurations that users start from."""

import json
import re
from pathlib import Path

import pytest

from cnnstrategies.commands.plan import main
from cnnstrategies.errors import ConfigurationError

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def test_prints_the_stages_and_writes_picture_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, trace = tmp_path / "plan.png", tmp_path / "plan.json"
    main(
        [
            "plan",
            "--config",
            QUICKSTART,
            "--search",
            "true",
            "--bandwidth",
            "1000",
            f"--plot={plot}",
            f"--trace={trace}",
        ]
    )
    text = capsys.readouterr().out
    assert "stage 0: block1" in text
    assert "on 2 devices" in text
    assert "ata parallel" in text
    assert "for 64 samples" in text, "the global batch, whatever the devices"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_number_of_devices_must_be_known() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.devices=auto: a plan needs their number"):
        main(["plan", "--config", QUICKSTART, "--trainer.devices", "auto"])


def test_link_is_measured_when_no_bandwidth_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", QUICKSTART, "--batch_size", "16"])
    assert "for 16 samples" in capsys.readouterr().out


def test_what_a_hybrid_pipeline_asks_for_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {
        "class_path": "cnnstrategies.strategies.hybrid_pipeline.HybridPipelineStrategy",
        "init_args": {"replicas": [2, 1], "cuts": ["pool1"], "microbatches": 6, "schedule": "gpipe"},
    }
    arguments = {
        "config": QUICKSTART,
        "trainer.devices": 3,
        "trainer.strategy": json.dumps(strategy),
        "bandwidth": 1000,
    }
    main(["plan", *[f"--{name}={value}" for name, value in arguments.items()]])
    text = capsys.readouterr().out
    assert "stage 0: block1_0_0 to pool1" in text
    assert "for 60 samples" in text, "of the global batch of 64, 6 equal microbatches hold 60"
    assert "on 3 devices, gpipe" in " ".join(text.split())


def test_microbatches_are_those_of_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", QUICKSTART, "--bandwidth", "1000", "--trainer.strategy", "hybrid_pipeline"]
    for sizes, expected in (
        (["--data.init_args.global_batch_size=32"], "for 32 samples .* with 4 microbatches"),
        (["--trainer.accumulate_grad_batches=2"], "for 32 samples .* with 4 microbatches"),
        (
            ["--data.init_args.batch_size=16", "--data.init_args.global_batch_size=null"],
            "for 16 .* with 2 microbatches",
        ),
    ):
        main(["plan", *arguments, *sizes])
        assert re.search(expected, " ".join(capsys.readouterr().out.split())), sizes
