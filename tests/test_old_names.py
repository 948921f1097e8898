"""An option's old name is refused with its new name, wherever it is written."""

import re

import pytest

from cnnstrategies import ConfigurationError, strategies
from cnnstrategies.commands.arguments.keys import configured_keys
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.run.errors import check_names, parameters_of
from cnnstrategies.old_names import RENAMED, renamed
from cnnstrategies.planning.cluster import read_cluster

pytestmark = pytest.mark.light
STRATEGIES = [kind for kind in RENAMED if hasattr(strategies, kind)]
ARGUMENTS = [(kind, old, new) for kind in STRATEGIES for old, new in RENAMED[kind].items()]


def refused(words, key, old, new):
    new_key = f"{key.removesuffix(old)}{new}"
    with pytest.raises(
        ConfigurationError, match=rf"^{re.escape(f'{key}: {old} is now called {new}; write {new_key}')}$"
    ):
        check_names(configured_keys(words))


@pytest.mark.parametrize(("kind", "old", "new"), ARGUMENTS)
def test_a_strategys_old_argument(kind, old, new, tmp_path):
    strategy = getattr(strategies, kind)
    assert new in parameters_of(strategy)
    assert old not in parameters_of(strategy)
    with pytest.raises(ConfigurationError, match=rf"^{kind}\({old}=\.\.\.\): {old} is now called {new}; write {new}$"):
        strategy(**{old: 1})
    key = f"trainer.strategy.init_args.{old}"
    refused([f"--trainer.strategy={kind}", f"--{key}=1"], key, old, new)
    refused([f"--trainer.strategy={kind}", f"--trainer.strategy.{old}=1"], f"trainer.strategy.{old}", old, new)
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer: {{strategy: {{class_path: cnnstrategies.strategies.{kind}, init_args: {{{old}: 1}}}}}}")
    refused([f"--config={file}"], key, old, new)


def test_an_old_argument_of_a_registered_name():
    words = ["--trainer.strategy=parameter_server_async", "--trainer.strategy.elastic=2"]
    refused(words, "trainer.strategy.elastic", "elastic", "max_joiners")


def test_an_old_section(tmp_path):
    refused(["--network.wait=3"], "network", "network", "interconnect")
    file = tmp_path / "run.yaml"
    file.write_text("network: {timeout: 5}")
    refused(["--config", str(file)], "network", "network", "interconnect")


def test_an_old_option_of_a_command():
    with pytest.raises(ConfigurationError, match=r"^pack: --shard_mb is now called --shard_size; write --shard_size$"):
        COMMANDS["pack"].parse(["images", "shards", "--shard-mb=128"])


def test_an_old_key_of_a_cluster_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: [{count: 2, network: {gbit: 1}}]")
    with pytest.raises(
        ConfigurationError, match=r"nodes\[0\]: network is now called interconnect; write interconnect$"
    ):
        read_cluster(file)


def test_names_of_other_classes_stay_free():
    """An old name can be a model's argument or an argument of a user's own subclass of a strategy."""

    class Mine(strategies.HybridPipelineStrategy):
        def __init__(self, network: str = "net", **kwargs):
            super().__init__(submodule=network, **kwargs)

    Mine(network="net")
    check_names(configured_keys(["--model=ImageClassifier", "--model.network=SmallCNN"]))
    assert renamed(Mine, "first") == "initial_shares", "of a subclass as well"
