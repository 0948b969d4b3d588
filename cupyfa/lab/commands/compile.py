"""``cupyfa compile``."""

from typing import Any

import click

from cupyfa.lab.analysis.resources import compilations, compile_launch, compiled_row, plans
from cupyfa.lab.commands import command_options
from cupyfa.ladder.common import HALF
from cupyfa.ladder.kernel import ARCHES
from cupyfa.ladder.lookup import operation_of, record_named
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.options import AttentionOptions
from cupyfa.problem.shape_language import NAMES


@click.command("compile")
@command_options.kernels_argument
@click.option(
    "--arch",
    "arches",
    default=",".join(ARCHES),
    help="Compute capabilities; unsupported ones are skipped for each kernel.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=command_options.dtype_choice,
    help="Dtype to compile for; may be repeated.  [default: all]",
)
@command_options.size_option("d", type=command_options.Integer(1), default=64)
@command_options.size_option("dv", type=command_options.Integer(1))
@command_options.attention_options
@command_options.array_options
@command_options.tile_options
@command_options.format_option
def compile_kernels(
    kernels: list[str],
    arches: str,
    dtypes: tuple[str, ...],
    d: int,
    dv: int | None,
    tiles: dict[str, int],
    form: str,
    **given: Any,
) -> None:
    """Compile kernels for any architecture, without a GPU.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    Prints registers, spilled bytes, shared memory and warnings of NVRTC. `--arch 90`
    includes kernels that require sm_90a.
    """
    chosen = [name if name == "auto" else record_named(name) for name in kernels]
    command_options.refuse_foreign({operation_of(name) for name in kernels}, "d", "dv", *given)
    found = command_options.given_sizes(given)
    arrays = {name: found.pop(name) for name in NAMES if name in found}
    attention = AttentionOptions(**found)
    usual = ("float32",) if attention.precision else tuple(DTYPES)
    if (out_dtype := attention.out_dtype) is not None:
        usual = HALF if out_dtype == "float32" else (out_dtype,)
    wanted = dtypes or usual
    architectures = [command_options.architecture(x) for x in arches.split(",")]
    planned = plans(chosen, architectures, wanted, d, dv, attention, tiles, arrays)
    rows = []
    with command_options.progress_bar("compiling") as progress:
        for done, (plan, arch) in enumerate(planned):
            progress(done, len(planned), f"{plan.kernel.name} for sm_{arch}")
            rows += [compiled_row(plan, compile_launch(x, arch)) for x in plan.programs]
    click.echo(compilations(rows, form))
