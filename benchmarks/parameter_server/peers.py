"""The same exchange over raw sockets, torch RPC and gRPC: workers push, servers average and update, workers pull.

Every function runs in one process of several; in a worker it returns the seconds of each round.
"""

import socket
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LEARNING_RATE = 1e-3
CHUNK = 1 << 20
SLICE = 1 << 21  # what a worker receives before it copies, where it does


class Average:
    """A server's part of the parameters: waits for both workers' gradients, steps once, and gives the values."""

    def __init__(self, numel: int, workers: int) -> None:
        self.values = torch.zeros(numel)
        self.gradients = [torch.zeros(numel) for _ in range(workers)]
        self._barrier = threading.Barrier(workers, action=self._update)

    def _update(self) -> None:
        for gradient in self.gradients[1:]:
            self.gradients[0].add_(gradient)
        self.values.add_(self.gradients[0], alpha=-LEARNING_RATE / len(self.gradients))

    def arrived(self) -> Tensor:
        """Wait for the other workers' gradients and the update; the values."""
        self._barrier.wait()
        return self.values


def memory(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill some memory from a connection."""
    while target:
        target = target[connection.recv_into(target, min(len(target), CHUNK)) :]


def wait_for(path: Path) -> str:
    """The text of a file that another process publishes."""
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def publish(path: Path, text: str) -> None:
    """Write a file at once for those who wait for it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def timed(rounds: int, exchange: Any) -> list[float]:
    """Seconds of each of some rounds."""
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - begun)
    return seconds


def listen(scheme: str, path: Path) -> socket.socket:
    """A listening socket, TCP or unix (``ipc``); its port or path is published."""
    if scheme == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        publish(path, str(listener.getsockname()[1]))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{path}-socket")
        listener.listen()
        publish(path, f"{path}-socket")
    return listener


def connect(scheme: str, path: Path) -> socket.socket:
    """A connection to who listens there."""
    address = wait_for(path)
    if scheme == "tcp":
        connection = socket.create_connection(("127.0.0.1", int(address)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    return connection


def raw_server(
    id: int, workers: int, servers: int, numel: int, rounds: int, directory: Path, scheme: str = "tcp"
) -> None:
    """A thread for each connection."""
    part = Average(numel // servers, workers)
    with listen(scheme, directory / f"raw-{id}") as listener:

        def serve(connection: socket.socket, gradient: Tensor) -> None:
            for _ in range(rounds):
                receive_into(connection, memory(gradient))
                connection.sendall(memory(part.arrived()))

        threads = []
        for worker in range(workers):
            connection, _ = listener.accept()
            if scheme == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=serve, args=(connection, part.gradients[worker])))
            threads[-1].start()
        for thread in threads:
            thread.join()


def raw_worker(
    id: int,
    workers: int,
    servers: int,
    numel: int,
    rounds: int,
    directory: Path,
    scheme: str = "tcp",
    copies: bool = False,
) -> list[float]:
    """A thread for each server; `copies`: values are received into a buffer and copied out, as libzmq makes us do."""
    connections = [connect(scheme, directory / f"raw-{server}") for server in range(servers)]
    buffers = [torch.empty(SLICE // 4) for _ in range(servers)]
    gradients, values = torch.ones(numel).chunk(servers), torch.zeros(numel).chunk(servers)

    def exchange_with(server: int) -> None:
        connections[server].sendall(memory(gradients[server]))
        if not copies:
            receive_into(connections[server], memory(values[server]))
            return
        for part in values[server].split(SLICE // 4):
            received = buffers[server][: part.numel()]
            receive_into(connections[server], memory(received))
            part.copy_(received)

    with futures.ThreadPoolExecutor(servers) as pool:
        return timed(rounds, lambda: list(pool.map(exchange_with, range(servers))))


PART: list[Average] = []


def rpc_exchange(worker: int, gradient: Tensor) -> Tensor:
    """Called in a server: take a gradient, give the values."""
    PART[0].gradients[worker] = gradient
    return PART[0].arrived()


def rpc(id: int, workers: int, servers: int, numel: int, rounds: int, directory: Path) -> list[float]:
    """Ranks 0 to `servers` - 1 are servers."""
    from torch.distributed import rpc as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc", num_worker_threads=8)
    if id < servers:
        PART.append(Average(numel // servers, workers))
    torch_rpc.init_rpc(f"p{id}", rank=id, world_size=workers + servers, rpc_backend_options=options)
    seconds = []
    if id >= servers:
        gradients, values = torch.ones(numel).chunk(servers), torch.zeros(numel).chunk(servers)

        def exchange() -> None:
            waiting = [
                torch_rpc.rpc_async(f"p{server}", rpc_exchange, (id - servers, gradients[server]))
                for server in range(servers)
            ]
            for value, future in zip(values, waiting, strict=True):
                value.copy_(future.wait())

        seconds = timed(rounds, exchange)
    torch_rpc.shutdown()
    return seconds


GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def grpc_server(id: int, workers: int, servers: int, numel: int, rounds: int, directory: Path) -> None:
    """Streams of 1 MiB, which were faster than whole messages."""
    import grpc

    part = Average(numel // servers, workers)

    def exchange(chunks: Any, context: Any) -> Any:
        worker, at = None, 0
        for chunk in chunks:
            if worker is None:
                worker = chunk[0]
                continue
            target = memory(part.gradients[worker])
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
        values = memory(part.arrived())
        for start in range(0, len(values), CHUNK):
            yield bytes(values[start : start + CHUNK])

    handler = grpc.method_handlers_generic_handler("ps", {"x": grpc.stream_stream_rpc_method_handler(exchange)})
    server = grpc.server(futures.ThreadPoolExecutor(workers), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    publish(directory / f"grpc-{id}", str(server.add_insecure_port("127.0.0.1:0")))
    server.start()
    for worker in range(workers):
        wait_for(directory / f"grpc-done-{worker}")
    server.stop(None)


def grpc_worker(id: int, workers: int, servers: int, numel: int, rounds: int, directory: Path) -> list[float]:
    """A thread for each server."""
    import grpc

    ports = [wait_for(directory / f"grpc-{server}") for server in range(servers)]
    channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) for port in ports]
    gradients, values = torch.ones(numel).chunk(servers), torch.zeros(numel).chunk(servers)

    def exchange_with(server: int) -> None:
        data = memory(gradients[server])

        def chunks() -> Any:
            yield bytes([id])
            for start in range(0, len(data), CHUNK):
                yield bytes(data[start : start + CHUNK])

        at, target = 0, memory(values[server])
        for chunk in channels[server].stream_stream("/ps/x")(chunks()):
            target[at : at + len(chunk)] = chunk
            at += len(chunk)

    with futures.ThreadPoolExecutor(servers) as pool:
        seconds = timed(rounds, lambda: list(pool.map(exchange_with, range(servers))))
    publish(directory / f"grpc-done-{id}", "")
    return seconds
