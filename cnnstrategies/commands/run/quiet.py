"""Log messages of Lightning and torch that the command line hides, because they are not about the user's run.

Warnings and errors about a run are printed, and so is every message that is not listed here.
"""

import logging
import re
import threading
import warnings

# The loggers that write these messages. A logger's filter does not see messages that come from its child loggers.
LOGGERS = (
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.utilities.rank_zero",
)
# Advertisements, messages that repeat the start panel or the progress bar, and messages that every rank would repeat.
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
    r"The dirpath has changed from ",  # Each run has its own folder, which the panel names.
)


def quieten() -> None:
    """Hide these log messages in this process and in processes forked later. A second call has no effect."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_news)
    # This logger lists the ranks that are ended after a rank was killed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    threading.excepthook = show_unless_kept


def show_unless_kept(failure: threading.ExceptHookArgs) -> None:
    """Print why a thread failed, unless the thread has stored its exception for another thread to raise.

    When the disk is full, for example, TensorBoard's writer thread stores its exception.
    """
    if getattr(failure.thread, "exception", None) is not failure.exc_value:
        threading.__excepthook__(failure)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a log message is printed. Warnings and errors always are."""
    return record.levelno > logging.INFO or NOISE.match(record.getMessage().lstrip()) is None
