"""What ``cnnstrategies sweep`` takes beside a configuration."""

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Its parser; what it does not know is for ``fit``."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies sweep",
        description="Search for good values of a configuration: each trial is a fit of its own, bad ones end early. "
        "All other options, such as --config, are those of fit. A sweep that was stopped goes on where it was.",
        allow_abbrev=False,
    )
    result.add_argument("--sweep", type=Path, required=True, metavar="FILE", help="parameters, metric, trials, pruner")
    result.add_argument(
        "--folder",
        type=Path,
        help="for the journal, the trials' runs, best.yaml and the picture; several machines may share it "
        "(default: sweeps/NAME, by the file's name)",
    )
    return result
