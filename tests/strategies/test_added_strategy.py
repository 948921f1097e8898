"""Tests of added strategies: the documentation's example trains, and facts of other strategies have defaults."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies.protocol import StrategyFacts, facts_of
from tests.conftest import ROOT, PlainCNN, quiet_trainer

PAGE = ROOT / "docs/development/add-a-strategy.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_documented_strategy_trains_with_the_documented_command(run_cli, quick) -> None:
    Path("sign_ddp.py").write_text(blocks("python")[0])
    program, command, *words = shlex.split(blocks("bash")[0])
    assert (program, command) == ("cnnstrategies", "fit")
    short = ["--trainer.max_epochs=1", "--trainer.strategy.start_method=fork"]
    code, output = run_cli("fit", *quick, *words, *short)
    assert code == 0, output
    panel = output[output.index("Training") :]
    assert re.search(r"strategy +ddp_sign\n", panel), panel
    assert re.search(r"vote +the ranks' majority, times 0.02\n", panel)
    assert re.search(r"unlike one device +gradients are majority votes of signs\n", panel)
    assert list(Path("runs").rglob("last.ckpt"))


@pytest.mark.cluster  # This test takes long.
def test_the_documented_strategy_is_checked_with_the_documented_command(run_cli) -> None:
    Path("sign_ddp.py").write_text(blocks("python")[0])
    program, *words = shlex.split(blocks("bash")[1])
    assert program == "cnnstrategies"
    code, output = run_cli(*words)
    assert (code, "NOT equal to one device" in output) == (1, True), output
    assert "unlike one device: gradients are majority votes of signs" in output


def test_the_documented_strategy_trains_without_options(run_cli, quick) -> None:
    Path("sign_ddp.py").write_text(blocks("python")[0])
    strategy = "--trainer.strategy=sign_ddp.SignDDPStrategy"
    code, output = run_cli("fit", *quick, strategy, "--trainer.fast_dev_run=true", "--trainer.devices=1")
    assert code == 0, output


def test_the_documented_strategy_trains_in_python_under_its_registered_name() -> None:
    Path("sign_ddp.py").write_text(blocks("python")[0])
    sys.path.insert(0, ".")
    from sign_ddp import SignDDPStrategy  # type: ignore[import-not-found]

    exec(blocks("python")[1], {"SignDDPStrategy": SignDDPStrategy})
    assert "ddp_sign" in StrategyRegistry
    trainer = quiet_trainer("ddp_sign", 1, max_steps=2)
    assert trainer.strategy.scale == 0.01
    trainer.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())
    assert trainer.global_step == 2


def test_lightnings_strategies_and_subclasses_have_the_facts_of_their_class() -> None:
    new_class = type("MyOwn", (DDPStrategy,), {})
    both = type("Both", (StrategyFacts, FSDPStrategy), {"gradient_weighting": "by_rank"})
    assert [facts_of(kind()).shards_parameters for kind in (DDPStrategy, new_class, FSDPStrategy, both)] == [
        False,
        False,
        True,
        True,
    ]
    assert facts_of(both()).gradient_weighting == "by_rank"
    stages = [DeepSpeedStrategy.__new__(DeepSpeedStrategy) for _ in range(2)]  # DeepSpeed is not installed.
    for strategy, stage in zip(stages, (2, 3), strict=True):
        strategy.config = {"zero_optimization": {"stage": stage}}
    assert [facts_of(strategy).shards_parameters for strategy in stages] == [False, True]
    single = facts_of(SingleDeviceStrategy("cpu"))
    assert (single.environment, single.host_count, single.display_name) == (None, 1, "single_device")
    assert facts_of(new_class()).host_count == 1
    names = [name for name in vars(StrategyFacts) if not name.startswith("_")]
    defaults = facts_of(new_class())
    values = {name: getattr(defaults, name) for name in names}
    attributes = {name: value for name, value in values.items() if not callable(value)}
    assert attributes == {
        **dict.fromkeys(("environment", "server_options", "parameters_per_device", "batch_shares"), None),
        "image_division": None,
        **dict.fromkeys(("pipeline", "traffic", "membership"), None),
        **dict.fromkeys(("connects_hosts", "compiles_network", "shards_parameters", "joined_late"), False),
        "has_global_batches": False,
        "divides_values": False,
        "replicas_agree": True,
        "has_layers_of_one_device": False,
        "gradient_buckets": 0.0,
        "predicted_peaks": (),
        "lighter_plans": (),
        **dict.fromkeys(("divides_by_shares", "may_skip_steps", "only_starts_ranks"), False),
        "steps_in_lockstep": True,
        "display_name": "MyOwn",
        **dict.fromkeys(("host_count", "ranks_per_batch"), 1),
        "gradient_weighting": "equal",
        "step_kind": "replica",
    }


@pytest.mark.light
def test_all_facts_have_a_default_and_a_docstring() -> None:
    members = {name: member for name, member in vars(StrategyFacts).items() if not name.startswith("_")}
    assert len(members) > 20
    assert [name for name, member in members.items() if not member.__doc__] == []
