"""A strategy's registered name accepts the options of the strategy's class."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import _typehints
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from cnnstrategies import ConfigurationError, _jsonargparse_private
from cnnstrategies.cli import main
from cnnstrategies.commands.arguments.keys import configured_keys
from cnnstrategies.commands.run.errors import parameters_of
from cnnstrategies.commands.run.parser import ArgumentParser
from cnnstrategies.commands.run.strategy_names import check_recipe_names, class_path_of, with_help_of_class

PIPELINE = "cnnstrategies.strategies.HybridPipelineStrategy"
SERVED = "cnnstrategies.strategies.ParameterServerStrategy"
# Names of strategies that can be created here; the other strategies need other hardware.
NAMES = [name for name in StrategyRegistry if not re.search("xla|tpu|single", name)]


def parsed(*words):
    """Return the strategy of a command line, parsed with a parser that has only this option."""
    parser = ArgumentParser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--trainer.strategy", type=str | Strategy, default="auto")
    return parser.parse_args(list(words)).trainer.strategy


@pytest.mark.light
@pytest.mark.parametrize("name", NAMES)
def test_every_name_becomes_its_class_with_the_registered_arguments(name):
    registered = StrategyRegistry[name]
    option = next(
        iter(parameters_of(registered["strategy"]).keys() & {"process_group_backend", "stage", "timeout"}), None
    )
    if option is None:
        pytest.skip("the strategy has no argument that a configuration can set")
    value = registered["init_params"].get(option, {"process_group_backend": "gloo", "stage": 1, "timeout": 90}[option])
    strategy = parsed(f"--trainer.strategy={name}", f"--trainer.strategy.{option}={value}")
    assert strategy.class_path == class_path_of(name)
    arguments = strategy.init_args.as_dict()
    arguments.update(strategy.get("dict_kwargs") or {})
    assert {key: arguments[key] for key in registered["init_params"]} == registered["init_params"]


@pytest.mark.light
@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.strategy=hybrid_pipeline", "--trainer.strategy.stages=2"],
        ["--trainer.strategy=hybrid_pipeline", "--trainer.strategy.init_args.stages=2"],
        ["--trainer.strategy.class_path=hybrid_pipeline", "--trainer.strategy.init_args.stages=2"],
        ['--trainer.strategy={"class_path": "hybrid_pipeline", "init_args": {"stages": 2}}'],
        ["--config={class_path: hybrid_pipeline, init_args: {stages: 2}}"],
        ["--config=hybrid_pipeline", "--trainer.strategy.stages=2"],
        ["--config={class_path: hybrid_pipeline, init_args: {stages: 3}}", "--trainer.strategy.stages=2"],
        ["--config=hybrid_pipeline", "--config={init_args: {stages: 2}}"],
        ["--trainer.strategy=ddp", "--trainer.strategy=hybrid_pipeline", "--trainer.strategy.stages=2"],
        [f"--trainer.strategy={PIPELINE}", "--trainer.strategy.stages=2"],
    ],
)
def test_all_ways_to_write_a_strategy_are_equal(words, tmp_path):
    for position, word in enumerate(words):
        option, _, value = word.partition("=")
        if option == "--config":
            file = tmp_path / f"{position}.yaml"
            file.write_text(f"trainer:\n  strategy: {value}\n")
            words[position] = f"--config={file}"
    strategy = parsed(*words)
    assert strategy.class_path == PIPELINE
    assert (strategy.init_args.stages, strategy.init_args.start_method) == (2, "popen")


@pytest.mark.light
def test_a_name_alone_stays_a_name():
    assert parsed("--trainer.strategy=hybrid_pipeline") == "hybrid_pipeline"
    assert (
        parsed("--trainer.strategy=hybrid_pipeline", "--trainer.strategy.stages=2", "--trainer.strategy=ddp") == "ddp"
    )


@pytest.mark.light
def test_the_users_argument_counts_more_than_the_registered_one():
    strategy = parsed("--trainer.strategy=parameter_server_ssp", "--trainer.strategy.max_restarts=1")
    assert strategy.class_path == SERVED
    assert (strategy.init_args.mode, strategy.init_args.staleness, strategy.init_args.max_restarts) == ("ssp", 4, 1)
    strategy = parsed("--trainer.strategy=parameter_server_ssp", "--trainer.strategy.staleness=2")
    assert strategy.init_args.staleness == 2
    assert (
        parsed("--trainer.strategy=ddp_fork", "--trainer.strategy.start_method=spawn").init_args.start_method == "spawn"
    )


@pytest.mark.light
def test_timeouts_of_lightnings_strategies_are_written_in_the_same_ways():
    for text in ("90", "1:30", "0:01:30"):
        strategy = parsed("--trainer.strategy=ddp", f"--trainer.strategy.timeout={text}")
        assert strategy.init_args.timeout.total_seconds() == 90
    strategy = parsed("--trainer.strategy=hybrid_pipeline", "--trainer.strategy.timeout=1:30:00")
    assert strategy.init_args.timeout == 5400, "YAML reads it as this number without quotes"


@pytest.mark.light
def test_private_names_of_jsonargparse_exist():
    """The package replaces jsonargparse's function for values of strategies; see `_jsonargparse_private.py`."""
    assert _typehints.adapt_typehints is not _jsonargparse_private.adapt
    assert _jsonargparse_private.NestedArg(key="stages", val="2").key == "stages"


