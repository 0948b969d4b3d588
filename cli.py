"""The command line: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import functools
import random
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cupyfa import (
    DeviceError,
    Kernel,
    Unsupported,
    WrongResult,
    __version__,
    planning,
    report,
    trial,
)
from cupyfa.backends.select import NAMES, backend_named
from cupyfa.backends.simulator import Simulator, machine
from cupyfa.dtypes import DTYPES
from cupyfa.ladder import LADDER
from cupyfa.problem import LAYOUTS, Problem

WRONG, BAD_ARGUMENTS, UNSUPPORTED = 1, 2, 3
EXIT_CODES = {
    WrongResult: WRONG,
    machine.SimulatorFault: WRONG,
    Unsupported: UNSUPPORTED,
    DeviceError: UNSUPPORTED,
    machine.CompilerNotFound: UNSUPPORTED,
    machine.CompileError: BAD_ARGUMENTS,
    ValueError: BAD_ARGUMENTS,
    TypeError: BAD_ARGUMENTS,
    OSError: BAD_ARGUMENTS,
}


def errors_to_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """Ends a command with one line on stderr and the exit code that its error stands for."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except tuple(EXIT_CODES) as error:
            click.echo(f"cupyfa: {error}", err=True)
            sys.exit(next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES))

    return wrapped


def notes_to_stderr() -> None:
    """Shows the library's warnings as plain notes, away from the data on stdout."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        click.echo(f"note: {message}", err=True)

    warnings.showwarning = show


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cupyfa")
def main() -> None:
    """FlashAttention without torch: run and check attention kernels.

    Exit codes: 0 done and right, 1 wrong result, 2 bad arguments, 3 unsupported here.
    """
    notes_to_stderr()


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
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@backend_option
@format_option
@errors_to_exit_codes
def list_kernels(dtype: str, backend: str, form: str) -> None:
    """The kernels, what each adds, and what it can do."""
    limits = backend_named(backend).limits
    rows = {
        operation: [
            report.kernel_row(kernel, planning.largest_d(kernel, dtype, limits), dtype)
            for kernel in kernels.values()
        ]
        for operation, kernels in LADDER.items()
    }
    if form != "table":
        every = [{"operation": name, **row} for name in rows for row in rows[name]]
        click.echo(report.render(every, form))
        return
    for operation in rows:
        click.echo(f"{operation}\n{report.render(rows[operation], form)}\n")
    click.echo(
        f"largest d: as far as the {limits.shared_bytes:,} bytes of shared memory reach that "
        f"{limits.device} gives a block\nrounds to: what operands are rounded to by design",
        err=True,
    )


@main.command()
@click.argument("kernel")
@click.option("-B", "--batch", type=int, help="Sizes left out are drawn at random by the seed.")
@click.option("-H", "--heads", type=int)
@click.option("--kv-heads", type=int, help="Divides heads.  [default: heads, if that is given]")
@click.option("-M", "M", type=int, help="Queries, or the rows of a softmax.")
@click.option("-N", "N", type=int, help="Keys, or the columns of a softmax.")
@click.option("-d", type=int, help="Head dimension.")
@click.option("--dv", type=int, help="Value dimension.  [default: d]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option(
    "--causal",
    is_flag=False,
    flag_value="bottom-right",
    type=click.Choice(["bottom-right", "top-left"]),
    help="Query i sees keys j <= i + N - M (bottom-right, the default) or j <= i (top-left).",
)
@click.option("--scale", type=float, help="[default: 1/sqrt(d)]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="bhsd", show_default=True)
@click.option("--seed", type=int, help="Of the random sizes and inputs.  [default: a new one]")
@backend_option
@click.option("--schedule", type=int, help="Simulator: a seed for another order of the threads.")
@click.option("--Br", "Br", type=int, help="Rows of a tile of Q.")
@click.option("--Bc", "Bc", type=int, help="Rows of a tile of K and V.")
@click.option("-c", "--constant", "constants", multiple=True, metavar="NAME=VALUE")
@format_option
@errors_to_exit_codes
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
    engine = backend_named(backend)
    if schedule is not None:
        if not isinstance(engine, Simulator):
            raise ValueError("--schedule orders the simulator's threads; add --backend simulator")
        engine = Simulator(schedule=schedule)
    given = tile_sizes(Br, Bc, constants)
    operation, record = kernel_named(kernel)
    problem = problem_of(operation, seed, sizes)
    chosen = planning.select(record, operation, problem, engine.limits)
    plan = planning.plan(chosen, problem, engine.limits, **given)
    inputs = trial.random_inputs(problem, operation, seed, layout)
    with engine.working_on(None):
        result = trial.trial(engine, plan, inputs)
    if form == "table":
        print_trial(result, engine.limits.device, engine.name, layout, seed)
    else:
        click.echo(report.render([report.trial_row(result, engine.limits.device, seed)], form))
    sys.exit(0 if result.passed else WRONG)


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
    record = runpy.run_path(script).get(variable)
    if not isinstance(record, Kernel):
        raise ValueError(f"{script} has no Kernel named {variable!r}")
    return record


def problem_of(operation: str, seed: int, sizes: dict[str, Any]) -> Problem:
    """The problem of the sizes given, and random ones for those that were not."""
    drawn = trial.random_sizes(seed)
    if sizes["heads"] is not None:
        drawn["kv_heads"] = sizes["heads"]
    elif sizes["kv_heads"] is not None:
        drawn["heads"] = sizes["kv_heads"]
    sizes = {**drawn, **{name: value for name, value in sizes.items() if value is not None}}
    if operation == "softmax":
        return Problem.of_row_sizes(sizes["M"], sizes["N"], sizes["dtype"])
    return Problem.of_sizes(**sizes)


def tile_sizes(Br: int | None, Bc: int | None, constants: tuple[str, ...]) -> dict[str, int]:
    """The constants fixed on the command line."""
    given = {name: value for name, value in (("Br", Br), ("Bc", Bc)) if value is not None}
    for constant in constants:
        name, _, value = constant.partition("=")
        if not value.isdigit():
            raise ValueError(f"constant {constant!r} is not NAME=VALUE with a whole number")
        given[name] = int(value)
    return given


def print_trial(result: trial.Trial, device: str, backend: str, layout: str, seed: int) -> None:
    """A trial as a person reads it."""
    plan = result.plan
    console = Console(highlight=False, soft_wrap=True)
    lines = {
        "kernel": f"{plan.kernel.name}: {plan.kernel.adds}",
        "problem": f"{plan.problem} layout={layout} seed={seed}",
        "device": f"{device} ({backend})",
        "constants": " ".join(f"{name}={value}" for name, value in plan.constants.items()),
    }
    for launch in plan.launches:
        lines[launch.entry] = report.launch_line(launch, result.resources[launch.entry])
    lines["scratch"] = f"{plan.scratch_bytes:,} bytes" if plan.scratch_bytes else ""
    lines["time"] = (
        f"{result.time:.4g} ms (median of {len(result.milliseconds)}), {result.tflops:.3g} TFLOP/s"
    )
    for verdict in result.verdicts:
        lines[verdict.name] = str(verdict).removeprefix(f"{verdict.name}: ")
    width = max(map(len, lines)) + 2
    for name, line in lines.items():
        if line:
            console.print(f"{name:{width}}{line}", markup=False)
    console.print("[bold green]PASS[/]" if result.passed else "[bold red]FAIL[/]")


if __name__ == "__main__":
    main()
