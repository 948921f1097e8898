"""What ``cnnstrategies watch`` takes."""

import argparse


def parser() -> argparse.ArgumentParser:
    """Its parser."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies watch",
        description="Show how a run with a parameter server goes: who takes part, how fast, who waits for whom, and "
        "what has died. The run does not notice. Ctrl-C ends it.",
        allow_abbrev=False,
    )
    result.add_argument(
        "--run", required=True, help="the run's folder, or its coordinator's address: tcp://HOST:PORT or ipc://PATH"
    )
    result.add_argument("--key_file", help="the run's keys (default: those that the run's folder names)")
    result.add_argument("--once", action="store_true", help="print the table once")
    return result
