"""Choose the layout of a network, from what a job says of it."""

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.timetable import Order
from cnnstrategies.planning.predict import Predictor, find_layout
from cnnstrategies.planning.request import Request, check_request
from cnnstrategies.planning.tune.candidates import Job


def predictor_for(job: Job, microbatches: int, stages: int | None = None, placement: Order | None = None) -> Predictor:
    """What predicts the layouts of a job, in ``plan`` and in ``fit``.

    Args:
        job: What is planned for.
        microbatches: Of a step.
        stages: Their number; chosen when None.
        placement: How ranks are numbered; chosen when None.
    """
    request = Request(
        devices=job.cluster.devices,
        microbatches=microbatches,
        schedule=job.schedule,
        stages=stages,
        spares=False,
        replicas=job.replicas,
        cuts=job.cuts,
        memory_limit=job.memory,
        activation_checkpointing=job.activation_checkpointing,
        run_ahead=job.run_ahead,
        state_copies=job.state_copies,
        placement=placement,
    )
    return Predictor(job.profile.at(job.samples / microbatches), job.cluster, request)


def choose_layout(
    job: Job, microbatches: int, stages: int | None = None, placement: Order | None = None
) -> tuple[Layout, bool]:
    """The layout with the least predicted step time that a job permits, and whether its stages run ahead.

    Since times vary, two profiles may lead to different ones: in a distributed run one rank chooses and tells the
    others.

    Args:
        job: The network, the machines and what the user has fixed.
        microbatches: Of a step.
        stages: Their number; chosen when None.
        placement: How ranks are numbered; chosen when None.

    Raises:
        ConfigurationError: No layout fulfils the request.
    """
    predictor = predictor_for(job, microbatches, stages, placement)
    check_request(predictor.costs, predictor.request)
    layout = find_layout(predictor)
    return layout, predictor.runs_ahead(layout)
