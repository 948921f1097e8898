"""Test whether a strategy trains a user's module to the same result as one device.

`runs` has the function `verify`, `comparison` compares the two runs, and a `verdict` is the result. `forked_runs`
starts the runs, and `recorder` is the callback that records them. `batches`, `loaders`, `loaded_batches` and `contents`
keep what the ranks have loaded, so that one device trains on the same batches. If the runs differ, `tracer` records the
values of each module, `first_difference` finds the first value that differs, and `causes` names a likely cause.
"""

from cnnstrategies.verifying.runs import verify
from cnnstrategies.verifying.verdict import Verdict

__all__ = ["Verdict", "verify"]
