"""Interfaces of this machine; those of several hosts are chosen in test_hosts.py."""

import socket

import pytest

from cnnstrategies.cluster.addresses import Interface, choose_interface, find_interface, interface_to, resolve
from cnnstrategies.errors import ConfigurationError

pytestmark = pytest.mark.light

LOOPBACK = Interface("lo", "127.0.0.1")


def test_an_interface_is_the_users_then_gloos_then_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert choose_interface("lo", "127.0.0.1") == choose_interface("127.0.0.0/8", "127.0.0.1") == LOOPBACK
    with pytest.raises(ConfigurationError, match="none0"):
        choose_interface(None, "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert choose_interface(None, "127.0.0.1") == LOOPBACK
    assert interface_to("127.0.1.1").name == "lo"


def test_what_is_not_there_is_named_with_what_is() -> None:
    with pytest.raises(ConfigurationError, match=rf"{socket.gethostname()} has no 'none0'; it has lo \(127\.0\.0\.1\)"):
        find_interface("none0")
    with pytest.raises(ConfigurationError, match=r"'10\.0\.0\.0/99' is no subnet"):
        find_interface("10.0.0.0/99")
    with pytest.raises(ConfigurationError, match=r"cannot resolve the host name 'nowhere\.invalid'"):
        resolve("nowhere.invalid")
