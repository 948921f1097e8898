"""CURVE keys, admission of connections, and the endpoints where encryption may be left out."""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import SECRET_BITS

PROOF_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85 form; the secret part is left out of its representation."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def create(cls) -> "KeyPair":
        """Return a new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    def save(self, path: str | Path) -> None:
        """Write the pair to a new file that only its owner can read.

        Raises:
            FileExistsError: The file exists: keys are never overwritten.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{self.public}\n{self.secret}\n")

    @classmethod
    def load(cls, path: str | Path) -> "KeyPair":
        """Return the pair that :meth:`save` wrote.

        Raises:
            ConfigurationError: Other users than the owner may read the file, or it does not hold a pair of keys.
        """
        mode = os.stat(path).st_mode & 0o777
        if mode & 0o077:
            raise ConfigurationError(f"{path} has mode {mode:o}, so others can read the secret key: chmod 600 {path}")
        lines = Path(path).read_text().split()
        if len(lines) != 2 or zmq.curve_public(lines[1].encode()) != lines[0].encode():
            raise ConfigurationError(f"{path} does not hold a pair of CURVE keys: create a new one")
        return cls(lines[0], lines[1])


def fingerprint(public_key: str) -> int:
    """Return the number that identifies the process with a public key to the coordinator.

    Only the process that has the secret key can send messages with this number.
    """
    return int.from_bytes(hashlib.sha256(public_key.encode()).digest()[:8], "big") >> (64 - SECRET_BITS)


def prove(run: KeyPair, public_key: str) -> bytes:
    """Return the proof that the process with a public key takes part; only a holder of the run's keys can make it."""
    return hmac.digest(run.secret.encode(), public_key.encode(), "sha256")


def process_number(keys: KeyPair | None) -> int:
    """Return the number that identifies this process: from its keys, or random without encryption."""
    return secrets.randbits(SECRET_BITS) if keys is None else fingerprint(keys.public)


def is_local(endpoint: str) -> bool:
    """Whether only processes of this machine can reach an endpoint: ipc, inproc, or a loopback address.

    Raises:
        ConfigurationError: The endpoint is not valid.
    """
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    match = re.fullmatch(r"tcp://\[?([^\]]+?)\]?:(\d+|\*)", endpoint)
    if match is None:
        raise ConfigurationError(f"endpoint {endpoint!r}: use ipc://path or tcp://address:port")
    if ":" in match[1]:
        raise ConfigurationError(
            f"endpoint {endpoint!r}: the parameter server speaks IPv4 only: give an IPv4 address of that machine, or a "
            "name that leads to one, here or as the main address (MASTER_ADDR)"
        )
    if match[2] != "*" and not 0 < int(match[2]) < 2**16:
        raise ConfigurationError(f"endpoint {endpoint!r}: a port is a number from 1 to 65535")
    if match[1] == "localhost":
        return True
    try:
        return ipaddress.ip_address(match[1]).is_loopback
    except ValueError:
        return False


def check_endpoint(endpoint: str, encrypted: bool, insecure: bool = False) -> None:
    """Check that TCP is encrypted: any user of this machine can reach the loopback.

    Raises:
        ConfigurationError: The endpoint is not encrypted, and the user has not allowed this with `insecure`.
    """
    if not (encrypted or insecure) and (endpoint.startswith("tcp://") or not is_local(endpoint)):
        raise ConfigurationError(
            f"other users can reach endpoint {endpoint}, and without keys any of them can change the parameters: use "
            "ipc:// in a directory of your own or security='curve', or set insecure=True on a network of your own"
        )


# The ZAP domain of every listening socket, with or without keys. Without a domain libzmq ends the process with an
# assertion (zmtp_engine.cpp:422 of 4.3.5) if a peer speaks the first version of the protocol and disconnects at once.
# With a domain libzmq refuses such a peer.
ZAP_DOMAIN = b"cnnstrategies"


class Gatekeeper:
    """Admission of connections by their CURVE key, in the thread that polls :attr:`socket` (ZAP, ZeroMQ RFC 27).

    An unknown key is refused temporarily (status 300): the peer tries again, and may have become a member by then. A
    context can have one gatekeeper.

    Args:
        context: The context of the sockets.
        admitted: Function that says whether a public key in Z85 form may connect.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Callable[[str], bool]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._admitted = admitted

    def answer(self) -> None:
        """Answer the waiting request."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]).decode("ascii") if mechanism == b"CURVE" and credentials else ""
        if key and self._admitted(key):
            self.socket.send_multipart([version, request, b"200", b"", key.encode("ascii"), b""])
        else:
            self.socket.send_multipart([version, request, b"300", b"unknown key", b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
