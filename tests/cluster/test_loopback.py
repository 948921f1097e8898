"""On one machine all processes of a run listen on the loopback only, whatever starts the ranks."""

import ipaddress
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from cnnstrategies import ImageClassifier
from cnnstrategies.cluster.rendezvous import MET, ranks_meet
from cnnstrategies.cluster.stores import SERVED
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import PlainCNN
from tests.runner.ranks import run_started

LISTENS = "0A"  # linux/tcp_states.h
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def addresses(process: int) -> list[str]:
    """Return the IP addresses on which a process listens."""
    folder = Path(f"/proc/{process}")
    files = [os.readlink(file) for file in (folder / "fd").iterdir() if file.is_symlink()]
    listening = []
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in files:
                words = bytes.fromhex(local.split(":")[0])
                swapped = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                listening.append(str(ipaddress.ip_address(swapped)))
    return listening


class Listening(Callback):
    """Writes to a file on which addresses each rank and its parent process listen."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert dist.get_world_size() == 2
        listening = {str(process): addresses(process) for process in (os.getpid(), os.getppid())}
        chosen = [os.environ[name] for name in INTERFACES]
        Path(f"rank{trainer.global_rank}").write_text(json.dumps([listening, chosen]))


def check() -> None:
    for rank in range(2):
        listening, chosen = json.loads(Path(f"rank{rank}").read_text())
        # Without these variables gloo uses the address of the machine's name, which may or may not be a loopback
        # address.
        assert chosen == ["lo", "lo"]
        assert any(listening.values())
        assert all(ipaddress.ip_address(address).is_loopback for each in listening.values() for address in each), (
            listening
        )


@pytest.mark.warm
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_a_run_of_the_command_line_listens_on_the_loopback_only(
    run_cli: Callable[..., tuple[int, str]], quick: list[str], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # Otherwise Lightning would start pytest again.
    short = [
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=0",
        "--trainer.callbacks+=tests.cluster.test_loopback.Listening",
    ]
    code, output = run_cli("fit", *quick, f"--trainer.strategy={strategy}", *short, "--checkpoint.monitor=null")
    assert code == 0, output
    check()


def script() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HybridPipelineStrategy(),
        callbacks=[Listening()],
        max_steps=1,
        limit_val_batches=0,
        barebones=True,
    )
    trainer.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())


def test_a_script_without_the_command_line_listens_on_the_loopback_only() -> None:
    assert run_started(2, script) == [0, 0]
    check()


def test_ranks_that_could_not_start_leave_the_store_to_others() -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False).strategy

    @ranks_meet(strategy)
    def start() -> None:
        assert {SERVED, MET, "MASTER_PORT"} <= os.environ.keys()
        raise MemoryError

    with pytest.raises(MemoryError):
        start()
    assert not {SERVED, MET, "MASTER_PORT"} & os.environ.keys()
