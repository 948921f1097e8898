"""``cnnstrategies plan --largest_batch``: predict the largest batch that fits into memory, and confirm it."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cnnstrategies.commands.arguments.refuse import fail
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.device_order import largest_in_best_order
from cnnstrategies.planning.device_report import plans_report
from cnnstrategies.planning.largest_batch import Largest, largest_of
from cnnstrategies.planning.rank import NothingFitsError, Ranking
from cnnstrategies.planning.tune.trial import AS_IN_TRAINING, PATIENCE, Trial, TrialError
from cnnstrategies.runtime.processes import temporary_folder
from cnnstrategies.runtime.stop_signals import interruptible

if TYPE_CHECKING:
    from cnnstrategies.commands.run.lightning_cli import ModelAndData

MOST = 2**20  # Largest number of samples that is tried if the number of training samples is not known.
# Fractions of the predicted largest batch that are tried, until a trial does not run out of memory.
ATTEMPTS = (1.0, 0.9, 0.8, 0.7)
STEPS = 2  # The optimizer's state is allocated in the first step, so the second step needs more memory.


def show_largest(
    job: Job,
    families: Collection[str],
    most: int,
    configuration: "ModelAndData | None",
    write: Path | None,
    is_listed: bool = False,
) -> None:
    """Print the largest batch that fits into memory by prediction, and make two steps with it.

    If a device runs out of memory in these steps, steps with smaller batches are tried.

    Args:
        job: Network and devices. The number of samples is ignored.
        families: Strategies that the configuration allows.
        most: Number of training samples, which is the largest possible batch.
        configuration: The configuration; None if the network comes from a profile. Then no step is made.
        write: File for the configuration with the largest batch; None for no file.
        is_listed: Whether the devices are listed with ``--have``, so that the ranks may use them in any order.

    Raises:
        ConfigurationError: No device has a known memory, or the steps fail for another reason than memory.
        NothingFitsError: Not even one sample fits on each device.
    """
    if not job.is_limited:
        raise ConfigurationError(
            "largest_batch: the memory of the devices is not known; give it with --have or with --cluster"
        )
    best = largest_in_best_order(job, families, most, is_listed)
    if best is None:
        raise NothingFitsError(
            f"largest_batch: not even one sample for each of the {job.cluster.devices} devices fits with "
            f"{' or '.join(families)}: use devices with more memory, or another strategy"
        )
    largest, job, order = best
    ranking = _ranking(job, largest, order)
    print(f"Largest batch by prediction: {largest.samples} samples in a step over all devices")
    if largest.samples == most and configuration is not None:
        print("No larger batch was tried, because these are all training samples")
    Console().print(plans_report(ranking))
    if configuration is None:
        return
    from cnnstrategies.commands.plan.written import planned

    machines = int(configuration.config.trainer.num_nodes)
    if machines > 1:
        print(
            f"Not confirmed, because the configuration has trainer.num_nodes={machines} and this is one machine: start "
            f"`fit --trainer.max_steps {STEPS} --data.init_args.global_batch_size {largest.samples}` on all machines"
        )
        return
    for fraction in ATTEMPTS:
        tried = largest if fraction == 1 else largest_of(job, families, max(1, int(largest.samples * fraction)))
        if tried is None:
            break
        ranking = _ranking(job, tried, order)
        content, lines = planned(ranking, tried.row, configuration)
        with temporary_folder("cnnstrategies_plan_") as folder:
            file = write or Path(folder) / "plan.yaml"
            write_commented(file, content, lines)
            reason = try_steps(Path(folder), file)
        if reason is None:
            print(f"Confirmed: {tried.samples} samples, with {STEPS} steps on all {job.cluster.devices} ranks together")
            if write is not None:
                print(f"Wrote {write}; train with cnnstrategies fit --config {write}")
            return
        print(f"Not confirmed: with {tried.samples} samples a rank ran out of memory: {reason}")
    fail(
        f"no batch was confirmed, down to {ATTEMPTS[-1]:.0%} of the predicted largest batch: use less memory elsewhere"
    )


def _ranking(job: Job, largest: Largest, order: tuple[int, ...]) -> Ranking:
    return Ranking(replace(job, samples=largest.samples), (largest.row,), (), (), order=order)


def try_steps(folder: Path, configuration: Path) -> str | None:
    """Make two steps of a training in processes of its own.

    Args:
        folder: Folder for the files of the trial.
        configuration: File with the whole configuration.

    Returns:
        None if all ranks have made the steps. If a rank has run out of memory, the reason why the trial has ended.

    Raises:
        ConfigurationError: The trial has ended for another reason.
    """
    trial = None
    try:
        with interruptible():
            trial = Trial(folder, "largest", ["fit", "--config", str(configuration)], PATIENCE, AS_IN_TRAINING)
            trial.wait_until_ready()
            trial.steps(STEPS)
    except TrialError as error:
        assert trial is not None
        if trial.ran_out_of_memory():
            return str(error)
        raise ConfigurationError(
            f"the trial with the largest batch fails ({error}): first make sure that `cnnstrategies fit` works with "
            "this configuration"
        ) from error
    finally:
        if trial is not None:
            trial.close()
    return None
