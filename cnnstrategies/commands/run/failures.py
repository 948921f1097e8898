"""Error messages of one line for failures that occur while a run is built or while it runs."""

import errno
import os
import re
import signal
import traceback
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf.errors import OmegaConfBaseException
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.arguments.refuse import in_one_line
from cnnstrategies.errors import ConfigurationError, causes
from cnnstrategies.runtime.out_of_memory import line_of

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ELSEWHERE = (
    "change its permissions, or choose another folder with --trainer.logger.init_args.save_dir or "
    "--trainer.default_root_dir"
)
# Pairs of a pattern and a text. If the pattern matches an error message of torch, Lightning or jsonargparse, the text
# replaces the error message. The pattern's groups are inserted into the text.
IN_OTHER_WORDS = tuple(
    (re.compile(pattern, re.DOTALL), text)
    for pattern, text in (
        (r"^File is not creatable since parent directory not writ\w+: '(.+)'$", f"cannot write {{}}: {ELSEWHERE}"),
        (
            r"expected input\[[\d, ]+\] to have ([134]) channels, but got ([134]) channels",
            "the network takes images with {} channels, but the data's images have {}: change the network or the data",
        ),
        (
            r"Expected more than 1 value per channel when training, got input size torch\.Size\(\[([\d, ]+)\]\)",
            "batch norm cannot train on a single value for each channel, and its input has the shape [{}]: set "
            "data.init_args.drop_last to true if the epoch's last batch has one image, or use larger batches or images "
            "(data.init_args.batch_size, image_size)",
        ),
        (
            r"Given input size: \(([\dx]+)\)\. Calculated output size: \([\dx]+\)\. Output size is too small",
            "the images are too small for the network, in which a layer gets an input of {}: set a larger "
            "data.init_args.image_size, or use a network with fewer layers that shrink the images",
        ),
        (
            r"Kernel size: \(([\d x]+)\)\. Kernel size can't be greater than actual input size",
            "the images are too small for the network, in which a layer has a kernel of {}: set a larger "
            "data.init_args.image_size, or use a network with fewer layers that shrink the images",
        ),
        (
            r"^Error\(s\) in loading state_dict for \w+:\s*([^\n]+)",
            "ckpt_path: the checkpoint does not fit the network of `model`: {}",
        ),
        (
            r"The parameter 'num_classes' expected value (\d+) but got (\d+) instead",
            "weights: these weights are for {} classes, but num_classes={}: to keep them and replace the last layer, "
            "use class_path: cnnstrategies.pretrained.pretrained with the network's name",
        ),
        (r"^(Early stopping conditioned on metric .*)", "{}"),
    )
)
_NOT_FOUND = re.compile(r"Interpolation key '([^']*)' not found(?: \(resolved to '([^']*)'\))?")
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
# Packages whose code the user does not change. If possible, an error message names a line of code outside of these
# packages.
OF_OTHERS = ("cnnstrategies", "lightning", "torch", "jsonargparse")
# Errors that usually mean a mistake in code. The text of such an error does not help the user enough, so the error
# message also has the class of the error, and the file and the line number in the code.
OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)
# Pattern of torch's error messages about a worker process of a DataLoader that has ended.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: (\w[\w ]*))?")
# By signal: why the system sends the signal to a loader worker, and what the user can do.
_WORKER_REMEDIES = {
    "SIGKILL": ", which the system sends when memory runs out: use fewer loader workers (num_workers) or smaller "
    "batches, or request more memory",
    "SIGBUS": ", which the system sends when shared memory runs out: enlarge /dev/shm, as with docker run --shm-size, "
    "or set num_workers to 0",
}


def explain_build_error(error: BaseException) -> str:
    """Return an error message of one line for an error that occurred while a configuration's objects were built."""
    chain = list(causes(error))
    for link in chain:
        if isinstance(link, ConfigurationError):
            return in_one_line(str(link))
    class_name = next((match[1] for link in chain if (match := _CLASS.search(str(link)))), None)
    where = f"{class_name}: " if class_name else ""
    for link in chain:
        if isinstance(link, ModuleNotFoundError):
            return f"{where}{in_one_line(missing_package(link))}"
        if (line := _in_other_words(str(link))) is not None:
            return line
    # For a union of types, jsonargparse lists an error message for each type. The message that does not begin with
    # "Expected a <class" comes from a constructor, and describes the actual mistake.
    for link in chain:
        reasons = re.findall(r"^\s+- (?!Expected an? <class)(.+[^:\n])$", str(link), re.MULTILINE)
        if reasons and not isinstance(chain[-1], OF_CODE):
            return in_one_line(reasons[0])
    if isinstance(chain[-1], MisconfigurationException):
        remedy = ": to run on this machine, use --trainer.accelerator=cpu" * ("No supported gpu" in str(chain[-1]))
        return in_one_line(str(chain[-1])).removesuffix("!") + remedy
    return f"{where}{described(chain[-1])}"