@pytest.mark.light
@pytest.mark.parametrize("option", ["--trainer.strategy", "--trainer.strategy.class_path"])
def test_the_name_of_a_recipe_is_refused_with_the_option_to_use(option):
    words = [f"{option}=parameter_server_local", "--trainer.strategy.sync_every=4"]
    with pytest.raises(ConfigurationError, match="add --config strategy/parameter_server_local"):
        check_recipe_names(configured_keys(words))
    check_recipe_names(configured_keys(["--trainer.strategy=parameter_server_async"]))


@pytest.mark.light
def test_help_accepts_a_registered_name():
    asked = ["fit", "--trainer.strategy.help", "hybrid_pipeline"]
    assert with_help_of_class(asked) == ["fit", "--trainer.strategy.help", PIPELINE]
    assert with_help_of_class(["--trainer.strategy.help=hybrid_pipeline"]) == [f"--trainer.strategy.help={PIPELINE}"]
    unchanged = ["--trainer.strategy.help", "HybridPipelineStrategy", "--trainer.strategy.help"]
    assert with_help_of_class(unchanged) == unchanged


def refusal(capsys, *words):
    with pytest.raises(SystemExit):
        main(["fit", "--config=quickstart", *words])
    return capsys.readouterr().err.splitlines()[-1]


def test_options_that_belong_to_no_strategy_are_refused(capsys):
    line = refusal(capsys, "--trainer.strategy=auto", "--trainer.strategy.stages=2")
    assert "trainer.strategy.stages: strategy 'auto' has no options; choose a strategy that has this option" in line
    line = refusal(capsys, "--trainer.strategy=hybrid_pipelin", "--trainer.strategy.stages=2")
    assert line.endswith("trainer.strategy: unknown strategy 'hybrid_pipelin'; did you mean 'hybrid_pipeline'?")
    line = refusal(capsys, "--trainer.strategy=ddp", "--trainer.strategy.timeout=soon")
    assert "trainer.strategy.timeout: cannot use 'soon': it is not a duration: write seconds, such as 90" in line
    line = refusal(capsys, "--trainer.strategy=hybrid_pipeline", "--trainer.strategy.stage=2")
    assert "unknown key trainer.strategy.stage: hybrid_pipeline has no 'stage'; did you mean 'stages'?" in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--trainer.strategy=nowhere.NoisyStrategy"],
            "cannot use 'nowhere.NoisyStrategy': No module named 'nowhere'; run the command from the directory of the "
            "module's file",
        ),
        (
            ["--trainer.strategy=noisy_ddp.Wrong", "--trainer.strategy.scale=2"],
            "cannot use 'noisy_ddp.Wrong': module 'noisy_ddp' has no attribute 'Wrong'",
        ),
        (["--trainer.strategy.class_path=noisy_ddp.Other"], "'noisy_ddp.Other' is not a strategy"),
        (["--trainer.strategy=needs_package.A"], "No module named 'not_installed'; install this module"),
        (
            ["--trainer.strategy=qqq"],
            "unknown strategy 'qqq'; use one of: auto, ddp, fsdp, deepspeed, ddp_fp16, ddp_bf16, ddp_powersgd, "
            "ddp_balanced, hybrid_pipeline, parameter_server, parameter_server_async, parameter_server_ssp, "
            "spatial; or an import path",
        ),
    ],
)
def test_wrong_import_paths_and_names_of_strategies_are_refused(words, reason, capsys):
    Path("noisy_ddp.py").write_text("class Other:\n    pass\n")
    Path("needs_package.py").write_text("import not_installed\n")
    line = refusal(capsys, *words)
    assert line.startswith("cnnstrategies: error: trainer.strategy: ")
    assert reason in line


def test_a_saved_configuration_reproduces_the_run(monkeypatch, capsys):
    def printed(*words):
        monkeypatch.setattr(sys, "argv", ["", "fit", "--config=quickstart", *words, "--print_config"])
        with pytest.raises(SystemExit):
            main(sys.argv[1:])
        return capsys.readouterr().out

    first = printed("--trainer.strategy=parameter_server_ssp", "--trainer.strategy.timeout=0:30")
    strategy = yaml.safe_load(first)["trainer"]["strategy"]
    assert strategy["class_path"] == SERVED
    assert (strategy["init_args"]["staleness"], strategy["init_args"]["timeout"]) == (4, "0:30")
    Path("saved.yaml").write_text(first)
    assert printed("--config=saved.yaml") == first


def test_a_run_trains_by_a_name_with_options(monkeypatch):
    options = ("microbatches=2", "start_method=fork", "cuts=[block1]")
    words = ["--trainer.strategy=hybrid_pipeline", *(f"--trainer.strategy.{option}" for option in options)]
    limits = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.devices=2"]
    main(
        ["fit", "--config=quickstart", *words, *limits, "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    )
