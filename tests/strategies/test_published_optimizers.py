"""One published optimizer of each kind is equal to one device or refused under each strategy, as the page says."""

import importlib.util
from functools import partial
from pathlib import Path

from tests.placed.turns import on_ranks

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "optimizers" / "published.py"
KINDS = {
    "torch.optim.Adam": "treats each element by itself",
    "timm.optim.Adafactor": "needs whole tensors",
    "timm.optim.Lamb": "needs all parameters together, and counts steps in its parameter groups",
    "timm.optim.Lookahead": "wraps another optimizer",
}


def test_optimizers_of_each_kind_are_equal_or_refused_as_the_page_says() -> None:
    spec = importlib.util.spec_from_file_location("published", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    published = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    published.prepare()
    makers = dict(published.catalogue())
    rows = [row.split(" | ") for row in BENCHMARK.with_suffix(".md").read_text().splitlines()]
    verdicts = {row[0].removeprefix("| "): [cell.split()[0] for cell in row[2:]] for row in rows if len(row) == 4}
    for name in KINDS:
        make = makers[name]
        expected = published.alone(make)
        assert expected is not None
        of_pipeline = {
            published.compared(weights, expected) for weights in on_ranks(2, partial(published.on_stage, make))
        }
        of_servers = published.verdict(partial(published.under_servers, make), expected).partition(":")[0]
        assert [*of_pipeline, of_servers] == verdicts[name], f"{name}, which {KINDS[name]}"
    assert {verdict for row in verdicts.values() for verdict in row} >= {"equal", "refused"}
