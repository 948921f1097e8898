"""What one server does with updates, without sockets: each counts once, and is seen when no death can take it back."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training import specify

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.effects import Parcel, Say
from cnnstrategies.paramserver.messages import Encoding, Header, InvalidMessageError, Kind, pack_json, pack_keys
from cnnstrategies.paramserver.optimizers import SharedOptimizer
from cnnstrategies.paramserver.server.asynchronous import Asynchronous
from cnnstrategies.paramserver.server.pushes import Begin, Pushes
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.state_messages import pack_state

pytestmark = pytest.mark.light

PLAIN = {"name": "SGD", "lr": 0.5}
VIEW = View(1, (ServerInfo(0, "ipc://0", since=1), ServerInfo(1, "ipc://1", since=1)), (WorkerInfo(0),))
WHO = (0, 0)


class Post:
    """Keeps what a server sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, int]] = []
        self.effects: list[Say] = []

    def to_worker(self, worker: int, kind: Kind, payload: Any = b"", key: int = 0, **_: Any) -> None:
        self.sent.append((kind, key))

    def to_server(self, server: int, kind: Kind, payload: Any = b"", key: int = 0, **_: Any) -> None:
        self.sent.append((kind, key))


def shard_of(server: int, specification: Specification, post: Any) -> Shard:
    """With zeros in all slices."""
    store = Store(specification, [slice_ for slice_ in cut(specification) if server in slice_.servers])
    shard = Shard(specification, server, post, store)
    shard.place(VIEW)
    for key, slice_ in shard.store.slices.items():
        shard.store.put(key, torch.zeros(slice_.numel, dtype=slice_.dtype), 0)
    return shard


def ones_for(shard: Shard, key: int) -> Tensor:
    return torch.ones(shard.store.slices[key].numel, dtype=torch.float64)


def push_of(key: int, gradient: Tensor, kind: Kind = Kind.PUSH, **fields: Any) -> tuple[Header, memoryview]:
    payload = as_bytes(gradient)
    return Header(kind, 0, 0, 1, Encoding.DENSE, key=key, length=len(payload), **fields), payload


def test_a_worker_sees_an_update_when_every_copy_has_it() -> None:
    specification, post = specify(PLAIN, 1, servers=2, replication=2), Post()
    shard = shard_of(0, specification, post)
    key, *_ = shard.own
    shard.pull(0, [key], Pull(request=1, version=1))
    shard.update({key: ones_for(shard, key)}, [group.options for group in specification.groups], WHO, 0)
    assert (Kind.RELAY, key) in post.sent
    assert (Kind.PULLED, key) not in post.sent
    shard.acknowledged(1, key, 1)
    assert (Kind.PULLED, key) in post.sent


def test_a_server_says_when_it_has_filled_another_that_came_late() -> None:
    """Until then the run does not survive its own death."""
    specification, post = specify(PLAIN, 1, servers=2, replication=2), Post()
    shard = shard_of(0, specification, post)
    begun = replace(VIEW, number=2, begun=2)
    back = replace(VIEW, number=4, begun=2, servers=(VIEW.servers[0], ServerInfo(1, "ipc://2", since=4)))
    for view in (begun, replace(begun, number=3, servers=VIEW.servers[:1]), back, replace(back, number=5)):
        shard.place(view)
        for key in shard.own if view is begun else ():
            shard.acknowledged(1, key, 0)
    *most, last = shard.own
    assert most, "it has slices of server 1, too"
    for key in most:
        shard.acknowledged(1, key, 0)
    assert post.effects == []
    for _ in range(2):
        shard.acknowledged(1, last, 0)
    assert [effect.text for effect in post.effects] == [
        "server 0 has filled server 1: its slices have all their copies again"
    ]


def test_a_worker_waits_for_the_version_that_it_asks_for() -> None:
    specification, post = specify(PLAIN, 1, servers=2), Post()
    shard = shard_of(0, specification, post)
    key, *_ = shard.own
    options = [group.options for group in specification.groups]
    shard.pull(0, [key], Pull(request=2, version=2))
    for step in range(2):
        assert post.sent == []
        shard.update({key: ones_for(shard, key)}, options, WHO, step)
    assert post.sent == [(Kind.PULLED, key)]


