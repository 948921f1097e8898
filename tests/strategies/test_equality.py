"""The proof of a strategy: same seed, same global batch, same weights as one process."""

from pathlib import Path

import pytest
import torch

NETWORK = [
    # Without batch normalisation, whose statistics are those of each rank's part; in float64, so that the order of
    # summation leaves no trace.
    "--model.init_args.network=conftest.PlainCNN",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=2",
    "--data.init_args.augment=false",
    "--checkpoint.monitor=null",
]
OPTIMIZERS = {
    "sgd": [],
    "adamw": ["--model.init_args.optimizer=torch.optim.AdamW", "--model.init_args.optimizer.init_args.lr=0.002"],
    "clipping and accumulation": ["--trainer.gradient_clip_val=0.5", "--trainer.accumulate_grad_batches=2"],
}


def train(run_cli, quick, name, *args):
    code, output = run_cli("fit", *quick, *NETWORK, f"--trainer.logger.init_args.name={name}", *args)
    assert code == 0, output
    checkpoint = torch.load(Path("runs") / name / "version_0/checkpoints/last.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def assert_equal(actual, expected, rtol):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).norm() / value.norm()
        assert error <= rtol, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ddp_equals_one_process_on_the_same_global_batch(run_cli, quick, optimizer):
    """1150 samples: 17 whole global batches of 64 and one of 62, which is shared out evenly."""
    options = OPTIMIZERS[optimizer]
    one = ["--trainer.strategy=auto", "--trainer.devices=1"]
    single = train(run_cli, quick, "single", *options, *one)
    assert_equal(train(run_cli, quick, "ddp", *options), single, rtol=1e-6)


def test_ddp_spawn_equals_ddp_fork(run_cli, quick):
    """The launcher has no part in the result: spawn, as in Lightning's own tests, gives the same bits."""
    forked = train(run_cli, quick, "fork", "--trainer.max_epochs=1")
    spawned = train(run_cli, quick, "spawn", "--trainer.max_epochs=1", "--trainer.strategy=ddp_spawn")
    assert_equal(spawned, forked, rtol=0)


def test_compressed_gradients_stay_close_and_are_compressed(run_cli, quick):
    exact = train(run_cli, quick, "exact")
    for name, rtol in (("ddp_fp16", 5e-3), ("ddp_bf16", 5e-2)):
        compressed = train(run_cli, quick, name, f"--trainer.strategy={name}_fork")
        assert_equal(compressed, exact, rtol)
        # Were the hook not registered, as Lightning leaves it on CPUs, they would be equal.
        assert any(not torch.equal(compressed[key], exact[key]) for key in exact)


def test_powersgd_starts_when_it_is_told(run_cli, quick):
    powersgd = [
        "--trainer.strategy.class_path=CompressedDDPStrategy",
        "--trainer.strategy.init_args.start_method=fork",
        "--trainer.strategy.init_args.compression=powersgd",
    ]
    exact = train(run_cli, quick, "exact")
    late = train(run_cli, quick, "late", *powersgd, "--trainer.strategy.init_args.powersgd_start=1000")
    early = train(run_cli, quick, "early", *powersgd, "--trainer.strategy.init_args.powersgd_start=2")
    assert_equal(late, exact, rtol=1e-6)
    assert any((early[key] - exact[key]).norm() > 1e-3 * exact[key].norm() for key in exact)


def test_local_sgd_with_plain_sgd_averaging_each_step_equals_ddp(run_cli, quick):
    """Averaging the weights after a step without momentum is averaging the gradients before it."""
    plain = ["--model.init_args.optimizer.init_args.momentum=0", "--model.init_args.optimizer.init_args.nesterov=false"]
    local = [
        "--trainer.strategy.class_path=LocalSGDStrategy",
        "--trainer.strategy.init_args.start_method=fork",
        "--trainer.strategy.init_args.start=3",
    ]
    ddp = train(run_cli, quick, "ddp", *plain)
    each = train(run_cli, quick, "each", *plain, *local, "--trainer.strategy.init_args.sync_every=1")
    assert_equal(each, ddp, rtol=1e-6)
    seldom = train(run_cli, quick, "seldom", *plain, *local, "--trainer.strategy.init_args.sync_every=50")
    assert any((seldom[key] - ddp[key]).norm() > 1e-3 * ddp[key].norm() for key in ddp)
