"""CURVE keys, who may connect, and where encryption may be left out."""

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
        """A new random pair."""
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
        """Read what :meth:`save` wrote.

        Raises:
            ConfigurationError: Others than the owner may read the file, or it does not hold a pair of keys.
        """
        mode = os.stat(path).st_mode & 0o777
        if mode & 0o077:
            raise ConfigurationError(f"{path} has mode {mode:o}, so others can read the secret key: chmod 600 {path}")
        lines = Path(path).read_text().split()
        if len(lines) != 2 or zmq.curve_public(lines[1].encode()) != lines[0].encode():
            raise ConfigurationError(f"{path} does not hold a pair of CURVE keys: create a new one")
        return cls(lines[0], lines[1])


def fingerprint(public_key: str) -> int:
    """The number by which the coordinator knows the process that has a key: whoever lacks the key is not that one."""
    return int.from_bytes(hashlib.sha256(public_key.encode()).digest()[:8], "big") >> (64 - SECRET_BITS)


def prove(run: KeyPair, public_key: str) -> bytes:
    """What only who has a run's keys can say of a key: with it, whoever has that key takes part."""
    return hmac.digest(run.secret.encode(), public_key.encode(), "sha256")


def process_number(keys: KeyPair | None) -> int:
    """That of this process: of its own keys, or without encryption one that nobody can guess."""
    return secrets.randbits(SECRET_BITS) if keys is None else fingerprint(keys.public)


def is_local(endpoint: str) -> bool:
    """Whether only processes of this machine reach an endpoint: ipc, inproc, or a loopback address."""
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
    """Refuse TCP without encryption: any user of this machine reaches the loopback.

    Raises:
        ConfigurationError: It is not encrypted, and the user has not said (`insecure`) that it need not be.
    """
    if not (encrypted or insecure) and (endpoint.startswith("tcp://") or not is_local(endpoint)):
        raise ConfigurationError(
            f"endpoint {endpoint} is reached by other users, and without keys any of them can change the parameters: "
            "use ipc:// in a directory of your own or security='curve', or say insecure=True on a network of your own"
        )


# Of every socket that listens, with keys or without: libzmq ends the process by an assertion (zmtp_engine.cpp:422 of
# 4.3.5) where a peer speaks its protocol's first version and goes at once. Where there is a domain it refuses that one.
ZAP_DOMAIN = b"cnnstrategies"


class Gatekeeper:
    """Admits connections by their CURVE key, in the thread that polls :attr:`socket` (ZAP, zeromq RFC 27).

    An unknown key is refused for the moment (status 300): the peer tries again, and may have become a member. A context
    can have one gatekeeper; `admitted` says whether a public key in Z85 form may connect.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Callable[[str], bool]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._admitted = admitted

    def answer(self) -> None:
        """Answer the request that is waiting."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        key = z85.encode(credentials[0]).decode("ascii") if mechanism == b"CURVE" and credentials else ""
        if key and self._admitted(key):
            self.socket.send_multipart([version, request, b"200", b"", key.encode("ascii"), b""])
        else:
            self.socket.send_multipart([version, request, b"300", b"unknown key", b"", b""])

    def close(self) -> None:
        """Close its socket."""
        self.socket.close()