def test_a_copy_applies_an_update_that_comes_twice_once() -> None:
    specification = specify(PLAIN, 1, servers=2, replication=2)
    shard = shard_of(1, specification, Post())
    key = next(key for key in shard.store.slices if key not in shard.owned)
    shard.copies.relay_begins(0, [group.options for group in specification.groups])
    relay = push_of(key, ones_for(shard, key), Kind.RELAY, weight=1.0)
    shard.copies.relayed(0, *relay)
    assert shard.store.versions[key] == 0, "its values may be those of a snapshot, which are others of that version"
    described: dict[str, Any] = {"parts": 0, "seen": [], "lineage": 0, "decided": None}
    copy, payload = push_of(key, 0 * ones_for(shard, key), Kind.COPY)
    shard.copies.copied(0, copy, described, payload)
    for _ in range(2):
        shard.copies.relayed(0, *relay)
    assert shard.store.versions[key] == 1
    assert torch.equal(shard.store.values[key], -0.5 * ones_for(shard, key))


def test_a_first_value_is_taken_with_all_of_its_optimizers_state() -> None:
    """A part that was lost comes again with the value: without it training would begin with another momentum."""
    specification = specify({"name": "SGD", "lr": 0.5, "momentum": 0.9}, 1, servers=2)
    store = Store(specification, [slice_ for slice_ in cut(specification) if 0 in slice_.servers])
    shard = Shard(specification, 0, Post(), store)  # type: ignore[arg-type]
    shard.place(VIEW)
    key, *_ = shard.own
    first = push_of(key, ones_for(shard, key), Kind.VALUE, base=1)
    with pytest.raises(InvalidMessageError, match="without all of its optimizer's state"):
        shard.initialise(first[0], {}, first[1])
    described, raw = pack_state("momentum_buffer", ones_for(shard, key))
    state = Header(Kind.STATE, 0, 0, 2, key=key, meta=0, length=len(raw))
    shard.initialise(state, described, memoryview(bytearray(raw)))
    shard.initialise(first[0], {}, first[1])
    assert shard.store.versions[key] == 0
    assert torch.equal(shard.store.values[key], ones_for(shard, key))


@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 1}], ids=["async", "ssp"])
def test_a_push_that_comes_twice_is_applied_once(mode: dict[str, Any]) -> None:
    specification = specify(PLAIN, 1, servers=2, **mode)
    shard = shard_of(0, specification, Post())
    applies = Asynchronous(specification, shard)
    applies.join(0, 0)
    applies.met(WHO, 0)
    applies.begin((0, 0), 0, Begin([group.options for group in specification.groups], 1.0))
    key, *_ = shard.own
    assert [applies.push(WHO, *push_of(key, ones_for(shard, key))) for _ in range(2)] == [True, False]
    applies.flush()
    assert [applies.push(WHO, *push_of(key, ones_for(shard, key))), shard.store.versions[key]] == [False, 1]
    assert torch.equal(shard.store.values[key], -0.5 * ones_for(shard, key))


@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 1}], ids=["async", "ssp"])
def test_a_push_is_not_applied_to_values_that_lack_those_before_it(mode: dict[str, Any]) -> None:
    """Those of a start or a snapshot, of a server that was started again: the worker has said, or will, what it has."""
    specification = specify(PLAIN, 1, servers=2, **mode)
    shard = shard_of(0, specification, Post())
    applies = Asynchronous(specification, shard)
    begin = Begin([group.options for group in specification.groups], 1.0)
    key, *_ = shard.own

    def push(step: int) -> bool:
        applies.begin(WHO, step, begin)
        header, payload = push_of(key, ones_for(shard, key))
        new = applies.push(WHO, header._replace(step=step), payload)
        applies.flush()
        return new

    with pytest.raises(InvalidMessageError, match="has not said yet what must be here"):
        push(0)
    applies.met(WHO, 1)
    assert push(1)
    assert push(2)
    with pytest.raises(InvalidMessageError, match="has not said yet what must be here"):
        push(4)
    applies.met(WHO, 4)  # It has left, and comes back.
    assert push(4)
    assert not push(4)
    assert shard.store.versions[key] == 3


def test_small_slices_that_come_together_cost_one_step_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from that nothing is different: each worker's is applied in its turn."""
    steps: list[int] = []
    step = SharedOptimizer.step
    monkeypatch.setattr(
        SharedOptimizer,
        "step",
        lambda self, gradients, *rest: (steps.append(len(gradients)), step(self, gradients, *rest)),
    )
    specification = specify({"name": "SGD", "lr": 0.5, "momentum": 0.9}, 2, servers=1, mode="async")
    shards = []
    for together in (True, False):
        shard = shard_of(0, specification, Post())
        applies = Asynchronous(specification, shard)
        for worker in range(2):
            applies.join(worker, 0)
            applies.met((worker, 0), 0)
            applies.begin((worker, 0), 0, Begin([group.options for group in specification.groups], 1.0))
            for key in shard.own:
                assert applies.push((worker, 0), *push_of(key, (worker + 1) * ones_for(shard, key)))
                if not together:
                    applies.settle()
            assert set(shard.store.versions.values()) == ({worker} if together else {worker + 1})
        applies.flush()
        shards.append(shard)
    one, other = shards
    assert steps == [len(one.own)] * 2 + [1] * 2 * len(one.own)
    assert one.store.versions == other.store.versions == dict.fromkeys(one.own, 2)
    for key in one.own:
        assert torch.equal(one.store.values[key], other.store.values[key])


