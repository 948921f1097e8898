"""What ``cnnstrategies join`` takes beside a configuration."""

import argparse
from collections.abc import Sequence


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Its own options, and the words of the configuration.

    Args:
        words: Those after the command's name.
    """
    result = argparse.ArgumentParser(prog="cnnstrategies join", allow_abbrev=False, add_help=False)
    result.add_argument("--run", required=True)
    result.add_argument("--key_file")
    return result.parse_known_args(words)
