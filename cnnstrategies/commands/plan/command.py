"""``cnnstrategies plan``: predict step times and costs of the strategies, for a network on a cluster.

With a profile from a file, the command imports neither torch nor Lightning, and takes only a second.
"""

from collections.abc import Sequence

from rich.console import Console

from cnnstrategies.commands.arguments.options import PlanOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import read_cluster
from cnnstrategies.planning.profile_csv import read_profile
from cnnstrategies.planning.rank import Ranking, rank
from cnnstrategies.planning.report import ranking_table, stages_table, summary, write_overlay


def main(options: PlanOptions, arguments: Sequence[str]) -> None:
    """Print a ranking of the strategies, for the network of a configuration or of a profile.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration; empty if a profile is given.
    """
    if options.profile is not None and not arguments:
        job = job_from_files(options)
    else:
        # This import takes seconds, because it imports torch and Lightning. Plans from files do not need it.
        from cnnstrategies.commands.plan.measured import job_from_configuration

        job = job_from_configuration(options, arguments)
    show(rank(job), options)


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
    if options.cluster is None:
        raise ConfigurationError("cluster is missing: give a YAML file that describes the machines")
    cluster = read_cluster(options.cluster)
    samples = options.samples_of_a_step(cluster.devices)
    if samples is None:
        raise ConfigurationError(
            "batch_size is missing: give the number of samples in a step, or batch_per_device for each device"
        )
    profile = read_profile(options.profile, options.profile_batch)
    states = 2 if options.optimizer_states is None else options.optimizer_states
    return Job(profile, cluster, samples, activation_checkpointing=None, state_copies=2 + states)


def show(ranking: Ranking, options: PlanOptions) -> None:
    """Print a ranking of the strategies, and write the files that the options name."""
    console = Console()
    console.print(ranking_table(ranking))
    chosen = ranking.hybrid
    if chosen is not None:
        predictor, layout = chosen.predictor, chosen.layout
        step = predictor.simulate(layout, predictor.runs_ahead(layout))
        console.print(stages_table(predictor, layout, step))
        if options.timetable is not None:
            from cnnstrategies.pipeline.timeline import draw_timeline

            placement = Placement(layout.replicas)
            names = {rank: placement.describe(rank) for rank in range(layout.devices)}
            draw_timeline(step.spans, options.timetable, summary(predictor, layout, step), names)
            print(f"Wrote the picture {options.timetable}")
    if options.write is not None:
        write_overlay(options.write, ranking)
        print(f"Wrote {options.write}; use it as in cnnstrategies fit --config YOURS --config {options.write}")
