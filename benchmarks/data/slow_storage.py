"""Images per second from a file system behind a network with a delay, beside the same files in memory.

    python benchmarks/data/loaders.py make DIR
    python benchmarks/data/slow_storage.py measure DIR [--delay 2] [--mbit 1000] [--rounds 2] [--seconds 4]
    python benchmarks/data/slow_storage.py page DIR

`measure` needs root, sshfs and iproute2. It adds its results to DIR/slow.jsonl; it may be run several times. `page`
writes slow_storage.md beside this file.

The images are those of [loading images](loaders.md), and come by sshfs: from a network namespace, over a cable that tc
limits (tbf), through a relay that holds every request back for the delay, from an sftp server that has all of them in
memory. Each measurement has a mount of its own, so that nothing is in the loader's memory, and begins anywhere in the
epoch. As with NFS, what was read stays in memory as long as the file's time does not change (sshfs's `auto_cache`).
Loaders have one core and four worker processes, and give bytes; storage, relay and sshfs have the other core.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loaders
import torch

WORKERS = 4
PORT = 2222
STORAGE, CLIENT = "10.77.8.1", "10.77.8.2"
SERVER = "/usr/lib/openssh/sftp-server"
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
LOADERS: dict[str, Callable[..., loaders.Batches]] = {
    "ImageFolder, Pillow": loaders.image_folder,
    "WebDataset, Pillow": loaders.webdataset,
    "LitData, Pillow": loaders.litdata,
    "Mosaic Streaming, Pillow": loaders.streaming,
    "cnnstrategies, Pillow": loaders.ours("whole", "pillow"),
    "cnnstrategies, packed with --size 256, Pillow": loaders.ours("256", "pillow"),
}


def serve(delay: float, ready: Any) -> None:
    """Be the storage: for each connection an sftp server, which sees the client's words later."""
    _unshare(CLONE_NEWNET)
    ready.send(os.getpid())
    ready.recv()  # The cable is there.
    listener = socket.create_server((STORAGE, PORT))
    ready.send("listens")
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = subprocess.Popen([SERVER, "-R"], stdin=subprocess.PIPE, stdout=connection)
        threading.Thread(target=hold_back, args=(connection, server, delay), daemon=True).start()


def hold_back(connection: socket.socket, server: "subprocess.Popen[bytes]", delay: float) -> None:
    """Hand on what comes, each piece `delay` seconds after it came."""
    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    assert server.stdin is not None

    def hand_on() -> None:
        while (piece := held.get())[1]:
            time.sleep(max(0.0, piece[0] - time.monotonic()))
            os.write(server.stdin.fileno(), piece[1])  # type: ignore[union-attr]
        server.terminate()

    threading.Thread(target=hand_on, daemon=True).start()
    with contextlib.suppress(ConnectionResetError):  # A reader that has measured enough is killed.
        while piece := connection.recv(1 << 16):
            held.put((time.monotonic() + delay, piece))
    held.put((0.0, b""))


def connect(storage: int, mbit: int) -> None:
    """Join this network namespace with the storage's, by a cable of so many Mbit/s."""
    run("ip", "link", "add", "client", "type", "veth", "peer", "name", "storage", "netns", str(storage))
    run("ip", "address", "add", f"{CLIENT}/24", "dev", "client")
    run("ip", "link", "set", "client", "up")
    there = ("nsenter", f"--net=/proc/{storage}/ns/net")
    run(*there, "ip", "address", "add", f"{STORAGE}/24", "dev", "storage")
    run(*there, "ip", "link", "set", "storage", "up")
    for words, device in (((), "client"), (there, "storage")):
        run(*words, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb",
            "latency", "100ms")  # fmt: skip


def run(*words: str) -> None:
    """Run a program."""
    subprocess.run(words, check=True)


