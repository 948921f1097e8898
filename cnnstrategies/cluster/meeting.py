"""The hosts of a run find each other before training starts, or say which one is missing."""

import contextlib
import json
import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cnnstrategies.cluster.addresses import Interface, choose_interface, resolve
from cnnstrategies.cluster.probe import Peer, Probe, ping
from cnnstrategies.errors import ConfigurationError

POLL = 0.05  # seconds
PING_SECONDS = 5.0


def open_store(address: str, port: int, serve: bool, seconds: float) -> Store:
    """The store at the main address, through which the processes of a run find each other.

    ``torch.distributed`` opens it again later: within a process both share one server.

    Args:
        address: The main address.
        port: The main port.
        serve: Whether this process is global rank 0.
        seconds: How long to try to connect.

    Raises:
        ConfigurationError: The main address is unknown or does not answer, or its port is taken.
    """
    if serve:
        resolve(address)  # torch's own client would retry, and print a stack.
    else:
        _wait_for_port(address, port, seconds)
    try:
        store = TCPStore(
            address,
            port,
            is_master=serve,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise ConfigurationError(
            f"{socket.gethostname()} cannot serve port {port}: {str(error).splitlines()[0]}; set MASTER_PORT to a free "
            "one on every machine"
        ) from error
    return PrefixStore("cnnstrategies", store)


def _wait_for_port(address: str, port: int, seconds: float) -> None:
    """Return when something listens there: torch's own client retries without saying why it fails."""
    deadline = time.monotonic() + seconds
    ip = resolve(address)
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((ip, port), timeout=min(left, 10)).close()
            return
        except TimeoutError:
            reason = "no answer: is the machine up, and does a firewall block the port?"
        except ConnectionRefusedError:
            reason = "it answers, but nothing listens there: has rank 0 been started, with the same MASTER_PORT?"
        except OSError as error:
            reason = f"{error.strerror}"
        time.sleep(min(0.2, max(0.0, left)))
        with contextlib.suppress(ConfigurationError):
            ip = resolve(address)  # A pod that was started again has another one.
    where = address if address == ip else f"{address} ({ip})"
    raise ConfigurationError(
        f"{socket.gethostname()} has not reached the main address {where} on port {port} for {seconds:g} s: {reason}"
    )


def meet(
    store: Store, node: int, nodes: int, main_address: str, interface: str | None, seconds: float
) -> tuple[Interface, Probe, list[Peer]]:
    """Make this host known, wait for the others, and try every connection between this one and them.

    Args:
        store: From :func:`open_store`.
        node: Number of this host in the run.
        nodes: Number of hosts.
        main_address: Where the store is served; the first host takes its route to the second instead.
        interface: Name or subnet of the interface to use; by default the one on the route.
        seconds: How long to wait for the other hosts.

    Returns:
        The interface, this host's probe, and the other hosts.

    Raises:
        ConfigurationError: A host is missing, or a connection between two hosts fails; on every host that is there.
    """
    me = socket.gethostname()
    if node == 0:
        # The route to its own address would be the loopback's.
        _wait_for(store, ["source"], node, nodes, seconds)
        mine = choose_interface(interface, store.get("source").decode())
    else:
        mine = choose_interface(interface, resolve(main_address))
        store.set("source", mine.address)
    probe = Probe(mine.address)
    store.set(f"host/{node}", json.dumps([me, mine.address, probe.port]))
    keys = [f"host/{number}" for number in range(nodes)]
    _wait_for(store, keys, node, nodes, seconds)
    everyone = [Peer(number, *json.loads(store.get(key))) for number, key in enumerate(keys)]
    others = [peer for peer in everyone if peer.node != node]
    failures = []
    for peer in others:
        answer, reason = ping(peer, min(PING_SECONDS, seconds))
        if answer != "here":
            failures.append(f"{me} ({mine.address} on {mine.name}) cannot reach {peer} on port {peer.port}: {reason}")
    store.set(f"failures/{node}", json.dumps(failures))
    keys = [f"failures/{number}" for number in range(nodes)]
    _wait_for(store, keys, node, nodes, seconds + nodes * PING_SECONDS)
    failures = [failure for key in keys for failure in json.loads(store.get(key))]
    if failures:
        store.set(f"told/{node}", "")
        if node == 0:
            _wait_until_told(store, nodes)
        raise ConfigurationError(
            "; ".join(failures) + ": allow TCP connections on all ports between the machines of the run, or choose "
            "another interface with --network.interface"
        )
    store.set(f"interface/{node}", mine.name)
    return mine, probe, others


def _wait_until_told(store: Store, nodes: int) -> None:
    """Wait until all hosts know of the failures: the store, which is served here, is about to end."""
    deadline = time.monotonic() + PING_SECONDS
    while not store.check([f"told/{number}" for number in range(nodes)]) and time.monotonic() < deadline:
        time.sleep(POLL)


def interface_of(store: Store, node: int, nodes: int, seconds: float) -> str:
    """The name of the interface that this host's first process has chosen."""
    _wait_for(store, [f"interface/{node}"], node, nodes, seconds)
    return store.get(f"interface/{node}").decode()


def _wait_for(store: Store, keys: list[str], node: int, nodes: int, seconds: float) -> None:
    """Wait until the hosts have written these keys; a missing host is named by its number, those present by name."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            come = {number: store.get(f"host/{number}") for number in range(nodes) if store.check([f"host/{number}"])}
            known = [f"{Peer(number, *json.loads(record))}" for number, record in come.items()]
            missing = [f"node {number}" for number in range(nodes) if number not in (node, *come)]
            raise ConfigurationError(
                f"{socket.gethostname()} has waited {seconds:g} s for {', '.join(missing) or 'the other hosts'}"
                f"{'; here are ' + ', '.join(known) if known else ''}: start the run on all {nodes} machines with the "
                "same MASTER_ADDR and MASTER_PORT; --network.wait sets how long to wait"
            )
        time.sleep(POLL)
