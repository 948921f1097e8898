"""Whether the options of a specification agree with each other."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cnnstrategies.errors import ConfigurationError

if TYPE_CHECKING:
    from cnnstrategies.paramserver.specification import Specification


def check_options(spec: "Specification") -> None:
    """Refuse options that are out of range or contradict each other.

    Raises:
        ConfigurationError: So they are, and why.
    """
    _check_numbers(spec)
    _check_compression(spec)
    _check_pipelined(spec)
    _check_clipping(spec)


def _check_numbers(spec: "Specification") -> None:
    at_least: Mapping[str, float] = {
        "workers": 1, "servers": 1, "staleness": 0, "replication": 1, "slice_bytes": 64,
        "timeout": 0,
    }  # fmt: skip
    for name, least in at_least.items():
        if getattr(spec, name) < least:
            raise ConfigurationError(f"{name}={getattr(spec, name)}: use at least {least}")
    if spec.staleness and spec.mode != "ssp":
        raise ConfigurationError(f"staleness={spec.staleness} is for mode='ssp', not mode={spec.mode!r}: leave it out")
    if spec.replication > spec.servers:
        raise ConfigurationError(
            f"replication={spec.replication} needs as many servers, but servers={spec.servers}: change one of them"
        )


def _check_compression(spec: "Specification") -> None:
    if not 0 < spec.compression_ratio <= 1:
        raise ConfigurationError(f"compression_ratio={spec.compression_ratio}: use more than 0 and at most 1")
    if spec.pulls_changes and not spec.aggregates:
        raise ConfigurationError(
            f"pull_compression={spec.pull_compression!r} with mode={spec.mode!r}: servers send one change to all "
            "workers, which they have in common steps only: use mode='sync' or 'local', or pull_compression='fp16'"
        )


def _check_pipelined(spec: "Specification") -> None:
    if not spec.pipelined:
        return
    if spec.mode != "sync" or spec.clip_norm is not None:
        raise ConfigurationError(
            "pipelined=True is for mode='sync' without clip_norm: else something of all slices decides each step; "
            "leave it out"
        )
    if spec.pull_compression in ("topk", "onebit", "auto"):
        raise ConfigurationError(
            f"pipelined=True with pull_compression={spec.pull_compression!r}: a push asks for what is the same in all "
            "steps; use pull_compression='fp16', or leave it out"
        )


def _check_clipping(spec: "Specification") -> None:
    if spec.mode == "local" and (spec.clip_norm is not None or spec.clip_value is not None):
        raise ConfigurationError("mode='local' pushes no gradients: clip them in the worker's own optimizer step")
    if spec.clip_norm is not None and spec.clip_value is not None:
        raise ConfigurationError(f"clip_norm={spec.clip_norm} and clip_value={spec.clip_value}: give one of them")
    for name in ("clip_norm", "clip_value"):
        value = getattr(spec, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"{name}={value}: use a positive number, or None for no clipping")
