"""``cupyfa cache``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from cupyfa.analysis import caches
from cupyfa.bench import sweeps
from cupyfa.commands import UNSUPPORTED
from cupyfa.commands.options import (
    attention_options,
    backend_option,
    dtype_choice,
    every_option,
    format_option,
    kernel_names,
    kernels_argument,
    progress_bar,
    refuse_foreign,
)
from cupyfa.ladder import lookup as records
from cupyfa.options import AttentionOptions
from cupyfa.report import tables as report
from cupyfa.runtime.select import backend_named

_OURS = [kind for kind in caches.KINDS if kind != "cupy"]


_MEANINGS = "\b\nKinds:\n" + "\n".join(f"  {x:10} {y}" for x, y in caches.KINDS.items())


class _Kind(click.Choice):  # type: ignore[type-arg]  # click takes none before 8.2
    """A kind that is cupyfa's alone."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "cupy":
            self.fail(
                "'cupy' is every program's; add --cupy to clear it beside other KINDs, or all",
                *(param, ctx),
            )
        return super().convert(value, param, ctx)


@click.group(epilog=_MEANINGS)
def cache() -> None:
    """What is kept on disk: list it, clear it, or fill it beforehand."""


@cache.command("list")
@format_option
def list_kinds(form: str) -> None:
    """Each kind of file: how many, their bytes, the newest, and where.

    What CuPy keeps is every program's, and not cupyfa's alone.
    """
    rows = [caches.kept(kind).row() for kind in caches.KINDS]
    click.echo(report.render(rows, form))


@cache.command()
@format_option
def size(form: str) -> None:
    """The bytes of each kind, and of all that is cupyfa's alone."""
    sizes = {kind: caches.kept(kind).bytes for kind in caches.KINDS}
    sizes["all but cupy"] = sum(sizes[kind] for kind in _OURS)
    click.echo(report.render([{"kind": x, "bytes": sizes[x]} for x in sizes], form))


@cache.command()
@click.argument("kinds", nargs=-1, metavar="[KIND]...", type=_Kind(_OURS))
@click.option("--cupy", is_flag=True, help="Also what CuPy keeps for all programs.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@format_option
def clear(kinds: tuple[str, ...], cupy: bool, dry_run: bool, form: str) -> None:
    """Remove what is kept, of these KINDs or of all but cupy, which --cupy adds to them.

    What killed processes left half-written goes too, when it is an hour old.
    """
    chosen = dict.fromkeys([*(kinds or _OURS), "leftovers", *(["cupy"] if cupy else [])])
    removed = [caches.clear(kind, dry_run=dry_run) for kind in chosen]
    click.echo(report.render([x.row() for x in removed], form))
    if dry_run:
        click.echo("note: nothing was removed", err=True)
    sys.exit(UNSUPPORTED if any(x.left for x in removed) and not dry_run else 0)


@cache.command()
@kernels_argument
@every_option
@click.option("--dtype", "dtypes", multiple=True, type=dtype_choice, default=("float32",))
@click.option("-d", "ds", default="64", show_default=True, help="Head dimensions, as 64,128.")
@click.option("--dv", type=click.IntRange(1), help="Value dimension.  [default: d]")
@click.option("--group", type=click.IntRange(1), default=1, help="Heads to a key head.")
@attention_options
@click.option("--both", is_flag=True, help="With a causal mask, and without one.")
@backend_option
@format_option
def warm(
    kernels: tuple[str, ...],
    every: bool,
    dtypes: tuple[str, ...],
    ds: str,
    dv: int | None,
    group: int,
    both: bool,
    backend: str,
    form: str,
    **given: Any,
) -> None:
    """Compile KERNELs beforehand, so that a program's first call finds them.

    KERNEL is as for `cupyfa run`, `auto` too. Combinations that a kernel cannot do are passed over.
    Tiles are those of long sequences, of short ones, and of few queries or heads.
    """
    chosen = [
        name if name == "auto" else records.record_named(name)
        for name in kernel_names(kernels, every)
    ]
    operations = {"forward" if isinstance(x, str) else x.operation for x in chosen}
    refuse_foreign(operations, "ds", "dv", "group", "both", *given)
    if given["causal"] and both:
        raise ValueError("--causal and --both say different things; leave one out")
    chosen_options = AttentionOptions(**{name: x for name, x in given.items() if x is not None})
    masks = (None, "bottom-right") if both else (chosen_options.causal,)
    _, sizes = sweeps.parsed(f"d={ds}")
    engine = backend_named(backend)
    with progress_bar("compiling") as progress, engine.working_on(None):
        done = caches.warm(
            engine,
            chosen,
            dtypes,
            sizes,
            dv=dv,
            options=[replace(chosen_options, causal=mask) for mask in masks],
            group=group,
            progress=progress,
        )
    click.echo(report.render([done.row()], form))
