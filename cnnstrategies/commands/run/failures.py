"""Error messages of one line for failures while a run is built or runs."""

import errno
import os
import re
import traceback
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.arguments.refuse import in_one_line
from cnnstrategies.errors import ConfigurationError, causes

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ELSEWHERE = (
    "change its permissions, or choose another folder with --trainer.logger.init_args.save_dir or "
    "--trainer.default_root_dir"
)
# Pairs of a pattern and a format: the format replaces an error message of torch, Lightning or jsonargparse that matches
# the pattern, and gets the pattern's groups.
IN_OTHER_WORDS = tuple(
    (re.compile(pattern, re.DOTALL), text)
    for pattern, text in (
        (r"^File is not creatable since parent directory not writ\w+: '(.+)'$", f"cannot write {{}}: {ELSEWHERE}"),
        (
            r"expected input\[[\d, ]+\] to have ([134]) channels, but got ([134]) channels",
            "the network takes images with {} channels, but the data's images have {}: use a network or data that fit",
        ),
        (
            r"^Error\(s\) in loading state_dict for \w+:\s*([^\n]+)",
            "ckpt_path: the checkpoint does not fit the network of `model`: {}",
        ),
        (
            r"The parameter 'num_classes' expected value (\d+) but got (\d+) instead",
            "weights: trained for {} classes, and num_classes={}: class_path: cnnstrategies.pretrained.pretrained "
            "with the network's name keeps the weights and makes the last layer new",
        ),
        (r"^(Early stopping conditioned on metric .*)", "{}"),
    )
)
_NOT_FOUND = re.compile(r"Interpolation key '([^']*)' not found(?: \(resolved to '([^']*)'\))?")
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
# Error messages do not name lines of these packages, because the user's mistake is not in their code.
OF_OTHERS = ("cnnstrategies", "lightning", "torch", "jsonargparse")
# Errors that a mistake in code raises. Their text does not help the author of a configuration.
OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)


def explain_build_error(error: BaseException) -> str:
    """Return the line that explains why a class or function in a configuration could not be built."""
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
    # For a union of types, jsonargparse lists an error message for each type. The constructor's error names the
    # mistake.
    for link in chain:
        reasons = re.findall(r"^\s+- (?!Expected an? <class)(.+[^:\n])$", str(link), re.MULTILINE)
        if reasons and not isinstance(chain[-1], OF_CODE):
            return in_one_line(reasons[0])
    if isinstance(chain[-1], MisconfigurationException):
        remedy = ": with --trainer.accelerator=cpu it runs here" * ("No supported gpu" in str(chain[-1]))
        return in_one_line(str(chain[-1])).removesuffix("!") + remedy
    return f"{where}{described(chain[-1])}"


def described(error: BaseException) -> str:
    """Return a description of an error with the line of code that raised it, preferably a line of the user's code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    user_frames = [entry for entry, package in zip(frames, packages, strict=True) if package not in OF_OTHERS]
    summary = f"{type(error).__name__}: {in_one_line(str(error))}"
    if not frames:
        return summary
    frame, line = (user_frames or frames)[-1]
    return f"{summary}, in {frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"


def missing_package(error: ImportError) -> str:
    """Return a line that says which package to install."""
    asked = re.search(r"pip install (?:-U )?'?([^'`]+)", str(error))
    name = asked[1] if asked else (error.name or "").partition(".")[0]
    remedy = f"pip install '{name}'" if name else str(error)
    return f"a package is missing: {remedy}"


def explain_run_error(error: BaseException) -> str | None:
    """Return the line that explains a run's failure to the user; None if the user needs the traceback instead."""
    message = str(error)
    if isinstance(error, ProcessRaisedException):
        return refusal_in(message)
    if isinstance(error, OmegaConfBaseException):
        return _explain_reference(error)
    if isinstance(error, ConfigurationError | MisconfigurationException):
        return in_one_line(message)
    for link in causes(error):
        file = f": {os.fsdecode(link.filename)}" if isinstance(link, OSError) and link.filename else ""
        if isinstance(link, OSError) and link.errno in FULL:
            return f"{link.strerror}{file}; make room, and go on with --ckpt_path=last"
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


def refusal_in(traceback: str) -> str | None:
    """Return the line that explains the last error in a spawned or forked rank's traceback; None if no line does."""
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
    """Return the line that explains why a reference, ``${...}``, could not be followed."""
    key = re.sub(rf"^({'|'.join(COMMANDS)})\.", "", str(error.full_key))
    reason = in_one_line(str(error.msg).split("\n")[0])
    if match := _NOT_FOUND.match(reason):
        target = match[2].partition(".")[2] if match[2] else match[1]
        return f"{key}: refers to {target}, which is not there: give {key} a value, or refer to an existing key"
    return f"{key}: {reason}"
