"""Every operation of which torch has samples gives at places what it gives on one device."""

import pytest

from tests.placed.sweep import failures, torch_operations

STRIDES = "torch computes other strides without values than on the CPU"
# Names of operations with differences that have a reason.
KNOWN = {
    "nn.functional.triplet_margin_with_distance_loss": "the sample contains a module, of which the check makes a copy",
    **dict.fromkeys(("empty_like", "new_empty", "empty_strided", "new_empty_strided"), "the values are arbitrary"),
    "svd_lowrank": STRIDES,
    "pca_lowrank": STRIDES,
    "nonzero_static": STRIDES,
    "fft.rfftn": STRIDES,
    "linalg.eig": STRIDES,
}
# Operations that are refused: statistics of a normalisation at two places, and sparse results.
REFUSED = ("writes tensors of several places", "layout torch.sparse")


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_operations_give_at_places_what_they_give_on_one_device():
    """Each operation has one sample here. The program `sweep.py` tests three samples of each."""
    faults = [
        (name, error)
        for name, error in failures(1, torch_operations())
        if name.split(" ")[0] not in KNOWN
        and not name.startswith("jiterator")  # These operations need a GPU.
        and not any(text in error for text in REFUSED)
    ]
    assert not faults, "\n".join(f"{name}: {error[:300]}" for name, error in faults)
