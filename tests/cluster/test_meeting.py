"""The hosts of a run find each other, or all of them say what is wrong."""

import json
import threading

import pytest
from ports import free_port
from torch.distributed import HashStore

from cnnstrategies.cluster import stores
from cnnstrategies.cluster.hosts import meet
from cnnstrategies.cluster.stores import open_store
from cnnstrategies.errors import ConfigurationError


def test_the_host_with_the_store_ends_after_the_readers():
    """Else they would lose their connection to it, and say that instead."""
    store = HashStore()
    store.set("source", "127.0.0.1")
    store.set("host/1", json.dumps(["beta", "127.0.0.1", 1]))
    store.set("failures/1", "[]")
    messages = []

    def first_host():
        with pytest.raises(ConfigurationError) as failure:
            meet(store, 0, 2, "127.0.0.1", None, 60)
        messages.append(str(failure.value))

    thread = threading.Thread(target=first_host)
    thread.start()
    while not store.check(["failures/0"]):
        thread.join(0.1)
    thread.join(0.3)
    assert messages == []
    store.set("told/1", "")
    thread.join()
    assert "cannot reach beta" in messages[0]


def test_a_main_address_that_has_moved_is_found(monkeypatch):
    """A pod that is started again has the same name and another address."""
    port = free_port()
    addresses = iter(["255.255.255.255", "127.0.0.1"])  # No connection is made to the first, whoever listens where.
    serving = open_store("127.0.0.1", port, True, 60)
    monkeypatch.setattr(stores, "resolve", lambda name: next(addresses))
    open_store("localhost", port, False, 60).set("here", "")
    assert serving.check(["here"])


@pytest.mark.parametrize("serve", [True, False], ids=["rank 0", "another"])
def test_a_main_address_that_nobody_knows_is_named_at_once(serve):
    with pytest.raises(ConfigurationError, match=r"cannot resolve the host name 'nowhere.invalid'.* MASTER_ADDR=10"):
        open_store("nowhere.invalid", free_port(), serve, 1)
