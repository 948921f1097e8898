"""What ``cnnstrategies compare`` takes."""

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Its parser."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies compare",
        description="Compare runs by what TensorBoard's logger has left: metrics, settings and curves.",
        allow_abbrev=False,
    )
    result.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="log directories")
    result.add_argument(
        "--output", type=Path, default=Path("compared.png"), help="the picture of the curves (default: compared.png)"
    )
    return result
