"""``cupyfa compile``."""

from __future__ import annotations

from typing import Any

import click

from cupyfa.analysis import resources as compiling
from cupyfa.analysis.tables import compilations, compiled_row
from cupyfa.commands.options import (
    attention_options,
    dtype_choice,
    every_option,
    format_option,
    kernel_names,
    kernels_argument,
    progress_bar,
    refuse_foreign,
)
from cupyfa.dtypes import DTYPES
from cupyfa.ladder import lookup as records
from cupyfa.ladder.kernel import ARCHES
from cupyfa.options import AttentionOptions


@click.command("compile")
@kernels_argument
@every_option
@click.option(
    "--arch",
    "arches",
    default=",".join(ARCHES),
    show_default=True,
    help="Compute capabilities; those that a kernel does not claim are passed over.",
)
@click.option("--dtype", "dtypes", multiple=True, type=dtype_choice, help="[default: all]")
@click.option("-d", type=click.IntRange(1), default=64, show_default=True, help="Head dimension.")
@click.option("--dv", type=click.IntRange(1), help="Value dimension.  [default: d]")
@attention_options
@format_option
def compile_kernels(
    kernels: tuple[str, ...],
    every: bool,
    arches: str,
    dtypes: tuple[str, ...],
    d: int,
    dv: int | None,
    form: str,
    **given: Any,
) -> None:
    """Compile kernels with NVRTC, for any architecture and without a GPU.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Tells
    registers, spilled bytes and shared memory, and what the compiler warns of. A kernel for sm_90a
    is compiled so for 90.
    """
    chosen = [records.record_named(name) for name in kernel_names(kernels, every)]
    refuse_foreign({x.operation for x in chosen}, "d", "dv", *given)
    options = AttentionOptions(**{name: x for name, x in given.items() if x is not None})
    asked = dtypes or (("float32",) if options.precision else tuple(DTYPES))
    plans = compiling.plans(
        chosen,
        [x.strip() for x in arches.split(",")],
        asked,
        d,
        dv,
        options,
    )
    rows = []
    with progress_bar("compiling") as progress:
        for done, (plan, arch) in enumerate(plans):
            progress(done, len(plans), f"{plan.kernel.name} for sm_{arch}")
            rows += [
                compiled_row(plan, compiling.compile_launch(launch, arch))
                for launch in plan.programs
            ]
    click.echo(compilations(rows, form))
