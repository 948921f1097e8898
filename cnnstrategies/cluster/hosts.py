"""Connections between the hosts of a run: tests before the run starts, and detection of a lost host during the run."""

import contextlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from torch.distributed import Store  # type: ignore[attr-defined]

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.cluster.addresses import Interface, choose_interface, resolve, use_interface
from cnnstrategies.cluster.probe import Answer, Probe, ProbedHost, ping
from cnnstrategies.cluster.rendezvous import Meeting, ranks_meet
from cnnstrategies.cluster.stores import missing_after
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import Duration, seconds
from cnnstrategies.runtime.memory_records import exit_at_once
from cnnstrategies.strategies.protocol import facts_of

UNREACHABLE = 1  # Exit code of a run that has lost a host.
MOST_AT_ONCE = 16  # Largest number of simultaneous pings.
PING_SECONDS = 5.0  # Time-out in seconds of a ping before the run starts.


class Interconnect:
    """Options for the connections between the hosts of a run on several machines.

    Args:
        interface: Network interface for the traffic between the ranks: its name, such as ``eth0``, or its subnet, such
            as ``10.0.0.0/24``, if the names differ between hosts. The default is the value of ``GLOO_SOCKET_IFNAME`` or
            ``NCCL_SOCKET_IFNAME``, or else the interface on the route between the hosts.
        wait: Longest time to wait for all hosts at the start, as seconds or ``minutes:seconds``.
        timeout: Time after which the run ends if a host does not answer, as seconds or ``minutes:seconds``. The error
            message names the host.
    """

    def __init__(self, interface: str | None = None, wait: Duration = 300.0, timeout: Duration = 60.0) -> None:
        self.interface = interface
        self.wait = seconds(wait, "interconnect.wait")
        self.timeout = seconds(timeout, "interconnect.timeout")


def meet(
    store: Store, node: int, nodes: int, main_address: str, interface: str | None, seconds: float
) -> tuple[Interface, Probe, list[ProbedHost]]:
    """Announce this host, wait for the other hosts, and test the connections from this host to all other hosts.

    One process on each host must call this.

    Args:
        store: The store at the main address.
        node: Number of this host.
        nodes: Number of hosts.
        main_address: Address of the first host, which serves the store.
        interface: Name or subnet of the network interface. By default the first host uses the interface on its route to
            another host, and the other hosts use the interface on their route to the main address.
        seconds: Longest time to wait for the other hosts.

    Returns:
        This host's interface, this host's probe, and the other hosts.

    Raises:
        ConfigurationError: A host is missing, or a host cannot reach another host.
    """
    me = socket.gethostname()
    if node == 0:
        wait_for(store, ["source"], node, nodes, seconds)
    mine = own_interface(store, node, main_address, interface)
    probe = Probe(mine.address)
    store.set(f"host/{node}", json.dumps([me, mine.address, probe.port]))
    keys = [f"host/{number}" for number in range(nodes)]
    wait_for(store, keys, node, nodes, seconds)
    everyone = [ProbedHost(number, *json.loads(store.get(key))) for number, key in enumerate(keys)]
    others = [peer for peer in everyone if peer.node != node]
    failures = []
    for peer in others:
        answer, reason = ping(peer, min(PING_SECONDS, seconds))
        if answer != "here":
            failures.append(f"{me} ({mine.address} on {mine.name}) cannot reach {peer} on port {peer.port}: {reason}")
    store.set(f"failures/{node}", json.dumps(failures))
    keys = [f"failures/{number}" for number in range(nodes)]
    wait_for(store, keys, node, nodes, seconds + nodes * PING_SECONDS)
    failures = [failure for key in keys for failure in json.loads(store.get(key))]
    if failures:
        store.set(f"informed/{node}", "")
        if node == 0:
            # This process serves the store, so it must not end before all hosts have read the failures.
            missing_after(store, [f"informed/{number}" for number in range(nodes)], PING_SECONDS)
        raise ConfigurationError(
            "; ".join(failures)
            + ": allow TCP connections on all ports between the machines of the run, or set another "
            "interface with --interconnect.interface"
        )
    store.set(f"interface/{node}", mine.name)
    return mine, probe, others


def own_interface(store: Store, node: int, main_address: str, wanted: str | None) -> Interface:
    """Return the interface of this host for the traffic to the other hosts.

    Each host except the first uses its route to the main address, and stores its own address under the key ``source``.
    The first host uses its route to this stored address.
    """
    if node == 0:
        # The main address belongs to this host, so the route to it uses the loopback interface. The route to another
        # host's address is therefore used to find the interface.
        return choose_interface(wanted, store.get("source").decode())
    mine = choose_interface(wanted, resolve(main_address))
    store.set("source", mine.address)
    return mine


def interface_of(store: Store, node: int, nodes: int, seconds: float) -> str:
    """Return the name of the interface that the first process on this host has chosen.

    The other processes on this host call this function.
    """
    wait_for(store, [f"interface/{node}"], node, nodes, seconds)
    return store.get(f"interface/{node}").decode()


