"""Lightning callbacks. The command line adds some of them by default, and a configuration can add the others."""

from cnnstrategies.callbacks.activation_checkpointing import ActivationCheckpointing
from cnnstrategies.callbacks.best_checkpoint import BestCheckpoint
from cnnstrategies.callbacks.compute_settings import ComputeSettings
from cnnstrategies.callbacks.epoch_metrics import EpochMetrics
from cnnstrategies.callbacks.first_batch import FirstBatch
from cnnstrategies.callbacks.from_configuration import FromConfiguration
from cnnstrategies.callbacks.graceful_stop import GracefulStop
from cnnstrategies.callbacks.guard import Guard
from cnnstrategies.callbacks.pictures import Pictures
from cnnstrategies.callbacks.predictions import PredictionWriter
from cnnstrategies.callbacks.pruning import Pruning
from cnnstrategies.callbacks.slow_steps import SlowLines
from cnnstrategies.callbacks.start_panel import StartPanel
from cnnstrategies.callbacks.step_profile import StepProfile
from cnnstrategies.callbacks.stream_counts import StreamCounts
from cnnstrategies.callbacks.summary import TrainingSummary
from cnnstrategies.callbacks.throughput import SamplesPerSecond
from cnnstrategies.callbacks.traffic import ServerTraffic
from cnnstrategies.strategies.sample_weights import SampleWeights

__all__ = [
    "ActivationCheckpointing",
    "BestCheckpoint",
    "ComputeSettings",
    "EpochMetrics",
    "FirstBatch",
    "FromConfiguration",
    "GracefulStop",
    "Guard",
    "Pictures",
    "PredictionWriter",
    "Pruning",
    "SampleWeights",
    "SamplesPerSecond",
    "ServerTraffic",
    "SlowLines",
    "StartPanel",
    "StepProfile",
    "StreamCounts",
    "TrainingSummary",
]
