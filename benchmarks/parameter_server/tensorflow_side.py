"""TensorFlow's side of `tensorflow_peer.py`, for an interpreter that has TensorFlow and need not have torch.

Roles: `worker` and `ps` serve until they are ended; `coordinator` trains with ParameterServerStrategy, its steps
scheduled by a ClusterCoordinator; `alone` trains without any strategy; `check` writes the losses of a few steps on one
batch. The layers, their initial values and the data are files that the other side wrote.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["GRPC_FAIL_FAST"] = "use_caller"  # As the guide of ParameterServerStrategy asks.

import numpy as np
import tensorflow as tf

PADDING = [[0, 0], [1, 1], [1, 1], [0, 0]]
EPSILON = 1e-5
STATISTICS_RATE = 0.1
WARM_UP = 10  # steps of both workers together, before those that are noted


class Network:
    """The layers that the other side wrote.

    Args:
        folder: Has `layers.json` and `values.npz`.
        statistics: Whether to keep BatchNorm's running statistics.
    """

    def __init__(self, folder: Path, statistics: bool) -> None:
        self.layers = json.loads((folder / "layers.json").read_text())
        self.keeps_statistics = statistics
        with np.load(folder / "values.npz") as values:
            self.values = {name: tf.Variable(values[name]) for name in values.files}
        self.running = {
            name: (
                tf.Variable(tf.zeros_like(value), trainable=False),
                tf.Variable(tf.ones_like(value), trainable=False),
            )
            for name, value in self.values.items()
            if name.endswith(".scale")
        }

    def __call__(
        self, values: dict[str, tf.Tensor], images: tf.Tensor, kind: tf.DType
    ) -> tuple[tf.Tensor, dict[str, list[tf.Tensor]]]:
        """Map images (N, H, W, C) to logits (N, classes), in training, and what normalisation has seen by name."""
        self._values, self._kind = values, kind
        self._batches: dict[str, list[tf.Tensor]] = {}
        return self._sequence(self.layers, images), self._batches

    def _sequence(self, layers: list[dict[str, Any]], x: tf.Tensor) -> tf.Tensor:
        for layer in layers:
            x = getattr(self, "_" + layer["kind"])(layer, x)
        return x

    def _block(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        stride, padding = layer["stride"], layer["padding"]
        shortcut = x[:, ::stride, ::stride, :] if stride > 1 else x
        if padding:
            shortcut = tf.pad(shortcut, [[0, 0], [0, 0], [0, 0], [0, padding]])
        return tf.nn.relu(self._sequence(layer["body"], x) + shortcut)

    def _cast(self, name: str) -> tf.Tensor:
        return tf.cast(self._values[name], self._kind)

    def _convolution(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        # SAME pads an even image on one side only when it is subsampled.
        padding = "SAME" if layer["stride"] == 1 else PADDING
        x = tf.nn.conv2d(x, self._cast(layer["name"] + ".weight"), layer["stride"], padding)
        bias = layer["name"] + ".bias"
        return tf.nn.bias_add(x, self._cast(bias)) if bias in self._values else x

    def _norm(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        scale, offset = (self._values[f"{layer['name']}.{part}"] for part in ("scale", "offset"))
        x, *batch = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, epsilon=EPSILON, is_training=True)
        self._batches[layer["name"] + ".scale"] = batch
        return x

    def _relu(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x)

    def _pool(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        return tf.nn.max_pool2d(x, 2, 2, "VALID")

    def _average(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x, [1, 2], keepdims=True)

    def _flatten(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [tf.shape(x)[0], x.shape[1] * x.shape[2] * x.shape[3]])

    def _linear(self, layer: dict[str, Any], x: tf.Tensor) -> tf.Tensor:
        return x @ self._cast(layer["name"] + ".weight") + self._cast(layer["name"] + ".bias")


class Training:
    """A network and SGD with momentum, in variables of the strategy in whose scope it is made."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.network = Network(options.folder, options.statistics)
        self.slots = [tf.Variable(tf.zeros_like(value), trainable=False) for value in self.network.values.values()]
        self.rate, self.momentum = options.learning_rate, options.momentum
        self.type = tf.bfloat16 if options.bf16 else tf.float32
        # Compiled are forward and backward, from values that have been read: a server's variables cannot be.
        self.computes = tf.function(self.compute, jit_compile=True) if options.xla else self.compute

    def compute(
        self, variables: list[tf.Tensor], images: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], dict[str, list[tf.Tensor]]]:
        """Loss, gradients, and the means and variances of the batch that normalisation has seen."""
        with tf.GradientTape() as tape:
            tape.watch(variables)
            named = dict(zip(self.network.values, variables, strict=True))
            logits, batches = self.network(named, tf.cast(images, self.type), self.type)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, tf.cast(logits, tf.float32))
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, variables), batches

    def step(self, images: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        """Make a step; the time and the loss before it, (2,)."""
        values = list(self.network.values.values())
        loss, gradients, batches = self.computes([tf.convert_to_tensor(value) for value in values], images, targets)
        if self.network.keeps_statistics:
            for name, batch in batches.items():
                for running, new in zip(self.network.running[name], batch, strict=True):
                    with tf.device(running.device):  # As Keras: the difference is taken where the variable is.
                        running.assign_sub((running - new) * STATISTICS_RATE)
        for value, slot, gradient in zip(values, self.slots, gradients, strict=True):
            tf.raw_ops.ResourceApplyMomentum(
                var=value.handle, accum=slot.handle, lr=self.rate, grad=gradient, momentum=self.momentum
            )
        # After the loss and not after the updates: once a step as well, and nothing waits for it.
        with tf.control_dependencies([loss]):
            now = tf.timestamp()
        return tf.stack([now, tf.cast(loss, tf.float64)])


def batches(options: argparse.Namespace) -> tf.data.Dataset:
    """Shuffled batches without end."""
    images = tf.io.decode_raw(tf.io.read_file(str(options.folder / "images")), tf.float32)
    targets = tf.io.decode_raw(tf.io.read_file(str(options.folder / "targets")), tf.int64)
    images = tf.reshape(images, [-1, options.size, options.size, 3])
    threads = tf.data.Options()
    threads.threading.private_threadpool_size = 1
    threads.threading.max_intra_op_parallelism = 1
    dataset = tf.data.Dataset.from_tensor_slices((images, targets)).shuffle(options.samples).repeat()
    return dataset.batch(options.batch_size, drop_remainder=True).prefetch(1).with_options(threads)


def coordinate(options: argparse.Namespace) -> list[list[float]]:
    """Train in a cluster; what each step noted."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        training = Training(options)

    iterator = iter(coordinator.create_per_worker_dataset(lambda: batches(options)))

    @tf.function
    def step(iterator: Iterator[Any]) -> tf.Tensor:
        return strategy.run(training.step, args=next(iterator))

    for _ in range(WARM_UP):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    notes = [coordinator.schedule(step, args=(iterator,)) for _ in range(options.steps)]
    coordinator.join()
    return [note.fetch().tolist() for note in notes]


def alone(options: argparse.Namespace) -> list[list[float]]:
    """Train in this process."""
    training = Training(options)
    step = tf.function(training.step)
    iterator = iter(batches(options))
    return [step(*next(iterator)).numpy().tolist() for _ in range(options.steps)]


def check(options: argparse.Namespace) -> list[list[float]]:
    """Train on the first batch only."""
    training = Training(options)
    step = tf.function(training.step)
    images = np.fromfile(options.folder / "images", np.float32).reshape(-1, options.size, options.size, 3)
    targets = np.fromfile(options.folder / "targets", np.int64)
    images, targets = (tf.constant(each[: options.batch_size]) for each in (images, targets))
    return [step(images, targets).numpy().tolist() for _ in range(options.steps)]


def serve(options: argparse.Namespace) -> None:
    """Be a worker or a parameter server."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=options.inter_op_threads
    )
    server = tf.distribute.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc", config=config
    )
    server.join()


def main() -> None:
    """Play a role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["version", "coordinator", "worker", "ps", "alone", "check"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--momentum", type=float)
    parser.add_argument("--statistics", type=int)
    parser.add_argument("--inter_op_threads", type=int, default=1)
    parser.add_argument("--xla", type=int, default=0)
    parser.add_argument("--bf16", type=int, default=0)
    options = parser.parse_args()
    if options.role == "version":
        print(tf.__version__)
        return
    if options.role in ("worker", "ps"):
        serve(options)
        return
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)
    notes = {"coordinator": coordinate, "alone": alone, "check": check}[options.role](options)
    options.result.write_text(json.dumps(notes))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
