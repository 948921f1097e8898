"""Weight averaging with spawned processes is refused, because its callback cannot be pickled."""


def test_an_average_that_cannot_be_sent_to_a_process_is_refused(run_cli, quick):
    """The callback contains a function that torch defines inside another function."""
    average = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.strategy=ddp_spawn"]
    code, output = run_cli("fit", *quick, *average)
    assert code == 2, output
    # The message is not always the last line: Python 3.12 may print a warning about a fork after it.
    (line,) = (line for line in output.splitlines() if line.startswith("cnnstrategies: error"))
    for word in ("the model, the data or the callbacks cannot be pickled", "ema_update", "ddp_fork"):
        assert word in line
