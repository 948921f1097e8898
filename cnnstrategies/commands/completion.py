"""``cnnstrategies completion``: commands, keys, values and recipes, completed by the shell."""

import glob
from collections.abc import Iterator, Sequence

import yaml

from cnnstrategies.commands import early, recipes
from cnnstrategies.commands.table import COMMANDS
from cnnstrategies.errors import ConfigurationError

WORDS = "--words"  # What the scripts call this command with: the words up to the cursor follow.
BASH = """\
_cnnstrategies() {
    local IFS=$'\\n'
    COMPREPLY=($(cnnstrategies completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
}
complete -F _cnnstrategies cnnstrategies
"""
ZSH = f"autoload -U +X bashcompinit && bashcompinit\n{BASH}"
FISH = """\
complete -c cnnstrategies -f -a '(cnnstrategies completion --words (commandline -opc)[2..-1] (commandline -ct))'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(args: Sequence[str]) -> None:
    """Print a shell's script, or what it asks for.

    Args:
        args: The command line from ``completion`` on.

    Raises:
        ConfigurationError: The shell is none of those that are known.
    """
    if args[1:2] == [WORDS]:
        print("\n".join(candidates(args[2:])))
    elif len(args) == 2 and args[1] in SCRIPTS:
        print(SCRIPTS[args[1]], end="")
    else:
        raise ConfigurationError(f"completion {' '.join(args[1:])}: name the shell, {' or '.join(SCRIPTS)}")


def candidates(words: Sequence[str]) -> list[str]:
    """What the last word may become.

    Args:
        words: Those after the program's name; bash gives ``=`` as a word of its own.
    """
    *before, last = words or [""]
    if last == "=":
        before, last = [*before, last], ""
    if not before:
        found: Iterator[str] = iter(COMMANDS)
    elif before == ["submit"]:
        found = iter(["fit", "doctor"])
    elif before == ["completion"]:
        found = iter(SCRIPTS)
    elif before[0] == "configs":
        found = iter(recipes.names())
    else:
        option = before[-2] if before[-1] == "=" and len(before) > 2 else before[-1]
        found = _keys(before) if last.startswith("-") else _values(option, before, last)
    return sorted({word for word in found if word.startswith(last)})


def _keys(words: Sequence[str]) -> Iterator[str]:
    """The keys at the root, those of its classes, and those of the classes that have been named."""
    if not COMMANDS.get(words[0]) or not COMMANDS[words[0]].configured:
        return
    yield from ("--config", "--help", "--help_full", "--print_config")
    for root, owner in {**early.ROOTS, **early.NESTED}.items():
        yield f"--{root}"
        if owner is not None and (known := early.signature_of(owner)) is not None:
            yield from (f"--{root}.{name}" for name in known.parameters)
    for key in early.given(words):
        if key.name == "class_path" and (known := early.signature_of(str(key.value))) is not None:
            place = key.path.removesuffix("class_path")
            yield from (f"--{place}init_args.{name}" for name in known.parameters)


def _values(option: str, words: Sequence[str], last: str) -> Iterator[str]:
    if option in ("--config", "-c"):
        yield from recipes.names()
        yield from glob.glob(f"{glob.escape(last)}*")
    elif option == "--trainer.strategy":
        yield from early.STRATEGIES
    elif option == "--trainer.accelerator":
        yield from early.ACCELERATORS
    elif option == "--ckpt_path":
        yield from ("best", "last", *glob.glob(f"{glob.escape(last)}*"))
    else:
        for key in early.given([*words, f"{option}="]):
            known = early.signature_of(key.owner)
            if f"--{key.path}" == option and known is not None and key.name in known.parameters:
                for one in early.accepted_by(known.parameters[key.name]):
                    yield from _as_words(one)


def _as_words(one: object) -> Iterator[str]:
    if one is bool:
        yield from ("true", "false")
    elif one is None or isinstance(one, str | int):
        yield yaml.safe_dump(one).split("\n")[0]
