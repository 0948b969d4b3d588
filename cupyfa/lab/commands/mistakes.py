"""Suggests corrections of command lines that click rejects."""

import re
from collections.abc import Iterable, Sequence

import click

from cupyfa.errors import closest
from cupyfa.lab.commands.command_options import misplaced_value

ARGUMENTS = "cupyfa.arguments"  # key of the command line's arguments in a command's context

# Maps (command, option) to a replacement, for options that the command does not have.
_ELSEWHERE = {
    **{
        ("tune", name): f"`tune` tries all tile sizes itself and has no {name}; to measure chosen "
        "tile sizes, write cupyfa bench KERNEL -p Br=64,128"
        for name in ("--Br", "--Bc", "--tile", "--tiles", "-t")
    },
    **{
        ("ladder", name): f"`ladder` measures all rungs and has no {name}; to measure chosen "
        "kernels, write cupyfa bench KERNEL KERNEL"
        for name in ("--rung", "--rungs", "--kernel", "--kernels", "--against")
    },
}
# Maps removed commands to their replacements.
_REMOVED = {
    "memory": "cupyfa show KERNEL --plan prints how many bytes a kernel allocates, cupyfa roofline "
    "how many bytes a kernel transfers",
    "warm": "a program that calls cupyfa.compile fills the cache",
    "profile": "run a profiler on cupyfa run: ncu --set full cupyfa run KERNEL",
}
# Maps words that other programs use to the values that cupyfa's options accept.
_SYNONYMS = {
    **{"gpu": "cuda", "cpu": "simulator"},
    **{"half": "float16", "single": "float32", "float": "float32", "double": "float64"},
    **{"fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"},
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"},
    **{"markdown": "md", "text": "table"},
}


def message_of(error: click.ClickException) -> str:
    """Returns a one-line message for a rejected command line, with a suggestion."""
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message().removesuffix(".")
    see = f"See {context.command_path} --help."
    name = getattr(error, "option_name", None)
    if isinstance(error, click.NoSuchOption) and name:
        message, remedy = f"No such option '{name}'", _instead_of(name, context)
        return f"{message}{_ended(remedy)} {see}"
    message = error.format_message().removesuffix(".")
    message = re.sub(r"\(?Did you mean( one of)?:? .*", "", message).rstrip(" .")
    if found := re.search(r"No such command '(.*)'", message):
        known = context.command.list_commands(context)  # type: ignore[attr-defined]
        remedy = f"; {_REMOVED[found[1]]}" if found[1] in _REMOVED else _meant(found[1], known)
    else:
        remedy = misplaced_value(message, context.meta.get(ARGUMENTS, ())) or _choice(
            error, message
        )
    return f"{message}{_ended(remedy)} {see}"


def refuse_one_dash(
    command: click.Command | None, arguments: Sequence[str], parent: click.Context
) -> None:
    """Raises UsageError for -causal (click would read -c ausal) and for -M=5 (-M with "=5")."""
    if command is None:
        return
    context = click.Context(command, info_name=command.name, parent=parent)
    if isinstance(command, click.Group) and arguments:
        sub = command.get_command(context, arguments[0])
        return refuse_one_dash(sub, arguments[1:], context)
    options = _options(command)
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and len(name) == len("-M") and name in options:
            remedy = f"{word} uses = after a short option; write {name} {value}"
            raise click.UsageError(remedy, ctx=context)
        if re.fullmatch("-[A-Za-z][A-Za-z-]+", name) and f"-{name}" in options:
            raise click.NoSuchOption(name, ctx=context)


def _instead_of(name: str, context: click.Context) -> str:
    """Suggests a replacement for an option that the command does not have, or returns ""."""
    if remedy := _ELSEWHERE.get((context.info_name or "", name)):
        return f": {remedy}"
    word = name.lstrip("-").replace("_", "-")
    for parameter in context.command.params:
        is_argument = isinstance(parameter, click.Argument)
        if is_argument and word.lower().rstrip("s") == (parameter.name or "").rstrip("s"):
            return f": {parameter.human_readable_name} is an argument, not an option"
    known = {x.lstrip("-"): x for x in _options(context.command)}
    by_case = {x.lower(): known[x] for x in known}
    if len(word) == 1 or word in known or word.lower() in by_case:
        exact = known.get(word.swapcase() if word not in known else word)
        meant = exact or by_case.get(word.lower())
    else:
        close = closest(word, [x for x in known if len(x) > 1])
        meant = known[close] if close else None
    return f". Did you mean '{meant}'?" if meant else ""


def _options(command: click.Command) -> list[str]:
    """Returns the names of the options that the command's help shows."""
    shown = [x for x in command.params if isinstance(x, click.Option) and not x.hidden]
    return [name for x in shown for name in x.opts] + ["--help", "-h"]


def _choice(error: click.ClickException, message: str) -> str:
    """Suggests the choice that an unknown word may mean, or returns "" if none is similar."""
    parameter = getattr(error, "param", None)
    kind = getattr(parameter, "type", None)
    found = re.search("'([^']*)' is not one of", message)
    return _meant(found[1], kind.choices) if found and isinstance(kind, click.Choice) else ""


def _meant(word: str, known: Iterable[str]) -> str:
    known = list(known)
    synonym = _SYNONYMS.get(word.lower())
    close = synonym if synonym in known else closest(word, known)
    return f". Did you mean '{close}'?" if close else ""


def _ended(remedy: str) -> str:
    return remedy if remedy.endswith("?") else f"{remedy}."
