"""``cnnstrategies submit fit``: a job from a configuration, for SLURM or another target."""

import importlib
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cnnstrategies.commands.submit.base import Target, check
from cnnstrategies.errors import ConfigurationError


def main(args: Sequence[str]) -> None:
    """Check a configuration and submit it; print what was queued and where its logs will be.

    Raises:
        ConfigurationError: The configuration cannot run, or the target does not take the job.
    """
    if args[1:2] not in (["fit"], ["doctor"]):
        raise ConfigurationError(
            f"submit {' '.join(args[1:2])}: submit takes fit, as in: cnnstrategies submit fit --config ..., or doctor"
        )
    base = check(args[2:])
    variants = [check([*args[2:], *overrides]) for overrides in _combinations(base.options.sweep)]
    module = importlib.import_module(f"cnnstrategies.commands.submit.{base.cli.config.to}")
    target: Target = module.target(base, variants, shlex.join(["cnnstrategies", *args]), args[1])
    if target.unread:
        print(
            f"Note: with --to {base.cli.config.to} these keys do not count: {', '.join(target.unread)}", file=sys.stderr
        )
    if base.cli.config.dry_run:
        print(target.show(), end="")
        return
    print(target.submit())


def _combinations(sweep: dict[str, list[Any]]) -> Iterator[list[str]]:
    """The overrides of each combination of a sweep; none without one."""
    if sweep:
        for values in itertools.product(*sweep.values()):
            yield [
                f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
                for key, value in zip(sweep, values, strict=True)
            ]
