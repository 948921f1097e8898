"""Runs beside each other: what each has reached, and in what they differ."""

from pathlib import Path

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from cnnstrategies import ConfigurationError
from cnnstrategies.commands.compare import main, metrics_table, read_run, settings_table


def make_run(folder, accuracies, losses, **settings):
    with SummaryWriter(str(folder)) as writer:
        for step, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True)):
            writer.add_scalar("val_acc", accuracy, step * 10)
            writer.add_scalar("val_loss", loss, step * 10)
            writer.add_scalar("train_loss_step", 1.0, step)
    config = {"trainer": {"max_epochs": 3, **settings}, "ckpt_path": str(folder), "seed_everything": 1}
    Path(folder, "config.yaml").write_text(yaml.safe_dump(config))


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_runs_are_compared_by_their_best_and_their_settings(capsys):
    make_run("one", [0.5, 0.9, 0.8], [1.0, 0.4, 0.5], strategy="ddp")
    make_run("two", [0.5, 0.6, 0.7], [1.0, 0.6, 0.3], strategy="hybrid_pipeline", devices=4)
    runs = [read_run(Path(name)) for name in ("one", "two")]
    assert [str(column.header) for column in metrics_table(runs).columns] == ["best, and at the end", "one", "two"]
    assert cells(metrics_table(runs)) == [
        ("val_acc", "[bold]0.9000, 0.8000[/bold]", "0.7000, 0.7000"),
        ("val_loss", "0.4000, 0.5000", "[bold]0.3000, 0.3000[/bold]"),
    ]
    assert cells(settings_table(runs)) == [
        ("trainer.strategy", "ddp", "hybrid_pipeline"),
        ("trainer.devices", "", "4"),
    ]
    main(["compare", "one", "two", "--output", "new/curves.png"])
    assert "Drew new/curves.png" in capsys.readouterr().out
    assert Path("new/curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match="give two or more log directories"):
        main(["compare", "one"])
    with pytest.raises(ConfigurationError, match="compare: nowhere has no events of TensorBoard"):
        main(["compare", "one", "nowhere"])
