"""One line for what goes wrong while a run is built or runs, where a line says it all."""

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
    "give the right to it, or let results go elsewhere with --trainer.logger.init_args.save_dir or "
    "--trainer.default_root_dir"
)
# What torch, Lightning and jsonargparse say, and what is said in its place of what their words have in parentheses.
IN_OTHER_WORDS = tuple(
    (re.compile(theirs, re.DOTALL), ours)
    for theirs, ours in (
        (r"^File is not creatable since parent directory not writ\w+: '(.+)'$", f"cannot write {{}}: {ELSEWHERE}"),
        (
            r"expected input\[[\d, ]+\] to have ([134]) channels, but got ([134]) channels",
            "the network takes images with {} channels, and those of the data have {}: take a network or data that fit",
        ),
        (
            r"^Error\(s\) in loading state_dict for \w+:\s*([^\n]+)",
            "ckpt_path: the checkpoint is of another network than `model` describes: {}",
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
# In whose lines nobody looks for a mistake of theirs.
OF_OTHERS = ("cnnstrategies", "lightning", "torch", "jsonargparse")
# Whose message is for who has written the code, and not for who has written the configuration.
OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)


def explain_build_error(error: BaseException) -> str:
    """The line that says why a class or function in a configuration could not be built."""
    chain = list(causes(error))
    for link in chain:
        if isinstance(link, ConfigurationError):
            return in_one_line(str(link))
    named = next((found[1] for link in chain if (found := _CLASS.search(str(link)))), None)
    where = f"{named}: " if named else ""
    for link in chain:
        if isinstance(link, ModuleNotFoundError):
            return f"{where}{in_one_line(missing_package(link))}"
        if (line := _in_other_words(str(link))) is not None:
            return line
    # Of a union's members jsonargparse keeps the messages; the one that a constructor raised names the mistake.
    for link in chain:
        reasons = re.findall(r"^\s+- (?!Expected an? <class)(.+[^:\n])$", str(link), re.MULTILINE)
        if reasons and not isinstance(chain[-1], OF_CODE):
            return in_one_line(reasons[0])
    if isinstance(chain[-1], MisconfigurationException):
        remedy = ": with --trainer.accelerator=cpu it runs here" * ("No supported gpu" in str(chain[-1]))
        return in_one_line(str(chain[-1])).removesuffix("!") + remedy
    return f"{where}{described(chain[-1])}"


def described(error: BaseException) -> str:
    """What was raised, and by which line of the user's, if any."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [one for one in frames if one[0].f_globals.get("__name__", "").partition(".")[0] not in OF_OTHERS]
    said = f"{type(error).__name__}: {in_one_line(str(error))}"
    if not frames:
        return said
    frame, line = (own or frames)[-1]
    return f"{said}, in {frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{line})"


def missing_package(error: ImportError) -> str:
    """What to install."""
    asked = re.search(r"pip install (?:-U )?'?([^'`]+)", str(error))
    name = asked[1] if asked else (error.name or "").partition(".")[0]
    remedy = f"pip install '{name}'" if name else str(error)
    return f"a package is missing: {remedy}"


def explain_run_error(error: BaseException) -> str | None:
    """The line that says why a run has failed, where that is the user's to mend; None where a traceback says more."""
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
        return f"{in_one_line(message).split('. ')[0]}: take a smaller batch, or a strategy that divides the network"
    return _in_other_words(message)


def _in_other_words(message: str) -> str | None:
    found = ((theirs.search(message), ours) for theirs, ours in IN_OTHER_WORDS)
    return next((in_one_line(ours.format(*match.groups())) for match, ours in found if match), None)


def refusal_in(traceback: str) -> str | None:
    """What is said of the error that ends the traceback of a rank that was spawned or forked."""
    raised = list(re.finditer(r"^([A-Za-z_][\w.]*): ", traceback, re.MULTILINE))
    errors = [one for one in raised if one[1].endswith(("Error", "Exception"))]
    if not errors:
        return None
    message = traceback[errors[-1].end() :]
    refused = errors[-1][1].endswith((ConfigurationError.__name__, MisconfigurationException.__name__))
    if found := re.match(r"\[Errno (\d+)\] ([^:\n]+)(?:: b?'([^'\n]+)')?", message):
        return explain_run_error(OSError(int(found[1]), found[2], found[3]))
    return explain_run_error(ConfigurationError(message) if refused else RuntimeError(message))


def _explain_reference(error: OmegaConfBaseException) -> str:
    """The line that says why a reference, ``${...}``, could not be followed."""
    key = re.sub(rf"^({'|'.join(COMMANDS)})\.", "", str(error.full_key))
    said = in_one_line(str(error.msg).split("\n")[0])
    if found := _NOT_FOUND.match(said):
        target = found[2].partition(".")[2] if found[2] else found[1]
        return f"{key}: refers to {target}, which is not there: give {key} a value, or one that is there"
    return f"{key}: {said}"
