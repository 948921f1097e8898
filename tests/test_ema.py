"""Weight averaging from the command line copies the model, with all that it holds."""


def test_an_average_that_cannot_be_sent_to_a_process_is_refused(run_cli, quick):
    """It holds a function inside a function of torch's."""
    average = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.strategy=ddp_spawn"]
    code, output = run_cli("fit", *quick, *average)
    assert code == 2, output
    # Not the last line everywhere: what Python 3.12 has to say of a fork that ends at once comes after it.
    (line,) = (line for line in output.splitlines() if line.startswith("cnnstrategies: error"))
    for word in ("pickles model, data and callbacks, which failed", "ema_update", "ddp_fork"):
        assert word in line
