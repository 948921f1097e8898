"""The configuration files that ``plan``, ``tune`` and ``scaling`` write."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cnnstrategies.runtime.whole_file import whole_file


def write_commented(path: Path, content: Mapping[str, Any], comment: Sequence[str] = ()) -> None:
    """Write a configuration file that begins with a comment. A file with the name ``path`` is always complete.

    If several programs write to ``path`` at once, the file of the program that finishes last remains.
    """
    text = "".join(f"# {line}\n" for line in comment)
    text += yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None)
    with whole_file(path, "free some space, or give another path with --output") as file:
        file.write(text.encode())
