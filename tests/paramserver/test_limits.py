"""What the system lets a process have: enough for its connections, or the start is refused."""

import resource

import pytest
from roles import roles

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.limits import allow_files, files_of_coordinator, files_of_server


def test_the_limit_of_files_is_raised_or_the_start_refused_with_the_number(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    allow_files(200, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 1000)
    settings = CoordinatorSettings(f"ipc://{tmp_path}/c", 100, 10)
    CoordinatorService(settings).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files_of_coordinator(100, 10), 1000)
    needed = files_of_coordinator(500, 10)
    with pytest.raises(ConfigurationError, match=f"the coordinator needs {needed} open files.*may have 1000"):
        CoordinatorService(CoordinatorSettings(f"ipc://{tmp_path}/c", 500, 10))
    with pytest.raises(ConfigurationError, match=f"server 0 needs {files_of_server(500, 1)} open files"):
        roles(tmp_path, workers=500).__enter__()
