"""On one machine nothing of a run listens anywhere but on the loopback, whatever starts its ranks."""

import ipaddress
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import PlainCNN
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import run_started

from cnnstrategies import ImageClassifier
from cnnstrategies.cluster.stores import SERVED, on_loopback
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import HybridPipelineStrategy

LISTENS = "0A"  # linux/tcp_states.h
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def addresses(process: int) -> list[str]:
    """The IP addresses at which a process listens."""
    folder = Path(f"/proc/{process}")
    files = [os.readlink(file) for file in (folder / "fd").iterdir() if file.is_symlink()]
    found = []
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in files:
                words = bytes.fromhex(local.split(":")[0])
                swapped = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                found.append(str(ipaddress.ip_address(swapped)))
    return found


class Listening(Callback):
    """Each rank writes down where it listens, and where the process does that has started it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert dist.get_world_size() == 2
        found = {str(process): addresses(process) for process in (os.getpid(), os.getppid())}
        chosen = [os.environ[name] for name in INTERFACES]
        Path(f"rank{trainer.global_rank}").write_text(json.dumps([found, chosen]))


def check() -> None:
    for rank in range(2):
        found, chosen = json.loads(Path(f"rank{rank}").read_text())
        assert chosen == ["lo", "lo"]  # Else gloo takes the address of the machine's name, which may be the loopback's.
        assert any(found.values())
        assert all(ipaddress.ip_address(address).is_loopback for each in found.values() for address in each), found


@pytest.mark.warm
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_a_run_of_the_command_line(
    run_cli: Callable[..., tuple[int, str]], quick: list[str], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # Lightning would start pytest again.
    short = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.callbacks+=test_loopback.Listening"]
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


def test_a_script_without_the_command_line() -> None:
    assert run_started(2, script) == [0, 0]
    check()


def test_ranks_that_could_not_start_leave_the_store_to_others() -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False).strategy

    @on_loopback(strategy)
    def start() -> None:
        assert SERVED in os.environ
        raise MemoryError

    with pytest.raises(MemoryError):
        start()
    assert SERVED not in os.environ
