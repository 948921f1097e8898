"""Options that have been renamed: the old name is refused with the new one.

This table is the only exception to the rule that the package keeps no old names. It is removed with version 1.0.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from cnnstrategies.errors import ConfigurationError

_SHARES = {"first": "initial_shares"}
ROOT = "configuration"  # the keys at a configuration's root
HOST = "host"  # the keys of a machine in the cluster file of `plan`
# By the name of the class that has the option.
RENAMED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        ROOT: {"network": "interconnect"},
        HOST: {"network": "interconnect"},
        "PackOptions": {"shard_mb": "shard_size"},
        "BalancedDDPStrategy": {**_SHARES, "max_share": "max_samples"},
        "CompressedDDPStrategy": {"powersgd_start": "powersgd_start_step"},
        "HybridPipelineStrategy": {**_SHARES, "network": "submodule"},
        "ParameterServerStrategy": {
            **_SHARES,
            "combine": "combine_per_node",
            "compression_ratio": "topk_density",
            "elastic": "max_joiners",
            "servers": "servers_per_node",
        },
    }
)


def renamed(kind: type | str, name: str) -> str | None:
    """Return the new name of an option; None if it has not been renamed.

    Args:
        kind: The class that has the option, or a subclass; or ``ROOT`` or ``HOST``.
        name: The option's name, as the user wrote it.
    """
    classes = [kind] if isinstance(kind, str) else [base.__name__ for base in kind.__mro__]
    return next((RENAMED[base][name] for base in classes if name in RENAMED.get(base, {})), None)


def refuse_old_names(kind: type, names: Collection[str]) -> None:
    """Refuse keyword arguments of a constructor whose names are old ones.

    Raises:
        ConfigurationError: An argument has been renamed; the error gives its new name.
    """
    for name in names:
        if (new := renamed(kind, name)) is not None:
            raise ConfigurationError(f"{kind.__name__}({name}=...): {is_now(name, new)}")


def is_now(name: str, new: str) -> str:
    """Return the sentence that names an option's new name."""
    return f"{name} is now called {new}; write {new}"
