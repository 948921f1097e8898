"""The promise, tried on a user's own module: trained under a strategy it is the same model as on one device."""

from cnnstrategies.verifying.runs import verify
from cnnstrategies.verifying.verdict import Verdict

__all__ = ["Verdict", "verify"]
