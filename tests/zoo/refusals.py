"""Entries of the zoo that a strategy refuses, each with the reason why the strategy cannot train it."""

from collections.abc import Mapping

# By strategy, and by name of the entry.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "ddp": {},
    "parameter_server": {
        "lightly.SwaV": "the step normalises weights in place, and the servers, which hold the weights, would undo it.",
        "torchgeo.BYOLTask": (
            "the step changes weights that it also trains, and the servers, which hold the weights, would undo it."
        ),
    },
    "hybrid_pipeline": {
        "monai.DynUNet, deep supervision, volumes": (
            "its layers write the outputs of deep supervision into a list that they share, and forward reads the list."
        ),
        "torchgeo.BYOLTask": (
            "its two networks share a backbone. Hooks on a layer of it compute with the projectors of both, and store "
            "the results in attributes, from which other code reads them. These tensors belong to several stages."
        ),
    },
}
