"""The control plane with real processes: what workers gather, who is in the view, and what a death does to it."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import zmq
from control_plane import Run
from local_cluster import wait_for

from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.view import TERM
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.services import CoordinatorProcess, Spares, start
from cnnstrategies.paramserver.supervision import Supervision


def every_collective(collectives):
    rank = collectives.membership.address.id
    collectives.barrier()
    results = {
        "gather": collectives.gather({"rank": rank}).values,
        "broadcast": collectives.broadcast([rank, None, "text"], source=1),
    }
    tensor = torch.tensor([rank + 1.0, 2.0])
    for how in ("sum", "mean", "max", "min", "product"):
        results[how] = collectives.reduce(tensor, how).tolist()
    results["integer"] = collectives.reduce(torch.tensor(rank), "sum").item()
    results["start"] = collectives.start().joined
    results["view"] = [worker.id for worker in collectives.membership.current().workers]
    collectives.barrier()  # Nobody leaves before the others have looked.
    return results


@pytest.mark.parametrize("workers", [1, 3])
def test_collectives_give_every_worker_the_same(tmp_path, workers):
    with Run(tmp_path, workers) as run:
        for rank in range(workers):
            run.worker(rank, every_collective)
        results = [run.result("worker", rank, 0) for rank in range(workers)]
    source = min(1, workers - 1)
    expected = {
        "gather": {rank: {"rank": rank} for rank in range(workers)},
        "broadcast": [source, None, "text"],
        "sum": [sum(range(1, workers + 1)), 2.0 * workers],
        "mean": [(workers + 1) / 2, 2.0],
        "max": [workers, 2.0],
        "min": [1.0, 2.0],
        "product": [[1, 2, 6][workers - 1], 2.0**workers],
        "integer": sum(range(workers)),
        "start": False,
        "view": list(range(workers)),
    }
    assert results == [expected] * workers


def go_on(collectives):
    """Training: collectives without end, until this is the only one left."""
    collectives.start()
    sizes = []
    while not sizes or sizes[-1] > 1:
        sizes.append(len(collectives.gather(None).values))
        if len(sizes) == 20:
            Path(f"trains-{collectives.membership.address.id}").touch()
    assert collectives.present == [collectives.membership.address.id]
    collectives.boundary(None)  # Brings the newest view.
    return sizes, [worker.id for worker in collectives.membership.current().workers]


def all_train():
    for rank in range(2):
        wait_for(Path(f"trains-{rank}"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_is_no_longer_waited_for(tmp_path, how):
    with Run(tmp_path, 2, options={"essential": []}) as run:
        for rank in range(2):
            run.worker(rank, go_on)
        all_train()
        run.kill("worker", 0, 0, how=how)
        sizes, view = run.result("worker", 1, 0)
        if how == signal.SIGSTOP:
            # It finds out when it goes on, and says so.
            run.kill("worker", 0, 0, how=signal.SIGCONT)
            assert "worker 0 was silent for 1 s and counts as dead" in run.result("worker", 0, 0)
    assert set(sizes[:-1]) == {2}
    assert sizes[-1] == 1
    assert view == [1]


def test_a_death_before_training_ends_the_run_and_names_who_died(tmp_path):
    def be_late(collectives):
        collectives.membership.wait_registered()
        Path("registered").touch()
        time.sleep(1000)

    with Run(tmp_path, 2) as run:
        run.worker(0, every_collective)
        late = run.worker(1, be_late)
        wait_for(Path("registered"))
        late.kill()
        message = run.result("worker", 0, 0)
    assert message.startswith(f"RunEnded: worker 1 (process {late.pid} on {os.uname().nodename}) was silent for 1 s")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_coordinator_every_worker_ends_and_says_why(tmp_path, how):
    with Run(tmp_path, 2) as run:
        for rank in range(2):
            run.worker(rank, go_on)
        all_train()
        run.kill("coordinator", 0, how=how)
        for rank in range(2):
            message = run.result("worker", rank, 0)
            assert message.startswith("RunEnded: the coordinator at ipc://")
            assert "was silent for 1 s" in message


def test_a_coordinator_that_is_started_again_goes_on_where_the_other_was_killed(tmp_path):
    def work(collectives):
        rank, done, sizes = collectives.membership.address.id, [], []
        name = collectives.broadcast(f"run of {os.getpid()}")
        collectives.start()
        for epoch in range(3):
            collectives.boundary(epoch)
            collectives.begin_epoch(epoch, 40, 2)
            processed = 0
            while chunk := collectives.take(epoch, processed):
                processed += len(chunk)
                done += [(chunk.epoch, one) for one in range(chunk.start, chunk.stop)]
                if (rank, epoch, processed) == (0, 1, 4):
                    run.time.hold()
                    os.kill(run.coordinator.pid, signal.SIGKILL)
            sizes.append(len(collectives.gather(None).values))
        return name, done, sizes, collectives.membership.current().number

    with Run(tmp_path, 2, timeout=30, options={"restartable": True}) as run:
        for rank in range(2):
            run.worker(rank, work)
        run.coordinator.join(60)
        run.time.go_on(run.coordinate(term=1).pid)
        names, done, sizes, numbers = zip(*(run.result("worker", rank, 0) for rank in range(2)), strict=True)
    assert names[0] == names[1]
    assert sizes == ([2, 2, 2], [2, 2, 2])
    assert sorted(done[0] + done[1]) == [(epoch, one) for epoch in range(3) for one in range(40)]
    assert all(number > TERM for number in numbers)


def test_services_start_without_lightning_and_outlive_the_signals_of_job_managers(tmp_path):
    """These reach every process of a job; the workers stop after their step, and need the services until then."""
    settings = CoordinatorSettings(f"ipc://{tmp_path}/coordinator", 1, 0)
    coordinator = start(CoordinatorProcess(settings), "program")
    while not Path(tmp_path / "coordinator").exists():
        time.sleep(0.01)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        coordinator.send_signal(signum)
    time.sleep(0.2)
    assert coordinator.poll() is None
    loaded = Path(f"/proc/{coordinator.pid}/maps").read_text()
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    # They would take more time than all the rest.
    assert "/zmq/" in loaded
    assert "/torch/" not in loaded
    assert "/torchvision/" not in loaded  # Lightning brings it along.


@pytest.mark.warm
def test_a_spare_becomes_what_it_is_told_and_is_ended_if_it_is_not_needed(tmp_path):
    spares = Spares()
    spares.prepare()
    waiting = spares.waiting
    assert waiting is not None
    service = spares.start(CoordinatorProcess(CoordinatorSettings(f"ipc://{tmp_path}/coordinator", 1, 0)))
    assert service is waiting
    while not Path(tmp_path / "coordinator").exists():
        assert service.poll() is None
        time.sleep(0.01)
    service.send_signal(signal.SIGKILL)
    waiting.wait()
    spares.prepare()
    unused = spares.waiting
    assert unused is not None
    unused.kill()
    unused.wait()
    assert spares.start(CoordinatorProcess(CoordinatorSettings("nowhere", 1, 0))) is not unused
    spares.prepare()
    last = spares.waiting
    spares.close()
    assert last is not None
    assert last.poll() is not None


def test_a_lost_server_ends_the_run_unless_it_has_a_copy(tmp_path):
    for survivable in (0, 1):
        directory = tmp_path / str(survivable)
        directory.mkdir()
        with Run(directory, 1, 2, options={"survivable": survivable}) as run:

            def count(collectives, directory=directory):
                collectives.start()
                (directory / "started").touch()
                view = collectives.membership.current()
                while len(view.servers) == 2:
                    view = collectives.membership.wait_newer(view.number, 60)
                return [server.id for server in view.servers]

            run.worker(0, count)
            run.server(0)
            server = run.server(1)
            wait_for(directory / "started")
            server.kill()
            result = run.result("worker", 0, 0)
        if survivable:
            assert result == [0]
        else:
            assert f"server 1 (process {server.pid}" in result


def test_training_starts_when_every_server_has_seen_the_workers(tmp_path):
    def start(collectives):
        collectives.start()
        return len(collectives.membership.current().workers)

    with Run(tmp_path, 1, 2) as run:
        run.worker(0, start)
        run.server(0)
        run.server(1, see=False)
        for server in range(2):
            wait_for(Path(f"server-{server}-is-there"))
        assert not run.pipes["worker", 0, 0].poll(0.3)
        run.kill("server", 1, 0)
        assert "server 1" in run.result("worker", 0, 0)
    directory = tmp_path / "both"
    directory.mkdir()
    with Run(directory, 1, 2) as run:
        run.worker(0, start)
        run.server(0)
        run.server(1)
        assert run.result("worker", 0, 0) == 1


def test_a_worker_started_again_replays_the_set_up_and_joins_at_a_boundary(tmp_path):
    def train(collectives):
        name = collectives.broadcast(f"run of {os.getpid()}")
        Path(f"life-{collectives.membership.address.incarnation}").touch()
        started = collectives.start()
        seen, epoch, together = [], 0, 0
        if started.joined:
            epoch = started.values[started.leader]["epoch"]
        while together < 5:  # Epochs with the one that has joined.
            if not started.joined or seen:
                collectives.boundary({"epoch": epoch})
            values = collectives.gather([epoch, started.joined]).values
            together += any(joined for _, joined in values.values())
            seen.append((epoch, sorted((rank, its) for rank, (its, _) in values.items())))
            epoch += 1
            if epoch == 10:
                Path("trained").touch()
            time.sleep(0.005)
        return name, started.joined, seen

    with Run(tmp_path, 3) as run:
        for rank in range(3):
            run.worker(rank, train)
        wait_for(Path("trained"))
        run.time.hold()  # It takes the place before the other one is missed, because that one's death is told.
        run.kill("worker", 0, 0)  # The leader; the name that it gave must stay.
        died = {"role": "worker", "id": 0, "incarnation": 0, "process": 1, "how": "was killed", "replaced": True}
        supervision = Supervision(run.address("supervision", 0))
        while supervision.send("died", died) is None:
            pass
        run.worker(0, train, incarnation=1)
        wait_for(Path("life-1"))
        run.time.go_on(run.coordinator.pid)
        results = [run.result("worker", 0, 1), run.result("worker", 1, 0), run.result("worker", 2, 0)]
    names, joined, seen = zip(*results, strict=True)
    assert len(set(names)) == 1
    assert joined == (True, False, False)
    assert seen[1] == seen[2]
    assert seen[1][-len(seen[0]) :] == seen[0]
    sizes = [len(values) for _, values in seen[1]]
    assert sizes[0] == 3
    assert sizes[-1] == 3
    # Those who take part agree on the epoch at every step.
    assert all(value == epoch for epoch, values in seen[1] for _, value in values)


def test_workers_that_do_not_agree_are_told_where_each_is(tmp_path):
    with Run(tmp_path, 2) as run:
        run.worker(0, lambda collectives: collectives.barrier("validation"))
        run.worker(1, lambda collectives: collectives.reduce(torch.zeros(1), "sum"))
        message = run.result("worker", 0, 0)
    assert "`validation`" in message
    assert "`reduce sum`" in message


def test_one_process_can_end_the_run_for_all(tmp_path):
    def fail(collectives):
        collectives.membership.end("worker 1 found NaN")
        time.sleep(1000)

    with Run(tmp_path, 2) as run:
        run.worker(0, go_on)
        run.worker(1, fail)
        assert run.result("worker", 0, 0) == "RunEnded: worker 1 found NaN"


def test_samples_are_given_out_once_and_again_after_a_death(tmp_path):
    def work(collectives):
        rank = collectives.membership.address.id
        collectives.start()
        collectives.begin_epoch(0, 1000, 7)
        done, processed = [], 0
        while True:
            chunk = collectives.take(0, processed)
            if not chunk:
                Path(f"nothing-left-{rank}").touch()
                while len(collectives.membership.current().workers) == 3:
                    time.sleep(0.01)  # Until the death has been noticed.
                chunk = collectives.take(0, processed)
            if not chunk:
                break
            if rank == 0:
                wait_for(Path("nothing-left-1"))  # It is slow.
            elif rank == 1:
                wait_for(Path("dies"))
            elif len(done) == 3:
                Path("dies").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            done.append((chunk.start, chunk.stop))
            processed += len(chunk)
        return done

    with Run(tmp_path, 3) as run:
        for rank in range(3):
            run.worker(rank, work)
        slow, fast = run.result("worker", 0, 0), run.result("worker", 1, 0)
    assert len(slow) <= 2 < len(fast), "its own, and maybe that of the dead one"
    samples = sorted(i for start, stop in slow + fast for i in range(start, stop))
    assert len(samples) == len(set(samples))
    # The dead worker had processed three chunks; its fourth was given to another.
    assert 1000 - len(samples) == 3 * 7


def test_nonsense_neither_stops_the_coordinator_nor_registers_anybody(tmp_path):
    with Run(tmp_path, 1) as run:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(run.endpoint)
        generator = random.Random(0)
        kinds = [b"hello", b"beat", b"collect", b"put", b"get", b"take", b"epoch", b"died", b"leave", b"status"]
        fields = [b'"role":"worker"', b'"id":0', b'"id":-1', b'"id":99', b'"incarnation":0', b'"name":[]', b'"how":{}']
        for _ in range(5000):
            own = [b'"session":0'] * generator.choice([0, 1, 1, 1])
            body = b"{" + b",".join(own + generator.sample(fields, generator.randrange(5))) + b"}"
            frames = [generator.choice([b"CNNPS1 ", b"CNNPS2 ", b""]) + generator.choice(kinds), body]
            if generator.random() < 0.3:
                frames[generator.randrange(2)] = generator.randbytes(generator.randrange(40))
            socket.send_multipart(frames[: generator.randrange(1, 3)])
        socket.close(500)
        context.term()
        run.worker(0, every_collective)
        assert run.result("worker", 0, 0)["integer"] == 0


def test_a_process_that_nobody_expects_is_not_let_in(tmp_path):
    with Run(tmp_path, 1) as run:
        run.time.use(1)
        membership = Membership(run.address("worker", 0))
        membership.wait_registered()
        impostor = Membership(run.address("worker", 0))
        with pytest.raises(RuntimeError, match="registered already"):
            impostor.wait_registered()
        membership.current()
        impostor.close(leave=False)
        membership.close()