def test_what_is_kept_to_be_applied_together_is_applied_before_anything_else_is_answered() -> None:
    specification = specify({"name": "SGD", "lr": 0.5, "momentum": 0.9}, 1, servers=1, mode="async")
    shard = shard_of(0, specification, Post())
    server = Server(specification, 0, shard.store)
    server.follow(0.0, View(1, VIEW.servers[:1], VIEW.workers))
    key = next(iter(shard.store.slices))
    hello = pack_json({"joins": True, "first": 0, "given": True, "request": None})
    begin = pack_json({"options": [group.options for group in specification.groups]})
    push = push_of(key, ones_for(shard, key))
    messages = [
        (Header(Kind.HELLO, 0, 0, 1, Encoding.KEYS, meta=len(hello), length=len(hello), base=1), memoryview(hello)),
        (Header(Kind.BEGIN, 0, 0, 2, meta=len(begin), length=len(begin), weight=1.0), memoryview(begin)),
        (push[0]._replace(sequence=3), push[1]),
        (Header(Kind.GET_STATE, 0, 0, 4), memoryview(b"")),
    ]
    answers = [effect for one in messages for effect in server.on_message(0.0, b"route", "", *one)]
    states = {
        one.header.key: one.payload[one.header.meta :] for one in answers if isinstance(one, Parcel) and one.payload
    }
    assert states[key] == bytes(as_bytes(ones_for(shard, key)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_values_come_in_the_encoding_that_the_worker_asks_for(mode: Any) -> None:
    """Its lowest bit left out, the pull's base names it; none for the specification's, and others are refused.

    As keys no value comes, only that it is there.
    """
    specification = specify(PLAIN, 1, servers=1, mode=mode, pull_compression="bf16")
    shard = shard_of(0, specification, Post())
    server = Server(specification, 0, shard.store)
    server.follow(0.0, View(1, VIEW.servers[:1], VIEW.workers))
    hello = pack_json({"joins": True, "first": 0, "given": True, "request": None})
    begin = Header(Kind.HELLO, 0, 0, 1, Encoding.KEYS, meta=len(hello), length=len(hello), base=1)
    server.on_message(0.0, b"route", "", begin, memoryview(hello))
    whole, got = 1, {}
    asked = 0, Encoding.DENSE << 1, Encoding.FP16 << 1, Encoding.BF16 << 1, whole, Encoding.KEYS << 1
    for sequence, base in enumerate(asked, 2):
        pull = Header(Kind.PULL, 0, 0, sequence, Encoding.KEYS, length=4, base=base)
        answers = server.on_message(0.0, b"route", "", pull, memoryview(pack_keys([0])))
        (got[base],) = (a.header.encoding for a in answers if isinstance(a, Parcel) and a.header.kind == Kind.PULLED)
    assert [*got.values()] == [
        Encoding.BF16, Encoding.DENSE, Encoding.FP16, Encoding.BF16, Encoding.DENSE, Encoding.NOTHING
    ]  # fmt: skip
    for sequence, base in enumerate((Encoding.TOPK << 1, Encoding.ONEBIT << 1, 1 << 20), 10):
        pull = Header(Kind.PULL, 0, 0, sequence, Encoding.KEYS, length=4, base=base)
        server.on_message(0.0, b"route", "", pull, memoryview(pack_keys([0])))
    assert server.dropped["a pull in an encoding that parameters do not have"] == 3


def test_a_push_that_comes_twice_is_counted_once() -> None:
    """With a count too high, a step would be decided while a slice is missing."""
    specification = specify(PLAIN, 1)
    slice_, *_ = cut(specification)
    pushes = Pushes()
    pushes.begun[0, 0] = Begin([], 1.0)
    _, payload = push_of(slice_.key, torch.ones(slice_.numel, dtype=torch.float64))
    assert [pushes.add((0, 0), slice_, payload, Encoding.DENSE) for _ in range(2)] == [True, False]
    assert pushes.count((0, 0)) == 1
