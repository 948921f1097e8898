"""What commands there are: a line and an example each, and where their code is."""

import atexit
import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of ``cnnstrategies``: what it does, an example of its words, and whether it takes a configuration.

    ``module`` is one of this package; its ``main`` takes the words from the command's name on.
    """

    line: str
    example: str
    module: str
    configured: bool = True

    def run(self, args: Sequence[str]) -> None:
        """Run it; only now its code is imported."""
        # What imports make stays: to look for garbage among it, again and again, takes a sixth of a start.
        gc.disable()
        module = importlib.import_module(f"cnnstrategies.commands.{self.module}")
        gc.freeze()
        atexit.register(gc.unfreeze)  # Else bindings, as triton's, print at the end that they are leaked.
        gc.enable()
        module.main(args)


_LIGHTNING = "run.lightning_cli"
_FROM_CHECKPOINT = "--config run.yaml --ckpt_path best"
COMMANDS = {
    "fit": Command("train, as a configuration says", "fit --config quickstart", _LIGHTNING),
    "validate": Command("measure on the validation data", f"validate {_FROM_CHECKPOINT}", _LIGHTNING),
    "test": Command("measure on the test data", f"test {_FROM_CHECKPOINT}", _LIGHTNING),
    "predict": Command("write predictions to a file", f"predict {_FROM_CHECKPOINT}", _LIGHTNING),
    "quantize": Command("turn a trained network into int8", f"quantize {_FROM_CHECKPOINT}.ckpt", _LIGHTNING),
    "export": Command("write a trained network for use elsewhere", f"export {_FROM_CHECKPOINT}.ckpt", _LIGHTNING),
    "plan": Command(
        "price the strategies before a run", "plan --config quickstart --trainer.devices 4", "plan.command"
    ),
    "verify": Command(
        "see that a strategy trains the same model as one device", "verify --config quickstart --steps 8", "verify"
    ),
    "tune": Command("find the fastest settings", "tune --config quickstart --minutes 5", "tune.command"),
    "scaling": Command(
        "see why more devices are not faster, and what would mend it",
        "scaling --config quickstart --devices 1,2",
        "scaling.command",
    ),
    "submit": Command(
        "send a run to a cluster's queue", "submit fit --config run.yaml --cluster.time 2:00:00", "submit.command"
    ),
    "watch": Command("see how a run with a parameter server goes", "watch --run runs/digits", "watch", False),
    "join": Command("help a run with a parameter server", "join --run runs/digits --config run.yaml", "join"),
    "doctor": Command("check the machines before training on them", "doctor", "doctor", False),
    "pack": Command("put images into shards", "pack datasets/imagenet shards/imagenet --size 256", "pack", False),
    "configs": Command("list the recipes, or print one", "configs quickstart", "arguments.recipes", False),
}
