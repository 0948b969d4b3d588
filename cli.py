"""The command line: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import random
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import click

from cupyfa import Kernel, __version__, compiling, planning, report, sources, trial
from cupyfa.backends import Backend
from cupyfa.backends.select import NAMES, backend_named
from cupyfa.backends.simulator import Simulator
from cupyfa.dtypes import DTYPES
from cupyfa.kernel import ARCHES
from cupyfa.ladder import LADDER
from cupyfa.problem import LAYOUTS, Problem

WRONG, BAD_ARGUMENTS, UNSUPPORTED, INTERRUPTED = 1, 2, 3, 130
# By name, for one of them is CuPy's, which is imported only where there is work for it.
EXIT_CODES = {
    "WrongResult": WRONG,
    "SimulatorFault": WRONG,
    "Unsupported": UNSUPPORTED,
    "DeviceError": UNSUPPORTED,
    "CompilerNotFound": UNSUPPORTED,
    "MemoryError": UNSUPPORTED,
    "CompileError": BAD_ARGUMENTS,
    "CompileException": BAD_ARGUMENTS,
    "ValueError": BAD_ARGUMENTS,
    "TypeError": BAD_ARGUMENTS,
    "OSError": BAD_ARGUMENTS,
}


class Program(click.Group):
    """Ends with one line on stderr and the exit code that an error stands for."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except click.Abort:
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            remedy = f" See {context.command_path} --help." if context else ""
            fail(f"{error.format_message()}{remedy}", BAD_ARGUMENTS)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            known = next((name for name in names if name in EXIT_CODES), None)
            if known is None:
                raise
            fail(str(error), EXIT_CODES[known])


def fail(message: str, code: int) -> None:
    """Ends the program with a message on stderr."""
    click.echo(f"cupyfa: {message}", err=True)
    sys.exit(code)


