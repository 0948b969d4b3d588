"""``cupyfa cache``."""

import sys
from dataclasses import replace
from typing import Any

import click

from cupyfa.lab.analysis import caches
from cupyfa.lab.bench import sweeps
from cupyfa.lab.commands import UNSUPPORTED, command_options
from cupyfa.lab.report.tables import render
from cupyfa.ladder.lookup import operation_of
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.shape_language import NAMES
from cupyfa.runtime.choose_backend import backend_named

_OURS = [kind for kind in caches.KINDS if kind != "cupy"]
_MEANINGS = "\b\nKinds:\n" + "\n".join(f"  {x:10} {y}" for x, y in caches.KINDS.items())


class _Kind(click.Choice):  # type: ignore[type-arg]  # not generic before click 8.2
    """A kind of files that only cupyfa uses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "cupy":
            self.fail("other programs use 'cupy' too; add --cupy to clear it", param, ctx)
        return super().convert(value, param, ctx)


@click.group(epilog=_MEANINGS)
def cache() -> None:
    """List, clear or fill the files on disk."""


@cache.command("list")
@command_options.format_option
def list_kinds(form: str) -> None:
    """List each kind of file, its bytes and its folder.

    Other programs use CuPy's files too.
    """
    click.echo(render([caches.kept(kind)._asdict() for kind in caches.KINDS], form))


@cache.command()
@command_options.format_option
def size(form: str) -> None:
    """Print the bytes of each kind, and of all but CuPy's."""
    sizes = {kind: caches.kept(kind).bytes for kind in caches.KINDS}
    sizes["all but cupy"] = sum(sizes[kind] for kind in _OURS)
    click.echo(render([{"kind": x, "bytes": sizes[x]} for x in sizes], form))


@cache.command()
@click.argument("kinds", nargs=-1, metavar="[KIND]...", type=_Kind(_OURS))
@click.option("--cupy", is_flag=True, help="Also CuPy's files, which other programs use too.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed.")
@command_options.format_option
def clear(kinds: tuple[str, ...], cupy: bool, dry_run: bool, form: str) -> None:
    """Remove the files of these KINDs; by default of all but cupy.

    Unfinished files of killed processes are removed too, if they are an hour old. The column "left"
    counts files that cannot be removed.
    """
    chosen = dict.fromkeys([*(kinds or _OURS), "leftovers", *(["cupy"] if cupy else [])])
    removed = [caches.clear(kind, dry_run=dry_run) for kind in chosen]
    click.echo(render([x._asdict() for x in removed], form))
    if dry_run:
        command_options.note("nothing was removed")
    sys.exit(UNSUPPORTED if any(x.left for x in removed) and not dry_run else 0)


@cache.command()
@command_options.kernels_argument
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=command_options.dtype_choice,
    default=("float32",),
    help="Dtype to compile for; may be repeated.",
)
@click.option("-d", "ds", default="64", help="Head dimensions, as 64,128.")
@command_options.size_option("dv", type=command_options.Integer(1))
@click.option(
    "--group", type=command_options.Integer(1), default=1, help="Query heads for each key head."
)
@command_options.attention_options
@command_options.array_options
@click.option("--both", is_flag=True, help="With a causal mask, and without one.")
@command_options.backend_option
@command_options.format_option
def warm(
    kernels: list[str],
    dtypes: tuple[str, ...],
    ds: str,
    dv: int | None,
    group: int,
    both: bool,
    backend: str,
    form: str,
    **given: Any,
) -> None:
    """Compile KERNELs now, before a program needs them.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    Combinations that a kernel cannot do are skipped. Tiles are those of long sequences, of short
    ones, and of few queries or heads.
    """
    operations = {operation_of(name) for name in kernels}
    command_options.refuse_foreign(operations, "ds", "dv", "group", "both", *given)
    if given["causal"] and both:
        raise ValueError("--causal and --both say different things; leave one out")
    found = command_options.given_sizes(given)
    arrays = {name: found.pop(name) for name in NAMES if name in found}
    base = AttentionOptions(**found)
    masks = (None, "bottom-right") if both else (base.causal,)
    _, sizes = sweeps.parsed(f"d={ds}")
    on = backend_named(backend)
    with command_options.progress_bar("compiling") as progress, on.working_on(None):
        done = caches.warm(
            on,
            kernels,
            dtypes,
            sizes,
            dv=dv,
            options=[replace(base, causal=mask) for mask in masks],
            group=group,
            arrays=arrays,
            progress=progress,
        )
    click.echo(render([done._asdict()], form))
