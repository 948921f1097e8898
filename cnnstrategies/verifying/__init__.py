"""A test of a user's own module: does a strategy train the same model as one device?"""

from cnnstrategies.verifying.runs import verify
from cnnstrategies.verifying.verdict import Verdict

__all__ = ["Verdict", "verify"]