def notes_to_stderr() -> None:
    """Shows the library's warnings as plain notes, away from the data on stdout."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        click.echo(f"note: {message}", err=True)

    warnings.showwarning = show


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="cupyfa")
@click.pass_context
def main(context: click.Context) -> None:
    """FlashAttention without torch: run and check attention kernels.

    Exit codes: 0 done and right, 1 wrong result, 2 bad arguments, 3 unsupported here.
    """
    notes_to_stderr()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


size = click.IntRange(0)
dtype_choice = click.Choice(list(DTYPES))
format_option = click.option(
    "--format",
    "form",
    type=click.Choice(report.FORMATS),
    default="table",
    show_default=True,
    help="For people, or for programs.",
)
backend_option = click.option(
    "--backend",
    type=click.Choice(NAMES),
    default="auto",
    show_default=True,
    help="auto is cuda if there is a device.",
)


@main.command("list")
@click.option(
    "--dtype",
    type=dtype_choice,
    default="float32",
    show_default=True,
    help="What the largest d is told for.",
)
@backend_option
@format_option
def list_kernels(dtype: str, backend: str, form: str) -> None:
    """The kernels, what each adds, and what it can do."""
    limits = backend_named(backend).limits
    rows = [
        report.kernel_row(kernel, planning.largest_d(kernel, dtype, limits))
        for kernels in LADDER.values()
        for kernel in kernels.values()
    ]
    click.echo(report.listing(rows) if form == "table" else report.render(rows, form))
    click.echo(
        f"note: d is told for {dtype}, as far as the {limits.shared_bytes:,} bytes of shared "
        f"memory reach that {limits.device} gives a block",
        err=True,
    )


@main.command()
@click.argument("kernel")
@click.option("-B", "--batch", type=size, help="Sizes left out are drawn at random by the seed.")
@click.option("-H", "--heads", type=size)
@click.option("--kv-heads", type=size, help="Divides heads.  [default: heads, if that is given]")
@click.option("-M", "M", type=size, help="Queries, or the rows of a softmax.")
@click.option("-N", "N", type=size, help="Keys, or the columns of a softmax.")
@click.option("-d", type=size, help="Head dimension.")
@click.option("--dv", type=size, help="Value dimension.  [default: d]")
@click.option("--dtype", type=dtype_choice, default="float32", show_default=True)
@click.option(
    "--causal",
    is_flag=False,
    flag_value="bottom-right",
    type=click.Choice(["bottom-right", "top-left"]),
    help="Query i sees keys j <= i + N - M (bottom-right, the default) or j <= i (top-left).",
)
@click.option("--scale", type=float, help="[default: 1/sqrt(d)]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="bhsd", show_default=True)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Of the random sizes and inputs.  [default: a new one]",
)
@backend_option
@click.option(
    "--schedule",
    type=click.IntRange(0),
    help="Simulator: a seed for another order of the threads.",
)
@click.option("--Br", "Br", type=int, help="Rows of a tile of Q.")
@click.option("--Bc", "Bc", type=int, help="Rows of a tile of K and V.")
@click.option(
    "-c",
    "--constant",
    "constants",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any constant of the kernel, as often as there are some.",
)
@format_option
def run(
    kernel: str,
    seed: int | None,
    backend: str,
    schedule: int | None,
    layout: str,
    form: str,
    Br: int | None,
    Bc: int | None,
    constants: tuple[str, ...],
    **sizes: Any,
) -> None:
    """Run KERNEL on random inputs, check it, and time it.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    """
    seed = random.randrange(2**31) if seed is None else seed
    given = tile_sizes(Br, Bc, constants)
    operation, record = kernel_named(kernel)
    problem = problem_of(operation, record, seed, sizes)
    engine = engine_named(backend, schedule)
    chosen = planning.select(record, operation, problem, engine.limits)
    plan = planning.plan(chosen, problem, engine.limits, **given)
    try:
        with engine.working_on(None):
            result = trial.trial(
                engine, plan, trial.random_inputs(problem, operation, seed, layout)
            )
    except Exception:
        click.echo(f"note: this was {problem} layout={layout} seed={seed}", err=True)
        raise
    about = {"backend": engine.name, "device": engine.limits.device, "layout": layout, "seed": seed}
    if form == "table":
        click.echo(report.trial_lines(result, problem, about))
    else:
        click.echo(report.render([report.trial_row(result, problem, about)], form))
    sys.exit(0 if result.passed else WRONG)


@main.command("compile")
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--all", "every", is_flag=True, help="Every kernel of the ladder.")
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
@click.option("--causal", is_flag=True, help="With a causal mask.")
@format_option
def compile_kernels(
    kernels: tuple[str, ...],
    every: bool,
    arches: str,
    dtypes: tuple[str, ...],
    d: int,
    dv: int | None,
    causal: bool,
    form: str,
) -> None:
    """Compile kernels with NVRTC, for any architecture and without a GPU.

    KERNEL is as for `cupyfa run`. Tells registers, spilled bytes and shared memory.
    """
    if every == bool(kernels):
        raise ValueError("name kernels, or give --all")
    names = [name for group in LADDER.values() for name in group] if every else list(kernels)
    records = [record_named(name) for name in names]
    plans = compiling.plans(records, arches.split(","), dtypes or tuple(DTYPES), d, dv, causal)
    with click.progressbar(plans, label="compiling", file=sys.stderr) as progress:
        rows = [
            report.compiled_row(plan, compiling.compile_launch(launch, arch))
            for plan, arch in progress
            for launch in plan.launches
        ]
    click.echo(report.render(rows, form))


@main.command()
@click.argument("kernel")
@click.option("--source", "what", flag_value="source", help="The exact text that is compiled.")
@click.option("--plan", "what", flag_value="plan", help="Grid, threads, shared memory, arguments.")
@click.option("--ptx", "what", flag_value="ptx", help="PTX, from NVRTC.")
@click.option("--sass", "what", flag_value="sass", help="Machine code, if nvdisasm is there.")
@click.option(
    "--resources",
    "what",
    flag_value="resources",
    help="Registers, spills, shared memory, occupancy and what limits it.  [default]",
)
@click.option("--arch", default="90", show_default=True, help="Compute capability.")
@click.option("-M", "M", type=size, default=1024, show_default=True, help="Queries.")
@click.option("-N", "N", type=size, help="Keys.  [default: M]")
@click.option("-B", "--batch", type=size, default=1, show_default=True)
@click.option("-H", "--heads", type=size, default=1, show_default=True)
@click.option("-d", type=click.IntRange(1), default=64, show_default=True, help="Head dimension.")
@click.option("--dv", type=click.IntRange(1), help="Value dimension.  [default: d]")
@click.option("--dtype", type=dtype_choice, default="float32", show_default=True)
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--Br", "Br", type=int, help="Rows of a tile of Q.")
@click.option("--Bc", "Bc", type=int, help="Rows of a tile of K and V.")
@click.option("-c", "--constant", "constants", multiple=True, metavar="NAME=VALUE")
def show(
    kernel: str,
    what: str | None,
    arch: str,
    Br: int | None,
    Bc: int | None,
    constants: tuple[str, ...],
    **sizes: Any,
) -> None:
    """Show what KERNEL becomes: source text, plan, PTX, machine code or resources.

    KERNEL is as for `cupyfa run`. Needs no GPU.
    """
    record = record_named(kernel)
    if record.operation == "softmax":
        M, N = sizes["M"], sizes["N"]
        problem = Problem.of_row_sizes(M, M if N is None else N, sizes["dtype"])
    else:
        problem = Problem.of_sizes(**sizes)
    limits = compiling.limits_of(arch)
    plan = planning.plan(record, problem, limits, **tile_sizes(Br, Bc, constants))
    for launch in plan.launches:
        if what == "source":
            click.echo(sources.text(launch))
        elif what == "plan":
            click.echo(report.plan_lines(plan, launch))
        elif what == "ptx":
            click.echo(compiling.ptx(launch, arch))
        elif what == "sass":
            click.echo(compiling.sass(compiling.compile_launch(launch, arch)))
        else:
            compiled = compiling.compile_launch(launch, arch)
            click.echo(report.fields(report.compiled_row(plan, compiled)))


def record_named(name: str) -> Kernel:
    """The record of a kernel's name; "auto" is none."""
    _, record = kernel_named(name)
    if not isinstance(record, Kernel):
        raise ValueError(f"{name!r} is no kernel here; name one of `cupyfa list`")
    return record


