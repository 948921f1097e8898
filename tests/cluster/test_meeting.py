"""The hosts of a run find each other through the right interface. test_hosts.py has tests on several hosts."""

import json
import threading

import pytest
from torch.distributed import HashStore

from cnnstrategies.cluster.addresses import Interface, choose_interface, interface_to
from cnnstrategies.cluster.hosts import meet
from cnnstrategies.errors import ConfigurationError

LOOPBACK = Interface("lo", "127.0.0.1")


def test_the_host_with_the_store_ends_after_the_other_hosts() -> None:
    """Otherwise the other hosts would lose their connection to the store, and report only that."""
    store = HashStore()
    store.set("source", "127.0.0.1")
    store.set("host/1", json.dumps(["beta", "127.0.0.1", 1]))
    store.set("failures/1", "[]")
    messages = []

    def first_host() -> None:
        with pytest.raises(ConfigurationError) as failure:
            meet(store, 0, 2, "127.0.0.1", None, 60)
        messages.append(str(failure.value))

    thread = threading.Thread(target=first_host)
    thread.start()
    while not store.check(["failures/0"]):
        thread.join(0.1)
    thread.join(0.3)
    assert messages == []
    store.set("informed/1", "")
    thread.join()
    assert "cannot reach beta" in messages[0]


def test_an_interface_is_the_users_then_gloos_then_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert choose_interface("lo", "127.0.0.1") == choose_interface("127.0.0.0/8", "127.0.0.1") == LOOPBACK
    with pytest.raises(ConfigurationError, match="none0"):
        choose_interface(None, "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert choose_interface(None, "127.0.0.1") == LOOPBACK
    assert interface_to("127.0.1.1").name == "lo"
