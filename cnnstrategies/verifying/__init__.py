"""Test whether a strategy trains a user's module to the same result as one device."""

from cnnstrategies.verifying.runs import verify
from cnnstrategies.verifying.verdict import Verdict

__all__ = ["Verdict", "verify"]