def wait_for(store: Store, keys: list[str], node: int, nodes: int, seconds: float) -> None:
    """Wait until all keys exist in the store.

    Raises:
        ConfigurationError: A key is missing after ``seconds``. The error message has the numbers of the hosts that are
            missing and the names of the hosts that have announced themselves.
    """
    late = missing_after(store, keys, seconds)
    if not late:
        return
    present = {number: store.get(f"host/{number}") for number in range(nodes) if store.check([f"host/{number}"])}
    known = [f"{ProbedHost(number, *json.loads(record))}" for number, record in present.items()]
    missing = [f"node {number}" for number in range(nodes) if number not in (node, *present)]
    # If all hosts have announced themselves, the error message names the hosts whose keys are missing.
    missing = missing or [f"node {key.rpartition('/')[2]}" for key in late]
    raise ConfigurationError(
        f"{socket.gethostname()} has waited {seconds:g} s for {', '.join(missing)}"
        f"{' (already connected: ' + ', '.join(known) + ')' if known else ''}: start the run on all {nodes} machines "
        "with the same MASTER_ADDR and MASTER_PORT, and check the output of the other machines; set a longer wait with "
        "--interconnect.wait (doctor: --wait)"
    )


class Watch:
    """Thread that pings the other hosts of a run and reports a host that does not answer any more.

    Without this thread, a collective would wait for a lost host until the process group's time-out, by default 30
    minutes, and would fail with an error that does not name the host. A host that refuses the connection is not
    reported: the run's processes on this host have ended, and collectives on the other hosts then fail immediately.

    Args:
        me: Name of this host.
        peers: The other hosts.
        timeout: Time after which a host that does not answer counts as lost, in seconds.
        on_silent: Function that is called once, in this thread, with an error message.
    """

    def __init__(self, me: str, peers: Sequence[ProbedHost], timeout: float, on_silent: Callable[[str], None]) -> None:
        self._me = me
        self._peers = list(peers)
        self._timeout = timeout
        self._on_silent = on_silent
        self._interval = min(2.0, timeout / 4)
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that pings the other hosts."""
        self._stopped.set()
        self._thread.join()

    def _ask(self) -> dict[ProbedHost, tuple[Answer, str]]:
        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(self._peers))) as pool:
            answers = pool.map(lambda peer: ping(peer, self._interval), self._peers)
            return dict(zip(self._peers, answers, strict=True))

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            answers = self._ask()
            now = time.monotonic()
            for peer, (answer, _) in answers.items():
                if answer != "silent":
                    self._heard[peer] = now
            lost = [peer for peer in self._peers if now - self._heard[peer] > self._timeout]
            if lost and not self._stopped.is_set():
                names = ", ".join(map(str, lost))
                reason = answers[lost[0]][1]
                alone = len(lost) == len(self._peers) > 1
                hint = "; no other host answers, so this host's own connection may be broken" if alone else ""
                self._on_silent(
                    f"{self._me} has not reached {names} for {self._timeout:g} s ({reason}){hint}: the run ends; "
                    "repair the connection and resume from the last checkpoint, or set a longer --interconnect.timeout"
                )
                return


@contextlib.contextmanager
def across_hosts(trainer: Trainer, interconnect: Interconnect) -> Iterator[None]:
    """Test the connections between the hosts before a run starts, and watch the hosts during the run.

    The first process on each host does this. A run on a single host uses the loopback interface. If the strategy
    connects the hosts itself, this function only sets the strategy's time-out.

    Raises:
        ConfigurationError: A host is missing or cannot be reached, or the strategy forks or spawns its ranks.
    """
    strategy = trainer.strategy
    facts = facts_of(strategy)
    environment = facts.environment
    if facts.connects_hosts:
        facts.set_host_timeout(interconnect.wait)
    if facts.connects_hosts or environment is None:
        yield
        return
    if trainer.num_nodes > 1 and ranks_are_children(strategy.launcher):
        raise ConfigurationError(
            f"trainer.num_nodes={trainer.num_nodes} cannot be used with a strategy that forks or spawns its ranks: set "
            "trainer.strategy to the name without _fork or _spawn"
        )
    with ranks_meet(strategy, interconnect.wait) as meeting:
        if meeting is None or trainer.num_nodes == 1:
            yield
        else:
            with _watched(trainer, environment, meeting, interconnect):
                yield


@contextlib.contextmanager
def _watched(
    trainer: Trainer, environment: ClusterEnvironment, meeting: Meeting, interconnect: Interconnect
) -> Iterator[None]:
    """Test the connections between the hosts of a run on several hosts, and watch the hosts inside this context."""
    strategy, watch, probe = trainer.strategy, None, None
    store = meeting.shared_store(interconnect.wait)
    if environment.local_rank() == 0:
        node, nodes = environment.node_rank(), trainer.num_nodes
        interface, probe, others = meet(store, node, nodes, meeting.address, interconnect.interface, interconnect.wait)
        name = interface.name

        def end(message: str) -> None:
            print(f"cnnstrategies: error: {message}", file=sys.stderr, flush=True)
            # The main thread may wait in a collective that cannot be interrupted, so this process and the processes
            # that it has started end at once.
            if strategy.launcher is not None:
                strategy.launcher.kill(signal.SIGKILL)
            exit_at_once(UNREACHABLE)

        watch = Watch(socket.gethostname(), others, interconnect.timeout, end)
    else:
        name = interface_of(store, environment.node_rank(), trainer.num_nodes, interconnect.wait)
    use_interface(name)
    try:
        yield
    finally:
        if watch is not None and probe is not None:
            watch.close()
            probe.close()