def engine_named(backend: str, schedule: int | None) -> Backend:
    """The backend, if it is the simulator in the order of threads that was asked for."""
    engine = backend_named(backend)
    if schedule is None:
        return engine
    if not isinstance(engine, Simulator):
        raise ValueError("--schedule orders the simulator's threads; add --backend simulator")
    return Simulator(schedule=schedule)


def kernel_named(name: str) -> tuple[str, str | Kernel]:
    """The operation and the record of a kernel's name, or of script.py:name."""
    if name == "auto":
        return "forward", name
    if ".py" in name:
        record = kernel_from_script(name)
        return record.operation, record
    for operation, kernels in LADDER.items():
        if name in kernels:
            return operation, kernels[name]
    known = ", ".join(kernel for kernels in LADDER.values() for kernel in kernels)
    raise ValueError(f"kernel {name!r} is unknown; there are {known}, auto, and script.py:name")


def kernel_from_script(name: str) -> Kernel:
    """The record that a user's script makes, by script.py:name."""
    script, _, variable = name.rpartition(":")
    if not script:
        raise ValueError(f"{name!r} names no record; write {name}:name for the Kernel in it")
    if not Path(script).is_file():
        raise ValueError(f"there is no file {script!r}")
    found = variables_of(Path(script).resolve())
    records = {key: value for key, value in found.items() if isinstance(value, Kernel)}
    if variable not in records:
        known = ", ".join(records) or "none"
        raise ValueError(f"{script} has no Kernel named {variable!r}; its Kernels: {known}")
    return records[variable]


def variables_of(script: Path) -> dict[str, Any]:
    """What a script defines, run as Python runs a script: with its folder on the path."""
    sys.path.insert(0, str(script.parent))
    try:
        return runpy.run_path(str(script))
    except Exception as error:
        lines = [
            x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == str(script)
        ]
        place = f"{script}:{lines[-1]}" if lines else str(script)
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(script.parent))


def problem_of(operation: str, record: str | Kernel, seed: int, sizes: dict[str, Any]) -> Problem:
    """The problem of the sizes given, and random ones that suit the kernel for the others."""
    drawn = trial.random_sizes(seed)
    if isinstance(record, Kernel) and "gqa" not in record.features:
        drawn["kv_heads"] = drawn["heads"]
    given = {name: value for name, value in sizes.items() if value is not None}
    if operation == "softmax":
        if foreign := ", ".join(sorted(given.keys() - {"M", "N", "dtype"})):
            raise ValueError(f"a softmax is M rows of N scores and has no {foreign}; leave it out")
        sizes = {**drawn, **given}
        return Problem.of_row_sizes(sizes["M"], sizes["N"], sizes["dtype"])
    if "heads" in given:
        drawn["kv_heads"] = given["heads"]
    elif "kv_heads" in given:
        drawn["heads"] = given["kv_heads"]
    return Problem.of_sizes(**{**drawn, **given})


def tile_sizes(Br: int | None, Bc: int | None, constants: tuple[str, ...]) -> dict[str, int]:
    """The constants fixed on the command line."""
    given = {name: value for name, value in (("Br", Br), ("Bc", Bc)) if value is not None}
    for constant in constants:
        name, _, value = constant.partition("=")
        if not value.isdecimal():
            raise ValueError(f"constant {constant!r} is not NAME=VALUE with a whole number")
        given[name] = int(value)
    return given


if __name__ == "__main__":
    main()