def described(error: BaseException) -> str:
    """Return a text with the class and the message of an error, and the function, file and line number in the code.

    The text names the innermost line of the user's own code, or else the line that has raised the error.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    user_frames = [entry for entry, package in zip(frames, packages, strict=True) if package not in OF_OTHERS]
    summary = f"{type(error).__name__}: {in_one_line(str(error))}"
    if not frames:
        return summary
    frame, line = (user_frames or frames)[-1]
    return f"{summary}, in {frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"


def missing_package(error: ImportError) -> str:
    """Return an error message of one line that names the missing package and the command to install it."""
    asked = re.search(r"pip install (?:-U )?'?([^'`]+)", str(error))
    name = asked[1] if asked else (error.name or "").partition(".")[0]
    remedy = f"pip install '{name}'" if name else str(error)
    return f"a package is missing: {remedy}"


def explain_run_error(error: BaseException) -> str | None:
    """Return an error message of one line for a failure of a run.

    Return None if the user needs the traceback instead.
    """
    message = str(error)
    if (line := line_of(error)) is not None:
        return line
    if isinstance(error, ProcessRaisedException):
        return lost_loader_worker(message, error.error_index) or refusal_in(message)
    # Lightning sets the attribute `rank`. Only one of torch's errors about a lost worker names the worker's signal.
    messages = "\n".join(str(link) for link in causes(error))
    if (line := lost_loader_worker(messages, getattr(rank_zero_only, "rank", 0))) is not None:
        return line
    if isinstance(error, OmegaConfBaseException):
        return _explain_reference(error)
    if isinstance(error, ConfigurationError | MisconfigurationException):
        return in_one_line(message)
    for link in causes(error):
        file = f": {os.fsdecode(link.filename)}" if isinstance(link, OSError) and link.filename else ""
        if isinstance(link, OSError) and link.errno in FULL:
            return f"{link.strerror}{file}; free some space, and continue with --ckpt_path=last"
        if isinstance(link, OSError) and link.errno in FORBIDDEN and file:
            return f"{link.strerror}{file}; {ELSEWHERE}"
    if isinstance(error, ModuleNotFoundError) and "Requirement" in message:
        return in_one_line(missing_package(error))
    if isinstance(error, torch.OutOfMemoryError):
        return f"{in_one_line(message).split('. ')[0]}: use a smaller batch, or a strategy that divides the network"
    return _in_other_words(message)


def _in_other_words(message: str) -> str | None:
    matches = ((pattern.search(message), text) for pattern, text in IN_OTHER_WORDS)
    return next((in_one_line(text.format(*match.groups())) for match, text in matches if match), None)


def lost_loader_worker(text: str, rank: int) -> str | None:
    """Return an error message of one line if a text contains torch's error about a loader worker that has ended.

    Return None for other texts.

    Args:
        text: Error message of torch, or a traceback that contains it. If the text contains several of these error
            messages, a message that names the worker's signal counts.
        rank: Rank that has started the worker.
    """
    matches = list(_LOST_WORKER.finditer(text))
    if not matches:
        return None
    match = next((match for match in matches if match[2]), matches[0])
    worker = f"rank {rank} has lost a loader worker (process {match[1]})"
    remedy = "set num_workers to 0, so that the rank itself loads the data and shows the error"
    if not match[2]:
        return f"{worker}, which has ended unexpectedly: if memory has run out, use fewer loader workers; else {remedy}"
    names = {signal.strsignal(number): number.name for number in signal.Signals}
    name = next((name for text, name in names.items() if text and match[2].startswith(text)), match[2])
    return f"{worker}, which was ended by {name}{_WORKER_REMEDIES.get(name, f': {remedy}')}"


def refusal_in(traceback: str) -> str | None:
    """Return an error message of one line for the last error in a traceback.

    Return None if the user needs the traceback itself.

    Args:
        traceback: Text of the traceback from a spawned or forked rank.
    """
    raised = list(re.finditer(r"^([A-Za-z_][\w.]*): ", traceback, re.MULTILINE))
    errors = [match for match in raised if match[1].endswith(("Error", "Exception"))]
    if not errors:
        return None
    message = traceback[errors[-1].end() :]
    refused = errors[-1][1].endswith((ConfigurationError.__name__, MisconfigurationException.__name__))
    if errno_match := re.match(r"\[Errno (\d+)\] ([^:\n]+)(?:: b?'([^'\n]+)')?", message):
        return explain_run_error(OSError(int(errno_match[1]), errno_match[2], errno_match[3]))
    return explain_run_error(ConfigurationError(message) if refused else RuntimeError(message))


def _explain_reference(error: OmegaConfBaseException) -> str:
    """Return an error message of one line for a reference (`${...}`) in a configuration that cannot be resolved."""
    key = re.sub(rf"^({'|'.join(COMMANDS)})\.", "", str(error.full_key))
    reason = in_one_line(str(error.msg).split("\n")[0])
    if match := _NOT_FOUND.match(reason):
        target = match[2].partition(".")[2] if match[2] else match[1]
        return f"{key} refers to {target}, which does not exist: give {key} a value, or refer to an existing key"
    return f"{key}: {reason}"
