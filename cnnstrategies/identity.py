"""Identity of a run: the data by which the processes of a run recognise each other, and refuse all other processes.

Two processes belong to the same run if the name of the run, the digest of the configuration and the launch are equal. A
digest covers only the settings that all ranks of a run share, and that stay the same when the run resumes or a worker
joins it: it leaves out the layout, the number of devices, the strategy, the number of epochs, the files that a host
reads and writes, and the number of workers that load data.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.records import parsed, record

# Environment variable for the processes of a launch. It contains a secret, and after a space a description of the
# launch if the launcher has no id of its own.
LAUNCH = "CNNSTRATEGIES_LAUNCH"
LONGEST = 256  # Largest number of characters in a field of an identity.
DIGITS = 12  # Number of hexadecimal digits in a digest.
# Sections of a configuration that the digest covers. In the section `trainer` it covers only the keys in `TRAINER`.
SECTIONS = ("seed_everything", "model", "data")
TRAINER = (
    *("precision", "accumulate_grad_batches", "limit_train_batches", "overfit_batches", "sync_batchnorm"),
    *("gradient_clip_val", "gradient_clip_algorithm", "use_distributed_sampler"),
)
# Pattern of keys whose values may differ between the hosts of a run: files, directories, and how a host loads data.
OF_A_HOST = re.compile(r"(root|path|file|dir|folder|cache|num_workers|pin_memory|persistent_workers|prefetch_factor)$")


class StrangerError(ConfigurationError):
    """Error of a process that has reached another run instead of its own. The message names both runs."""

    exit_code = 76  # EX_PROTOCOL of sysexits.h; documented in docs/torchrun.md.


@dataclass(frozen=True)
class Identity:
    """Identity of a run.

    Attributes:
        name: Name of the run, which is also the name of its folder; empty if the run has no name.
        configuration: Digest of the configuration; empty if a program without a configuration trains.
        launch: Launch of the run's processes, such as ``SLURM step 12.0``; empty if their launcher has no ids. A
            restart of the run is another launch.
    """

    name: str = ""
    configuration: str = ""
    launch: str = ""

    def __str__(self) -> str:
        details = [f"configuration {self.configuration}"] if self.configuration else []
        details += [self.launch] if self.launch else []
        described = f" ({', '.join(details)})" if details else ""
        return f"the run {self.name or 'without a name'}{described}"

    def text(self) -> str:
        """Return the identity as JSON, for a message to another process."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: object) -> "Identity":
        """Return the identity that another process has sent as JSON.

        Raises:
            ValueError: The text is not the JSON of an identity. The error message does not contain the text.
        """
        if not isinstance(text, str):
            raise ValueError("not an identity")
        return record(cls, parsed(text), LONGEST, largest=0)


def digest_of(settings: Iterable[tuple[str, object]]) -> str:
    """Return a digest of settings, which does not depend on their order.

    Args:
        settings: Pairs of a key and a value. Values that may differ between the hosts of a run are left out.
    """
    return text_digest(repr(sorted((key, str(value)) for key, value in settings if not _is_of_a_host(key, value))))


def text_digest(text: str) -> str:
    """Return a digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def configuration_digest(command: str, config: Mapping[str, Any]) -> str:
    """Return the digest of a configuration.

    Args:
        command: The command that reads the configuration, such as ``fit``.
        config: The configuration, as nested mappings.
    """
    settings: list[tuple[str, object]] = [("command", command)]
    for section in SECTIONS:
        settings += _flat(section, config.get(section))
    trainer = config.get("trainer") or {}
    settings += [(f"trainer.{key}", trainer.get(key)) for key in TRAINER]
    return digest_of(settings)


def _flat(key: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [pair for name, inner in value.items() for pair in _flat(f"{key}.{name}", inner)]
    if isinstance(value, list | tuple):
        return [pair for number, inner in enumerate(value) for pair in _flat(f"{key}.{number}", inner)]
    return [(key, value)]


def _is_of_a_host(key: str, value: object) -> bool:
    return OF_A_HOST.search(key) is not None or "/" in str(value)
