"""``cupyfa mutate``."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from cupyfa.lab.commands import INTERRUPTED, UNSUPPORTED, WRONG, command_options
from cupyfa.lab.commands.check import MOST_JOBS
from cupyfa.lab.commands.signals import take_time
from cupyfa.lab.mutation.mutants import Mutant, mutants_of, sample
from cupyfa.lab.mutation.trials import (
    FOUND,
    MISSED,
    OUT_OF_TIME,
    Trial,
    compiled_mutants,
    each_trial,
    mutant_row,
    summary,
)
from cupyfa.lab.report.tables import mutant_list, render
from cupyfa.lab.verify.checker import MOST_SAMPLES
from cupyfa.ladder.lookup import record_named
from cupyfa.runtime.backend import Backend


# A mutant may stop a GPU, and only the simulator reports races and missing barriers.
@click.command(context_settings={"default_map": {"backend": "simulator"}})
@click.argument("kernel", type=command_options.KernelName(()))
@click.option(
    "--sample",
    "count",
    type=command_options.Integer(1),
    default=20,
    help="Number of mutants to draw; the kinds of faults take turns.",
)
@click.option(
    "--seed", type=command_options.Integer(0), default=0, help="Seed of the drawn mutants."
)
@click.option(
    "--number",
    "numbers",
    type=command_options.Integer(1),
    multiple=True,
    help="Try the mutant with this number, instead of a sample; may be repeated.",
)
@click.option(
    "--cases",
    type=command_options.Integer(1, MOST_SAMPLES),
    help="Number of cases to check a mutant with, as --samples of `cupyfa check`.",
)
@click.option("--dry-run", is_flag=True, help="List the mutants, and run nothing.")
@click.option(
    "--budget",
    type=command_options.SECONDS,
    default=300.0,
    help="Seconds to spend on the cases of a mutant.",
)
@command_options.backend_options
@command_options.format_option
def mutate(
    kernel: str,
    count: int,
    seed: int,
    numbers: Sequence[int],
    dry_run: bool,
    budget: float,
    backend: Backend,
    form: str,
    **how: Any,
) -> None:
    """Put faults into KERNEL and see whether its check finds them.

    KERNEL is a name from `cupyfa list`, or `script.py:name` for a record of your own. Each mutant
    is the kernel with one small fault: a barrier or a condition left out, a bound off by one, a
    wrong index, a factor left out. It is checked as by `cupyfa check`, until a case fails, in the
    simulator unless --backend names another. A mutant has the same number as long as the files do
    not change.

    \b
    found             a case failed
    missed            all results are right, although the machine code has changed
    equivalent        the mutant computes the same
    not compiled      no program of the kernel contains the changed code
    does not compile  the compiler finds the fault
    out of time       no case has failed within --budget

    The exit code is 1 if a mutant was missed, and 3 if there was time to judge none.
    """
    jobs = min(len(os.sched_getaffinity(0)), MOST_JOBS * backend.devices)
    every = mutants_of(record_named(kernel))
    if numbers:
        chosen = _numbered(every, numbers)
    else:
        with command_options.progress_bar("compiling"):
            compiled = compiled_mutants(kernel, every, backend=backend, jobs=jobs)
        chosen = sample(compiled, count, seed)
        command_options.note(
            f"{len(chosen):,} of {len(compiled):,} mutants of {kernel} were drawn; "
            f"{len(every) - len(compiled):,} more are in functions that it does not use"
        )
    if dry_run:
        _print([mutant_row(x) for x in chosen], form)
        return
    found: list[Trial] = []
    ended: BaseException | None = None
    take_time()  # so that trials can still be printed after a signal
    with command_options.progress_bar("mutants") as progress:
        how |= {"backend": backend, "jobs": jobs, "budget": budget, "progress": progress}
        try:
            found.extend(each_trial(kernel, chosen, **how))
        except (KeyboardInterrupt, SystemExit) as error:
            ended = error
    found.sort(key=lambda x: x.mutant.number)
    _print([x.row() for x in found], form)
    if form == "table":
        click.echo(summary(found))
    else:
        command_options.note(summary(found))
    if ended:
        command_options.note("interrupted")
        sys.exit(ended.code if isinstance(ended, SystemExit) else INTERRUPTED)
    verdicts = {x.verdict for x in found}
    if MISSED in verdicts:
        sys.exit(WRONG)
    sys.exit(UNSUPPORTED if OUT_OF_TIME in verdicts and FOUND not in verdicts else 0)


def _numbered(every: Sequence[Mutant], numbers: Sequence[int]) -> list[Mutant]:
    for number in numbers:
        if number > len(every):
            raise click.UsageError(
                f"--number is {number}, but there are {len(every):,} mutants; use 1 to {len(every)}"
            )
    return [every[number - 1] for number in sorted(set(numbers))]


def _print(rows: Sequence[dict[str, Any]], form: str) -> None:
    if rows:
        click.echo(mutant_list(rows) if form == "table" else render(rows, form))
