"""``cupyfa cache``."""

import sys
from typing import Any

import click

from cupyfa.lab.analysis import caches
from cupyfa.lab.commands import UNSUPPORTED, command_options
from cupyfa.lab.report.tables import render

_OURS = [kind for kind in caches.KINDS if kind != "cupy"]
_MEANINGS = "\b\nKinds:\n" + "\n".join(f"  {x:10} {y}" for x, y in caches.KINDS.items())


class _Kind(click.Choice):  # type: ignore[type-arg]  # not generic before click 8.2
    """A choice among the kinds of files that cupyfa does not share with other programs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "cupy":
            self.fail("other programs also use the files of 'cupy'; add --cupy", param, ctx)
        return super().convert(value, param, ctx)


@click.group(epilog=_MEANINGS)
def cache() -> None:
    """List or clear cache files on disk."""


@cache.command("list")
@command_options.format_option
def list_kinds(form: str) -> None:
    """List the kinds of cache files with their sizes and folders.

    Other programs use CuPy's files too.
    """
    click.echo(render([caches.kept(kind) for kind in caches.KINDS], form))


@cache.command()
@command_options.format_option
def size(form: str) -> None:
    """Print the total bytes of each kind, and of all kinds except CuPy's."""
    sizes = {kind: caches.kept(kind)["bytes"] for kind in caches.KINDS}
    sizes["all but cupy"] = sum(sizes[kind] for kind in _OURS)
    click.echo(render([{"kind": x, "bytes": sizes[x]} for x in sizes], form))


@cache.command()
@click.argument("kinds", nargs=-1, metavar="[KIND]...", type=_Kind(_OURS))
@click.option("--cupy", is_flag=True, help="Also CuPy's files, which other programs use too.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed.")
@command_options.format_option
def clear(kinds: tuple[str, ...], cupy: bool, dry_run: bool, form: str) -> None:
    """Remove the files of KINDs; by default, of all kinds except cupy.

    Unfinished files of killed processes are also removed once they are an hour old. The column
    "left" counts files that could not be removed.
    """
    chosen = dict.fromkeys([*(kinds or _OURS), "leftovers", *(["cupy"] if cupy else [])])
    removed = [caches.clear(kind, dry_run=dry_run) for kind in chosen]
    click.echo(render(removed, form))
    if dry_run:
        command_options.note("nothing was removed")
    sys.exit(UNSUPPORTED if any(x["left"] for x in removed) and not dry_run else 0)
