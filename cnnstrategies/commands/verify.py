"""``cnnstrategies verify``: train the user's module under a strategy and on one device, and compare the results."""

import sys
from collections.abc import Sequence

from typing_extensions import override

from cnnstrategies.commands.arguments.options import VerifyOptions
from cnnstrategies.commands.arguments.refuse import show
from cnnstrategies.commands.run.errors import located, parameters_of
from cnnstrategies.commands.run.lightning_cli import ModelAndData
from cnnstrategies.commands.run.trainer import as_list
from cnnstrategies.verifying.forked_runs import TrainingError
from cnnstrategies.verifying.runs import QUIET, forked, verify

# Options of the trainer that ``verify`` ignores, or replaces by its own values.
LEFT_OUT = ("precision", "logger", "num_nodes", "max_steps", "max_time", *QUIET)


class VerifiedCLI(ModelAndData):
    """Command line that parses a configuration, and changes its strategy so that processes are forked."""

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config.trainer
        if isinstance(trainer.strategy, str):
            trainer.strategy = forked(trainer.strategy)
        elif "start_method" in parameters_of(located(trainer.strategy.class_path)):
            trainer.strategy.init_args.start_method = "fork"


def main(options: VerifyOptions, arguments: Sequence[str]) -> None:
    """Train under the configuration's strategy and on one device, and print the comparison.

    Exit with code 0 if the results are equal, and with code 1 if they differ or a run fails.
    """
    cli = VerifiedCLI("verify", arguments)
    trainer = {name: value for name, value in vars(cli.config_init.trainer).items() if name not in LEFT_OUT}
    trainer |= {"steps": options.steps, "precision": options.precision, "callbacks": as_list(trainer["callbacks"])}
    try:
        verdict = verify(cli.model, cli.data(), **{**trainer, "plugins": as_list(trainer["plugins"])})
    except TrainingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    show(str(verdict))
    sys.exit(0 if verdict.equal else 1)
