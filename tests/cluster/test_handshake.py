"""A rank is let in by rank 0 of its own run, and by no other, in every order in which the ranks of two runs arrive."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from cnnstrategies.cluster.handshake import (
    MAGIC,
    Door,
    Hello,
    Knock,
    Message,
    Proof,
    RankCredentials,
    Refusal,
    Refused,
    Visit,
    Welcome,
    WrongBytesError,
    read,
    write,
)
from cnnstrategies.cluster.search import Answer, Failed, RankZeroSearch
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import Identity, StrangerError, configuration_digest

pytestmark = pytest.mark.light

RUN = Identity("digits", "0123456789ab", "SLURM step 7.0")
OTHER = Identity("letters", "ba9876543210", "SLURM step 7.1")
HOST = RankCredentials(RUN, "DDPStrategy", 0, 3, 100, b"secret")
GUEST = replace(HOST, rank=1)
LEAVES_WITHIN = 5.0


def shake(visit: Visit, knock: Knock) -> int | Refused:
    """Return the result of a handshake. Every message is written and read."""
    step: Message | int | Refused = knock.hello()
    while not isinstance(step, int | Refused):
        answer = visit.receive(read(bytearray(write(step))))
        step = knock.receive(read(bytearray(write(answer))))
    return step


def visited(door: Door, guest: RankCredentials) -> tuple[Visit, int | Refused]:
    visit = Visit(door, "ab" * 16)
    return visit, shake(visit, Knock(guest, "cd" * 16))


def test_a_rank_of_the_run_gets_the_port_of_the_store() -> None:
    for secret in (b"secret", b""):
        visit, result = visited(Door(replace(HOST, secret=secret), 4711), replace(GUEST, secret=secret))
        assert (visit.rank, result) == (1, 4711)


@pytest.mark.parametrize(
    ("guest", "reason"),
    [
        (replace(GUEST, identity=replace(RUN, name="letters")), ""),
        (replace(GUEST, identity=replace(RUN, configuration="ba9876543210")), ""),
        (replace(GUEST, identity=replace(RUN, launch="SLURM step 7.0 after 1 requeues")), ""),
        (replace(GUEST, strategy="FSDPStrategy"), "its strategy is DDPStrategy, and not FSDPStrategy"),
        (replace(GUEST, world=2), "it has 3 processes, and not 2"),
        (replace(GUEST, rank=0), "it has no place for a second process with rank 0"),
        (replace(GUEST, rank=3), "it has no place for a second process with rank 3"),
        (replace(GUEST, secret=b""), "the secret of its launch is different"),
        (replace(GUEST, secret=b"Secret"), "the secret of its launch is different"),
    ],
)
def test_every_other_process_is_refused(guest: RankCredentials, reason: str) -> None:
    visit, result = visited(Door(HOST, 4711), guest)
    assert isinstance(result, Refused)
    assert (visit.rank, result.run, result.reason) == (None, RUN, reason)


def test_the_door_checks_the_proof_and_not_only_the_rank() -> None:
    visit = Visit(Door(HOST, 4711), "ab" * 16)
    visit.receive(Knock(GUEST, "cd" * 16).hello())
    answer = visit.receive(Proof("ef" * 32))
    assert isinstance(answer, Refusal)
    assert visit.rank is None


def test_a_port_from_a_process_without_the_secret_is_not_used() -> None:
    visit, knock = Visit(Door(HOST, 4711), "ab" * 16), Knock(GUEST, "cd" * 16)
    proof = knock.receive(visit.receive(knock.hello()))
    welcome = visit.receive(proof)
    with pytest.raises(WrongBytesError):
        knock.receive(replace(welcome, port=4712))
    assert knock.receive(welcome) == 4711


def test_a_ranks_place_is_taken_once() -> None:
    door = Door(HOST, 4711)
    first, _ = visited(door, GUEST)
    _, result = visited(door, GUEST)
    assert isinstance(result, Refused)
    assert result.reason == "its rank 1 is another process, which has arrived earlier"
    first.end()  # The process has ended before the run began, so that its replacement is let in.
    assert visited(door, GUEST)[1] == 4711
    second, _ = visited(door, replace(GUEST, rank=2))
    second.end()  # The run has begun.
    assert isinstance(visited(door, replace(GUEST, rank=2))[1], Refused)
    joint = Door(HOST, 4711, exclusive=False)
    assert [visited(joint, GUEST)[1], visited(joint, GUEST)[1]] == [4711, 4711]


def test_messages_in_a_wrong_order_are_refused() -> None:
    visit = Visit(Door(HOST, 4711), "ab" * 16)
    for message in (Proof("ab"), Welcome(4711, "ab"), Refusal(RUN.text(), 0, "")):
        with pytest.raises(WrongBytesError):
            visit.receive(message)
    for message in (Welcome(4711, "ab"), Proof("ab"), Refusal("no run", 0, "")):
        with pytest.raises(WrongBytesError):
            Knock(GUEST, "cd").receive(message)


WRONG = (
    b"GET / HTTP/1.1\r\n",
    b"\x80\x04cos\nsystem\n",
    MAGIC + b"\xff\xff" + bytes(10),
    MAGIC + b"\x00\x02{}",
    MAGIC + b"\x00\x09[[[[[[[[[",
    MAGIC + b"\x00\x10" + b'["Proof", {}]   ',
    MAGIC + b"\x00\x15" + b'["Proof", {"proof":1}]'[:21],
)


def mutated(rng: random.Random, content: bytes) -> bytes:
    place, changed = rng.randrange(len(content)), bytearray(content)
    changed[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(changed)


def test_bytes_from_elsewhere_are_a_message_or_refused() -> None:
    for content in WRONG:
        with pytest.raises(WrongBytesError):
            assert read(bytearray(content)) is not None, content
    rng = random.Random(0)
    messages = [Hello(RUN.text(), "DDPStrategy", 1, 2, "ab"), Welcome(1, "ab"), Refusal(RUN.text(), 5, "no")]
    for _ in range(3000):
        buffer = bytearray(mutated(rng, write(rng.choice(messages))))
        try:
            message = read(buffer)
            if message is not None:
                Visit(Door(HOST, 4711), "ab").receive(message)
                Knock(GUEST, "cd").receive(message)
        except WrongBytesError:
            continue


def test_a_message_may_arrive_in_parts() -> None:
    content, buffer = write(Proof("ab")), bytearray()
    for byte in content[:-1]:
        buffer.append(byte)
        assert read(buffer) is None
    buffer += content[-1:] + b"cnn"
    assert read(buffer) == Proof("ab")
    assert buffer == b"cnn"


# A configuration's digest


CONFIGURATION = {
    "seed_everything": 1,
    "model": {"class_path": "ImageClassifier", "init_args": {"lr": 0.1}},
    "data": {"class_path": "Images", "init_args": {"root": "/data", "num_workers": 4, "batch_size": 32}},
    "trainer": {"max_epochs": 3, "devices": 2, "num_nodes": 1, "strategy": "ddp"},
    "run_name": "digits",
}


def with_value(path: str, value: object) -> dict[str, object]:
    result = {key: dict(section) if isinstance(section, dict) else section for key, section in CONFIGURATION.items()}
    *sections, key = path.split(".")
    target = result
    for section in sections:
        target[section] = dict(target[section])
        target = target[section]
    target[key] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "shared"),
    [
        ("model.init_args.lr", 0.2, True),
        ("seed_everything", 2, True),
        ("trainer.precision", "bf16-mixed", True),
        ("data.init_args.batch_size", 64, True),
        ("data.init_args.root", "/scratch/data", False),
        ("data.init_args.num_workers", 8, False),
        ("trainer.devices", 4, False),
        ("trainer.num_nodes", 2, False),
        ("trainer.strategy", "hybrid_pipeline", False),
        ("trainer.max_epochs", 4, False),
        ("ckpt_path", "last", False),
    ],
)
def test_the_digest_covers_what_all_ranks_share_and_a_resumed_run_keeps(path: str, value: object, shared: bool) -> None:
    changed = configuration_digest("fit", with_value(path, value))
    assert (changed != configuration_digest("fit", CONFIGURATION)) == shared


# Two runs and one list of ports


@dataclass
class Process:
    """A process of a simulated run. Rank 0 listens at the first free port; the others look for it."""

    rank: RankCredentials
    arrives: float
    certain: bool = True
    ends: float = float("inf")
    store_port: int | None = None
    error: Exception | None = None
    at: float = 0.0
    search: RankZeroSearch | None = None


PORTS = range(29500, 29504)


def simulate(processes: Sequence[Process], seconds: float = 300.0, others: Sequence[int] = ()) -> None:
    """Run processes in virtual time. The store's port of a run is 1000 plus the time at which its rank 0 arrives.

    Args:
        processes: The processes.
        seconds: Longest time to search.
        others: Ports at which another program listens, which does not answer.
    """
    doors: dict[int, tuple[Door, Process]] = {}

    def answer(port: int, guest: RankCredentials) -> Answer:
        if port in others:
            return Failed("mute")
        return visited(doors[port][0], guest)[1] if port in doors else Failed("absent")

    def live(process: Process, now: float) -> Iterator[float]:
        if process.rank.rank == 0:
            port = next(port for port in PORTS if port not in doors and port not in others)
            doors[port] = Door(process.rank, 1000 + int(now)), process
            return
        process.search = RankZeroSearch(
            process.rank.identity, process.rank.since, process.certain, "n1", "n2", now, seconds
        )
        while True:
            answers = {port: answer(port, process.rank) for port in process.search.ports(PORTS)}
            try:
                process.store_port = process.search.decide(now, answers)
            except ConfigurationError as error:
                process.error = error
            process.at = now
            if process.store_port is not None or process.error is not None:
                return
            now += process.search.pause
            yield now

    waiting = [(process.arrives, number, process, None) for number, process in enumerate(processes)]
    while waiting:
        waiting.sort(key=lambda entry: entry[:2])
        now, number, process, life = waiting.pop(0)
        for port in [port for port, (_, owner) in doors.items() if owner.ends <= now]:
            del doors[port]
        life = life or live(process, now)
        if (after := next(life, None)) is not None:
            waiting.append((after, number, process, life))


def ranks(identity: Identity, *arrivals: float, since: int = 100, certain: bool = True) -> list[Process]:
    world = len(arrivals)
    members = [RankCredentials(identity, "DDPStrategy", rank, world, since) for rank in range(world)]
    return [Process(member, arrival, certain) for member, arrival in zip(members, arrivals, strict=True)]


@pytest.mark.parametrize("other", [OTHER, replace(RUN, launch="SLURM step 8.0"), replace(RUN, name="", launch="x")])
def test_two_runs_with_one_port_never_mix_in_any_order(other: Identity) -> None:
    """Their launchers start all ranks, so every rank waits for its own rank 0."""
    for times in itertools.permutations((0.0, 8.0, 16.0, 24.0)):
        first, second = ranks(RUN, *times[:2]), ranks(other, *times[2:])
        simulate([*first, *second])
        for host, guest in (first, second):
            assert (guest.error, guest.store_port) == (None, 1000 + int(host.arrives)), times


def test_a_port_of_another_program_delays_nobody() -> None:
    processes = ranks(RUN, 10.0, 0.0, 20.0)
    simulate(processes, others=[29500, 29501])
    assert [process.store_port for process in processes[1:]] == [1010, 1010]
    assert [process.at < process.arrives + 11 for process in processes] == [True] * 3


@pytest.mark.parametrize("arrives", [0.0, 50.0])
def test_a_rank_that_users_have_started_alone_leaves_within_seconds(arrives: float) -> None:
    """Both orders: the stranger arrives before or after rank 0 of the run that it knocks at."""
    run, stranger = ranks(RUN, 20.0, 10.0, 60.0), ranks(OTHER, 0.0, arrives, certain=False)[1]
    simulate([*run, stranger])
    assert isinstance(stranger.error, StrangerError)
    assert stranger.at - max(arrives, 20.0) < LEAVES_WITHIN
    text = str(stranger.error)
    assert f"{RUN} at n1, port 29500" in text
    assert str(OTHER) in text
    assert "\n" not in text
    assert [process.store_port for process in run[1:]] == [1020, 1020]


@pytest.mark.parametrize("arrives", [0.0, 50.0])
def test_a_rank_of_yesterdays_launch_leaves_within_seconds(arrives: float) -> None:
    yesterday = ranks(replace(RUN, launch="SLURM step 6.0"), 0.0, arrives, since=50)[1]
    today = ranks(RUN, 20.0, 10.0)
    simulate([*today, yesterday])
    assert isinstance(yesterday.error, StrangerError)
    assert "left over from another launch" in str(yesterday.error)
    assert yesterday.at - max(arrives, 20.0) < LEAVES_WITHIN
    assert today[1].store_port == 1020


def test_todays_rank_waits_while_yesterdays_rank_0_still_listens() -> None:
    yesterday = ranks(replace(RUN, launch="SLURM step 6.0"), 0.0, since=50)
    yesterday[0].ends = 30.0
    today = ranks(RUN, 60.0, 10.0)
    simulate([*yesterday, *today])
    assert today[1].store_port == 1060


def test_ranks_of_one_launch_with_two_configurations_are_told_so() -> None:
    different = ranks(replace(RUN, configuration="ba9876543210"), 0.0, 10.0)[1]
    simulate([*ranks(RUN, 5.0, 6.0), different])
    assert isinstance(different.error, StrangerError)
    assert "with the same configuration" in str(different.error)
    assert different.at < 10.0 + LEAVES_WITHIN


def test_without_any_rank_0_the_error_names_the_reason() -> None:
    for others, reason in (((), "no process listens at the port"), (PORTS, "is not a run of cnnstrategies")):
        rank = ranks(RUN, 0.0, 0.0)[1]
        simulate([rank], seconds=20.0, others=others)
        assert not isinstance(rank.error, StrangerError)
        text = "n2 has not reached the main address n1 on port 29500 for 20 s: "
        assert str(rank.error).startswith(text)
        assert reason in str(rank.error)
        assert rank.at < 21.0