def _unshare(namespaces: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(namespaces) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def mount(folder: Path, at: Path) -> None:
    """Mount the storage's folder."""
    options = f"directport={PORT},ro,auto_cache,max_conns=4,cache_timeout=60,dcache_timeout=60"
    run("sshfs", "-o", options, f"{STORAGE}:{folder.resolve()}", str(at))


def measure(folder: Path, delay: float, mbit: int, rounds: int, seconds: float, names: list[str]) -> None:
    """Run all loaders in turn from memory and from the mount, and add what they did to the results."""
    context = multiprocessing.get_context("fork")
    __import__("webdataset"), __import__("litdata"), __import__("streaming")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:2])
    _unshare(CLONE_NEWNET | CLONE_NEWNS)
    run("mount", "--make-rprivate", "/")
    ready, theirs = context.Pipe()
    storage = context.Process(target=serve, args=(delay, theirs), daemon=True)
    storage.start()
    connect(ready.recv(), mbit)
    ready.send("cable")
    ready.recv()
    with tempfile.TemporaryDirectory(prefix="slow-storage-") as temporary:
        at = Path(temporary)
        for _ in range(rounds):
            for name in names:
                for slow in (False, True):
                    if slow:
                        mount(folder, at)
                    try:
                        rate = _rate(context, name, at if slow else folder, cores[0], seconds)
                    finally:
                        if slow:
                            run("umount", "--lazy", str(at))
                    print(f"{'slow' if slow else 'memory':6} {name:75} {rate:7.0f}", flush=True)
                    row = {"name": name, "slow": slow, "delay": delay, "mbit": mbit, "rate": rate}
                    with (folder / "slow.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")
    os.kill(storage.pid or 0, signal.SIGKILL)


def _rate(context: Any, name: str, folder: Path, core: int, seconds: float) -> float:
    results = context.Queue()
    process = context.Process(target=one, args=(name, folder, core, seconds, results))
    process.start()
    try:
        return float(results.get(timeout=60))
    finally:
        process.join(20)
        process.kill()


def one(name: str, folder: Path, core: int, seconds: float, results: Any) -> None:
    """Measure one loader in this process; the first batches, in which workers start, do not count."""
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    batches = LOADERS[name](folder, WORKERS, False)
    for _ in range(3 * WORKERS):  # More than workers have ready.
        next(batches)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter() - start) < seconds:
        count += len(next(batches)[0])
    results.put(count / now)
    results.close()
    results.join_thread()
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def page(folder: Path, path: Path) -> None:
    """Write the page."""
    rows = [json.loads(line) for line in (folder / "slow.jsonl").read_text().splitlines()]
    images = len(list((folder / "images/train").rglob("*.jpg")))
    version = subprocess.run(["sshfs", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    lines = loaders.beginning("Loading images from slow storage", __doc__, f"{images} images; {version}")
    for delay, mbit in sorted({(row["delay"], row["mbit"]) for row in rows}):
        lines += [f"## {delay * 1000:g} ms, {mbit} Mbit/s", ""]
        lines += ["| Images per second | in memory | slow | lowest to highest | of that in memory |", f"|{'---|' * 5}"]
        for name in LOADERS:
            here = [row for row in rows if (row["name"], row["delay"], row["mbit"]) == (name, delay, mbit)]
            memory, slow = ([row["rate"] for row in here if row["slow"] is is_slow] for is_slow in (False, True))
            if not slow:
                continue
            middle = statistics.median(slow)
            share = f"{middle / statistics.median(memory):.2f}"
            cells = [name, f"{statistics.median(memory):.0f}", f"{middle:.0f}", f"{min(slow):.0f} to {max(slow):.0f}"]
            lines.append(f"| {' | '.join([*cells, share])} |")
        rounds = max(sum(row["name"] == name and row["slow"] for row in rows) for name in LOADERS)
        lines += ["", f"Medians; rounds, in each of which all run in turn: {rounds}.", ""]
    path.write_text("\n".join(lines))


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "page"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--delay", type=float, default=2.0, help="milliseconds")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--names", nargs="*", default=list(LOADERS))
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    if options.what == "page":
        page(options.folder, options.page)
        return
    for program in ("sshfs", "tc", SERVER):
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None:
            sys.exit(f"{program} is not installed (Debian: apt-get install sshfs openssh-server iproute2)")
    measure(options.folder, options.delay / 1000, options.mbit, options.rounds, options.seconds, options.names)


if __name__ == "__main__":
    main()
