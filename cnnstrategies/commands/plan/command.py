"""``cnnstrategies plan``: predict step times and costs of the strategies, for a network on a cluster.

With a profile from a file, the command imports neither torch nor Lightning, and takes only a second.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cnnstrategies.commands.arguments.options import DOCTOR, PlanOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, read_cluster
from cnnstrategies.planning.device_order import largest_in_best_order, rank_in_best_order
from cnnstrategies.planning.device_report import plans_report
from cnnstrategies.planning.largest_batch import FAMILIES
from cnnstrategies.planning.profile_csv import read_profile
from cnnstrategies.planning.rank import NothingFitsError, Ranking, rank
from cnnstrategies.planning.report import ranking_table, stages_table, summary, write_overlay

if TYPE_CHECKING:
    from cnnstrategies.commands.run.lightning_cli import ModelAndData


def main(options: PlanOptions, arguments: Sequence[str]) -> None:
    """Print a ranking of the strategies, for the network of a configuration or of a profile.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration; empty if a profile is given.
    """
    configuration: ModelAndData | None = None
    if options.profile is not None and not arguments:
        job = job_from_files(options)
    else:
        # This import takes seconds, because it imports torch and Lightning. Plans from files do not need it.
        from cnnstrategies.commands.plan.measured import job_from_configuration

        configuration, job = job_from_configuration(options, arguments)
    if options.largest_batch:
        from cnnstrategies.commands.plan.largest import MOST, show_largest

        families, most = FAMILIES, MOST
        if configuration is not None:
            from cnnstrategies.commands.plan.measured import families_of, training_samples

            families = families_of(configuration)
            most = training_samples(configuration.data(), MOST)
        show_largest(job, families, most, configuration, options.write, options.have is not None)
        return
    show(fitting(job, options.have is not None, configuration), options, configuration)


def fitting(job: Job, is_listed: bool, configuration: "ModelAndData | None" = None) -> Ranking:
    """Rank the strategies. If none fits into memory, rank them with the precision bf16-mixed.

    Args:
        job: Network, devices and batch.
        is_listed: Whether the devices are listed with ``--have``, so that the ranks may use them in any order.
        configuration: The configuration; None if the network comes from a profile, whose precision cannot be changed.

    Raises:
        NothingFitsError: No strategy fits into the devices' memory. The message names the largest batch that fits.
    """
    try:
        return rank_in_best_order(job) if is_listed else rank(job)
    except NothingFitsError as error:
        if configuration is not None:
            from cnnstrategies.commands.plan.measured import in_half_precision

            lighter = in_half_precision(configuration, job)
            with contextlib.suppress(NothingFitsError):
                if lighter is not None:
                    return rank_in_best_order(lighter) if is_listed else rank(lighter)
        best = largest_in_best_order(job, FAMILIES, job.samples, is_listed)
        if best is None:
            raise
        largest, *_ = best
        raise NothingFitsError(
            f"{error}; a batch of at most {largest.samples} samples fits, with {largest.row}: give --batch_size "
            f"{largest.samples}"
        ) from error


def job_from_files(options: PlanOptions) -> Job:
    """Return the planner's input from two files: a profile of a network, and a description of a cluster.

    Raises:
        ConfigurationError: Another option that is needed with ``--profile`` is missing.
    """
    assert options.profile is not None
    if options.profile_batch is None or options.profile_batch < 1:
        raise ConfigurationError(
            "profile_batch is missing: give the number of samples in the batch with which the profile was measured"
        )
    cluster = _cluster(options)
    samples = options.samples_of_a_step(cluster.devices)
    if samples is None:
        raise ConfigurationError(
            "batch_size is missing: give the number of samples in a step, or batch_per_device for each device"
        )
    profile = read_profile(options.profile, options.profile_batch)
    states = 2 if options.optimizer_states is None else options.optimizer_states
    return Job(profile, cluster, samples, activation_checkpointing=None, state_copies=2 + states)


def _cluster(options: PlanOptions) -> Cluster:
    """Return the cluster that the options describe without a configuration."""
    if options.cluster is not None:
        return read_cluster(options.cluster)
    if options.have is None or options.have == DOCTOR:
        raise ConfigurationError(
            "cluster is missing: give a YAML file that describes the machines, or a list of devices with --have"
        )
    link = options.link("nccl")
    if link is None:
        raise ConfigurationError(
            "bandwidth is missing: --have does not describe the connections; give their bandwidth in Mbit/s, or use "
            "--cluster"
        )
    return Cluster.connected(options.owned_devices(), link)


def show(ranking: Ranking, options: PlanOptions, configuration: "ModelAndData | None" = None) -> None:
    """Print a ranking of the strategies, and write the files that the options name.

    Args:
        ranking: The strategies.
        options: The options of the command.
        configuration: The configuration whose network is planned; None if the network comes from a profile.
    """
    console = Console()
    chosen = ranking.hybrid
    console.print(ranking_table(ranking) if options.have is None else plans_report(ranking))
    if chosen is not None:
        predictor, layout = chosen.predictor, chosen.layout
        step = predictor.simulate(layout, predictor.runs_ahead(layout))
        if options.have is None:
            console.print(stages_table(predictor, layout, step))
        if options.timetable is not None:
            from cnnstrategies.pipeline.timeline import draw_timeline

            placement = Placement(layout.replicas)
            names = {rank: placement.describe(rank) for rank in range(layout.devices)}
            draw_timeline(step.spans, options.timetable, summary(predictor, layout, step), names)
            print(f"Wrote the picture {options.timetable}")
    if options.have is not None and configuration is not None:
        from cnnstrategies.commands.plan.written import write_plans

        write_plans(options.write or Path("plan.yaml"), ranking, configuration)
    elif options.write is not None:
        write_overlay(options.write, ranking)
        print(f"Wrote {options.write}; use it as in cnnstrategies fit --config YOURS --config {options.write}")
