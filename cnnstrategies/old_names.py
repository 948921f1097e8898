"""Renamed options: a configuration with an old name is refused, and the error message gives the new name.

The package keeps old names only in this table. Version 1.0 removes the table.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from cnnstrategies.errors import ConfigurationError

_SHARES = {"first": "initial_shares"}
ROOT = "configuration"  # Key of `RENAMED` for the keys at the root of a configuration.
HOST = "host"  # Key of `RENAMED` for the keys of a machine in the cluster file of ``plan``.
# Keys are names of classes, `ROOT` and `HOST`. Values map the old names of options to the new names.
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
    """Return the new name of an option. Return None if the option has not been renamed.

    Args:
        kind: The class whose constructor has the option, or a subclass of that class; `ROOT` or `HOST` for keys that
            belong to no class.
        name: The name that the user has written.
    """
    classes = [kind] if isinstance(kind, str) else [base.__name__ for base in kind.__mro__]
    return next((RENAMED[base][name] for base in classes if name in RENAMED.get(base, {})), None)


def refuse_old_names(kind: type, names: Collection[str]) -> None:
    """Refuse keyword arguments with old names.

    Args:
        kind: The class whose constructor got the arguments.
        names: Names of the arguments.

    Raises:
        ConfigurationError: An argument has been renamed. The error message gives the new name.
    """
    for name in names:
        if (new := renamed(kind, name)) is not None:
            raise ConfigurationError(f"{kind.__name__}({name}=...): {is_now(name, new)}")


def is_now(name: str, new: str, section: str = "") -> str:
    """Return the part of an error message that gives the new name of an option.

    Args:
        name: The old name.
        new: The new name.
        section: Key of the section that has the option, such as ``trainer.strategy``; empty for the root.
    """
    return f"{name} is now called {new}; write {f'{section}.{new}' if section else new}"
