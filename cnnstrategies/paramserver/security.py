"""CURVE keys, admission of connections by their public key, and the check whether an endpoint must be encrypted."""

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

PROOF_BYTES = 32  # number of bytes of a proof that a process has the run's keys; see `prove`


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair.

    Attributes:
        public: The public key, encoded in Z85.
        secret: The secret key, encoded in Z85. It does not appear in the object's ``repr``.
    """

    public: str
    secret: str = field(repr=False)

    @classmethod
    def create(cls) -> "KeyPair":
        """Create a new random key pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    def save(self, path: str | Path) -> None:
        """Write the key pair to a new file that only its owner can read.

        Raises:
            FileExistsError: The file already exists; keys are never overwritten.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{self.public}\n{self.secret}\n")

    @classmethod
    def load(cls, path: str | Path) -> "KeyPair":
        """Read the key pair from a file that :meth:`save` wrote.

        Raises:
            ConfigurationError: The file's mode gives permissions to other users, or the file does not contain a key
                pair.
        """
        mode = os.stat(path).st_mode & 0o777
        if mode & 0o077:
            raise ConfigurationError(
                f"{path} has mode {mode:o}, so other users may read the secret key: run chmod 600 {path}"
            )
        lines = Path(path).read_text().split()
        if len(lines) != 2 or zmq.curve_public(lines[1].encode()) != lines[0].encode():
            raise ConfigurationError(f"{path} does not contain a CURVE key pair: create a new key file")
        return cls(lines[0], lines[1])


def fingerprint(public_key: str) -> int:
    """Return the number by which the coordinator identifies the process with this public key.

    Only the process that has the matching secret key can send messages with this number as the sender.
    """
    return int.from_bytes(hashlib.sha256(public_key.encode()).digest()[:8], "big") >> (64 - SECRET_BITS)


def prove(run: KeyPair, public_key: str) -> bytes:
    """Return the proof that a process has the run's keys: an HMAC of the process's public key.

    Args:
        run: The run's keys; the secret key is the key of the HMAC.
        public_key: The process's own public key.
    """
    return hmac.digest(run.secret.encode(), public_key.encode(), "sha256")


def process_number(keys: KeyPair | None) -> int:
    """Return the number by which the coordinator identifies this process.

    Args:
        keys: The process's own keys, from which the number is computed. Without keys the number is random.
    """
    return secrets.randbits(SECRET_BITS) if keys is None else fingerprint(keys.public)


def is_local(endpoint: str) -> bool:
    """Return whether only processes on this machine can reach an endpoint (ipc, inproc, or a loopback address).

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
            f"endpoint {endpoint!r}: the parameter server supports only IPv4: replace the IPv6 address by an IPv4 "
            "address of the same machine, or by a host name with an IPv4 address, here or in MASTER_ADDR"
        )
    if match[2] != "*" and not 0 < int(match[2]) < 2**16:
        raise ConfigurationError(f"endpoint {endpoint!r}: use a port from 1 to 65535")
    if match[1] == "localhost":
        return True
    try:
        return ipaddress.ip_address(match[1]).is_loopback
    except ValueError:
        return False


def check_endpoint(endpoint: str, encrypted: bool, insecure: bool = False) -> None:
    """Check that an endpoint is encrypted, unless it is ``ipc://`` or ``inproc://``.

    TCP on a loopback address must also be encrypted, because every user of the machine can connect to it.

    Args:
        endpoint: The endpoint.
        encrypted: Whether the endpoint is encrypted.
        insecure: Whether the user allows TCP without encryption.

    Raises:
        ConfigurationError: The endpoint must be encrypted.
    """
    if not (encrypted or insecure) and (endpoint.startswith("tcp://") or not is_local(endpoint)):
        raise ConfigurationError(
            f"other users can reach endpoint {endpoint}, and without encryption they can change the parameters: use "
            "security='curve', or ipc:// in a private directory, or set insecure=True on a private network"
        )


# Every listening socket has this ZAP domain, with or without encryption. Without a domain, libzmq 4.3.5 aborts the
# process with an assertion (zmtp_engine.cpp:422) if a peer uses version 1 of the protocol and disconnects at once. With
# a domain, libzmq rejects such a peer.
ZAP_DOMAIN = b"cnnstrategies"


class Gatekeeper:
    """ZAP handler (ZeroMQ RFC 27) that admits or refuses connections by their CURVE public key.

    The gatekeeper needs no thread: the caller polls :attr:`socket`, and calls :meth:`answer` when the socket is
    readable. Unknown keys are refused with the status for temporary errors (300), so that the peer tries again later.
    By then, the peer may have become a member. Each libzmq context can have only one gatekeeper.

    Args:
        context: libzmq context that contains the sockets to protect.
        admitted: Function that returns whether the process with a public key, encoded in Z85, may connect.

    Attributes:
        socket: Socket on which libzmq's requests to admit connections arrive.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Callable[[str], bool]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._admitted = admitted

    def answer(self) -> None:
        """Receive one of libzmq's requests to admit a connection, and send the reply."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]).decode("ascii") if mechanism == b"CURVE" and credentials else ""
        if key and self._admitted(key):
            self.socket.send_multipart([version, request, b"200", b"", key.encode("ascii"), b""])
        else:
            self.socket.send_multipart([version, request, b"300", b"unknown key", b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
