"""Tests of compiled stages under the whole step: they train what one device trains without compilation."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline import checks
from cnnstrategies.strategies.hybrid_pipeline.compiling import compile_stages
from tests.runner.ranks import run_ranks
from tests.strategies.whole_step_cases import CASES, Case
from tests.strategies.whole_step_cases.base import Block, Classifier, classifier
from tests.strategies.whole_step_cases.checking import whole_step
from tests.strategies.whole_step_cases.running import differences, on_one_device, train_all, verdict

# Cases with layers that run in a special way, that store values or count, that are called several times, or whose
# hooks store values.
SPECIAL = ("batch_normalisation", "small_unet", "spectral_norm", "byol", "tensor_hook", "declared_loss")
STORING = (
    "kl_term",
    "kept_sums",
    "kept_deviations",
    "hook_penalty",
    "updated_buffer",
    "counted_calls",
    "hook_in_epoch",
)
# Seconds. On a busy machine a rank compiles for longer than the time after which ranks of other tests have diverged.
PATIENCE = 150.0


def compiled(case: Case, backend: str | None = "aot_eager", only_layer: bool = False) -> Case:
    """Return a case whose module asks for compiled stages on the ranks of a strategy, or compiles one layer itself."""

    def module() -> LightningModule:
        made: Any = case.module()
        if dist.is_initialized() and only_layer:
            made.net[1].compile(backend=backend)
        elif dist.is_initialized():
            made.compile_backend = backend
        return made

    # The case that adds its hook in the second epoch needs two epochs.
    return replace(case, module=module, epochs=2 if case.name == "hook_in_epoch" else 1, samples=20)


def patient(case: Case, replicas: Sequence[int], **options: Any) -> Any:
    return whole_step(case, replicas, timeout=PATIENCE, **options)


def import_backends() -> None:
    """Import what compilations import. Forked ranks inherit the imports, which take seconds."""
    importlib.import_module("torch._inductor.pattern_matcher")
    torch.compile(lambda values: values + 1, backend="aot_eager")(torch.ones(1))


class Dropped(Classifier):
    """A classifier that drops activations in both stages."""

    def network(self) -> nn.Module:
        return classifier(lambda: nn.Sequential(Block(), nn.Dropout(0.3)), nn.Dropout(0.5))


def recomputing(case: Case, replicas: Sequence[int]) -> Any:
    return patient(case, replicas, activation_checkpointing="always")


def train_dropping(replicas: Sequence[int], options: Sequence[tuple[str | None, Any]]) -> list[dict[str, Tensor]]:
    """Return the results of a network with dropout for each backend and function that makes the strategy."""
    case = Case("dropped", Dropped, epochs=1, samples=20)
    return [result for backend, make in options for result in train_all([compiled(case, backend)], make, replicas)]


def train(cases: Sequence[Case], replicas: Sequence[int]) -> Any:
    """Return the cases' results, and the number of compiled functions of each case."""
    results, counts = [], []
    counters: Any = sys.modules["torch._dynamo"].utils.counters  # type: ignore[attr-defined]
    for case in cases:
        before = counters["frames"]["ok"]
        results += train_all([case], patient, replicas)
        counts.append(counters["frames"]["ok"] - before)
    return results, counts


@pytest.mark.cluster
@pytest.mark.parametrize(("replicas", "names"), [([1, 1], SPECIAL), ([2, 1], STORING)], ids=str)
def test_compiled_stages_train_as_one_device(replicas: list[int], names: Sequence[str]) -> None:
    import_backends()
    cases = [*(compiled(CASES[name]) for name in names), compiled(CASES["plain"], only_layer=True)]
    names = [*names, "only layer"]
    expected = on_one_device(cases)
    by_rank = run_ranks(sum(replicas), train, cases, replicas)
    results = [[results[index] for results, _ in by_rank] for index in range(len(cases))]
    verdicts = [verdict(left, right) for left, right in zip(expected, results, strict=True)]
    assert dict(zip(names, verdicts, strict=True)) == dict.fromkeys(names, "equal")
    for _, counts in by_rank:
        assert min(counts[:-1]) > 0, dict(zip(names, counts, strict=True))
    assert [counts[-1] > 0 for _, counts in by_rank] == [
        stage == 0 for stage in range(2) for _ in range(replicas[stage])
    ]


@pytest.mark.cluster
def test_compiled_stages_draw_the_same_numbers_and_can_run_again() -> None:
    import_backends()
    options = [(None, patient), ("aot_eager", patient), ("aot_eager", recomputing)]
    for expected, *others in run_ranks(2, train_dropping, [1, 1], options):
        for result in others:
            assert not differences(expected, result)


@pytest.mark.light
def test_the_module_or_a_callback_names_the_backend() -> None:
    options: list[Any] = []
    division: Any = SimpleNamespace(compile=lambda **arguments: options.append(arguments))
    module = LightningModule()
    compile_stages(module, division)
    assert not options
    vars(module)["compile_backend"] = "inductor"
    compile_stages(module, division)
    assert options == [{"backend": "inductor", "dynamic": False}]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.light
def test_a_module_or_network_that_is_compiled_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    compiled_modules = [module.net[0]]
    # A real compilation would import the compiler, which takes seconds.
    monkeypatch.setattr(checks, "is_compiled", lambda child: child in compiled_modules)
    checks.check_state(module, "net")
    for child, name in ((module.net, "Module.net"), (module, "Module")):
        compiled_modules.append(child)
        with pytest.raises(ConfigurationError, match=rf"^{name} is compiled: .*ComputeSettings"):
            checks.check_state(module, "net")
    vars(module)["compile_backend"] = "cudagraphs"
    with pytest.raises(ConfigurationError, match="cudagraphs"):
        checks.check_state(module, "net")
