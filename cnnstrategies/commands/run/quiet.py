"""What Lightning and torch say about themselves, and not about the user's run, is not printed by the command line.

Their warnings and errors about a run stay, and so does what is not listed here.
"""

import logging
import re
import threading
import warnings

# Where Lightning writes these: a filter of a logger sees what is written to it, not what comes up from those below.
LOGGERS = (
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.utilities.rank_zero",
)
# Advertisements; what the start panel says, or the progress bar; and what every rank would repeat.
NOISE = re.compile(
    "|".join(
        (
            r"💡 Tip: ",
            r"[GTHI]PU available: ",
            r"LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES: ",
            r"(\[rank: \d+\] )?Seed set to ",
            r"Initializing distributed: GLOBAL_RANK: ",
            r"-+\s+distributed_backend=",
            r"Using (16bit|bfloat16) Automatic Mixed Precision",
            r"`weights_only` was not set",
            r"Restoring states from the checkpoint path at ",
            r"Loaded model weights from the checkpoint at ",
            r"`Trainer.fit` stopped: `max_(epochs|steps)=",
        )
    )
)
WARNINGS = (
    r"The `srun` command is available on your system but is not used",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"You have overridden `on_(before|after)_batch_transfer` in `LightningModule` but have passed in a",
    r"torch.distributed.nn.functional.all_gather is deprecated",
    r"Grad strides do not match bucket view strides",
    r"The dirpath has changed from ",  # Each run has a folder of its own, which the panel names.
)


def quieten() -> None:
    """Leave out the noise from now on, in this process and those forked from it; once more changes nothing."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_news)
    # It tells which ranks it ends after one has been killed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    threading.excepthook = show_unless_kept


def show_unless_kept(failure: threading.ExceptHookArgs) -> None:
    """Print why a thread has failed, unless it keeps that for others to raise: as TensorBoard's, on a full disk."""
    if getattr(failure.thread, "exception", None) is not failure.exc_value:
        threading.__excepthook__(failure)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a message is not one of those that are left out; warnings and errors never are."""
    return record.levelno > logging.INFO or NOISE.match(record.getMessage().lstrip()) is None
