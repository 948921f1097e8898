"""Filters that hide log messages and warnings of Lightning and torch that do not help the user.

Only the messages that this module lists are hidden.
"""

import logging
import re
import threading
import warnings

# Names of the loggers that write the hidden messages. Each of these loggers gets the filter, because the filter of a
# parent logger does not see the messages of its child loggers.
LOGGERS = (
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.utilities.rank_zero",
)
# Hidden log messages: advertisements, messages with the content of the start panel or of the progress bar, and messages
# that every rank repeats.
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
            r"Restored all states from the checkpoint at .*\.lr_find_",
            r"Loaded model weights from the checkpoint at ",
            r"`Trainer.fit` stopped: `max_(epochs|steps)=",
        )
    )
)
# Patterns of the warnings that are hidden.
WARNINGS = (
    r"The `srun` command is available on your system but is not used",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"You have overridden `on_(before|after)_batch_transfer` in `LightningModule` but have passed in a",
    r"torch.distributed.nn.functional.all_gather is deprecated",
    r"Grad strides do not match bucket view strides",
    # A changed folder is normal, because each run has its own folder. The start panel shows the folder.
    r"The dirpath has changed from ",
    # The start panel has a row about it.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)


def quieten() -> None:
    """Hide the listed messages and warnings, in this process and in all processes that it forks later.

    A second call has no effect.
    """
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_news)
    # After a rank was killed, this logger would print a line for each other rank that torch ends as a consequence.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    threading.excepthook = show_unless_kept


def show_unless_kept(failure: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread's exception, unless the thread has stored the exception in an attribute.

    Another thread then raises the stored exception. TensorBoard's writer thread does this, for example if the disk is
    full.
    """
    if getattr(failure.thread, "exception", None) is not failure.exc_value:
        threading.__excepthook__(failure)


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a log message must be printed. Warnings and errors are always printed."""
    return record.levelno > logging.INFO or NOISE.match(record.getMessage().lstrip()) is None
