"""Checks of a training while it runs: each check looks at recorded values, and returns findings.

The package needs only torch. ``digests`` computes checksums of tensors; ``agreement`` compares the ranks' checksums;
``records`` holds what the steps since the last check have computed; ``series`` looks at losses and gradient norms,
``movement`` at weights, ``modes`` at the modes of layers, and ``calls`` at what a step does with gradients and
schedules; ``forwards`` records the precisions and calls of layers, and ``losses`` looks at the inputs of losses;
``batches`` and ``constant_batches`` look at what is loaded; ``loading`` warns of states of modules that are hardly
loaded; ``findings`` has the text of a finding.
"""
