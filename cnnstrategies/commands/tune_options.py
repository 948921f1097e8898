"""What ``cnnstrategies tune`` takes beside a configuration."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Allowed = Literal["precision", "compression", "microbatches", "decoder"]


@dataclass
class TuneOptions:
    """What is tried, for how long, and where the result goes.

    Attributes:
        allow: What may be changed although it changes what is learned: ``precision`` (bf16, TF32), ``compression``
            (of gradients), ``microbatches`` (of a pipeline with batch normalisation), ``decoder`` (of JPEG files in
            shards: each rounds in its own way).
        minutes: Longest time.
        output: YAML file for the settings that were found: ``fit --config X --config tuned.yaml`` takes it.
        plot: Draw the result into this PNG file.
    """

    allow: list[Allowed] = field(default_factory=list)
    minutes: float = 5.0
    output: Path = Path("tuned.yaml")
    plot: Path | None = None
