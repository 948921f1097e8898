"""The promise, tried on a user's own module: trained under a strategy it is the same model as on one device."""

from cnnstrategies.verifying.verdict import Verdict
from cnnstrategies.verifying.verify import verify

__all__ = ["Verdict", "verify"]
