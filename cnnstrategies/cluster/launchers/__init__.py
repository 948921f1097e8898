"""Launchers, which are the programs and platforms that start the processes of a run.

Each launcher is a class with the decorator :func:`register` in its own module. This package imports all its modules.
The modules must import neither torch nor Lightning, because a command's help lists the launchers and must appear fast.
"""

import importlib
import pkgutil

from cnnstrategies.cluster.launchers.jobs import ClusterJob, ScriptJob, hand_over
from cnnstrategies.cluster.launchers.launcher import (
    CHECKED,
    RUN_NAME,
    Environ,
    Launcher,
    Restart,
    is_inherited,
)
from cnnstrategies.cluster.launchers.nodes import NodeLauncher, NodePlace, adopt
from cnnstrategies.cluster.launchers.registry import (
    detected,
    job_launchers,
    launcher_named,
    launchers,
    local_rank,
    process_number,
    rank_launcher,
    register,
    start_programs,
)

__all__ = [
    "CHECKED",
    "RUN_NAME",
    "ClusterJob",
    "Environ",
    "Launcher",
    "NodeLauncher",
    "NodePlace",
    "Restart",
    "ScriptJob",
    "adopt",
    "detected",
    "hand_over",
    "is_inherited",
    "job_launchers",
    "launcher_named",
    "launchers",
    "local_rank",
    "process_number",
    "rank_launcher",
    "register",
    "start_programs",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
