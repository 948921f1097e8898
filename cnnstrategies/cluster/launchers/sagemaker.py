"""Launcher for training jobs of Amazon SageMaker, which start one process on each instance."""

import json
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ
from cnnstrategies.cluster.launchers.nodes import NodeLauncher, NodePlace
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.errors import ConfigurationError

# File with the hosts in containers that do not contain SageMaker's toolkit, which sets the variables.
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
PORT = 7777  # Port that SageMaker's toolkit uses for torch.


@register
class SageMaker(NodeLauncher):
    """Launcher for Amazon SageMaker, with one process on each instance."""

    name = "sagemaker"
    title = "SageMaker"
    precedence = 74
    variables = ("SM_HOSTS", "SM_CURRENT_HOST", "TRAINING_JOB_NAME")

    @override
    def place(self, environ: Environ) -> NodePlace | None:
        if {"SM_HOSTS", "SM_CURRENT_HOST"} <= environ.keys():
            source, text, current = "SM_HOSTS", environ["SM_HOSTS"], environ["SM_CURRENT_HOST"]
            hosts = _hosts(source, text)
        elif "TRAINING_JOB_NAME" in environ and RESOURCES.exists():
            source, text = str(RESOURCES), RESOURCES.read_text(encoding="utf-8")
            content = _parsed(source, text)
            current = str(content.get("current_host")) if isinstance(content, dict) else ""
            hosts = _hosts(source, json.dumps(content.get("hosts")) if isinstance(content, dict) else text)
        else:
            return None
        if current not in hosts:
            raise ConfigurationError(f"{source}={text} does not contain this host, {current!r}: unset {source}")
        if len(hosts) < 2:
            return None
        return NodePlace(hosts.index(current), len(hosts), hosts[0], PORT, f"{source}={text}")


def _hosts(source: str, text: str) -> list[str]:
    hosts = _parsed(source, text)
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ConfigurationError(f'{source}={text} is not a list of hosts in JSON, such as ["algo-1"]: correct it')
    return sorted(hosts)


def _parsed(source: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{source}={text} is not JSON ({error}): correct it, or unset it") from error
