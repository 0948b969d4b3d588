"""``cupyfa run``."""

import sys
from dataclasses import replace
from typing import Any

import click

from cupyfa.errors import CompilerNotFound
from cupyfa.lab.bench import sweeps
from cupyfa.lab.bench.trial import STEPS as TRIAL_STEPS, trial
from cupyfa.lab.commands import WRONG, command_options
from cupyfa.lab.commands.watching import timeout_option, watched
from cupyfa.lab.report.tables import render, trial_lines, trial_row
from cupyfa.lab.verify import sampling, transforms
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.tokens import written
from cupyfa.ladder.lookup import record_named
from cupyfa.planner.choose_kernel import passed_over, plan, select
from cupyfa.problem.wrt import names_of
from cupyfa.runtime.backend import Backend

_STEPS = TRIAL_STEPS + 1  # steps of the progress bar, one of them for drawing the inputs


@click.command()
@command_options.kernel_argument
@command_options.problem_options()
@command_options.input_options
@command_options.case_options
@command_options.tile_options
@command_options.reruns_option
@timeout_option
@command_options.backend_options
@command_options.format_option
def run(
    kernel: str,
    backend: Backend,
    seed: int,
    reruns: int,
    timeout: float | None,
    values: str,
    layout: str,
    padded: str,
    descales: str,
    tokens: str,
    tiles: dict[str, int],
    form: str,
    **sizes: Any,
) -> None:
    """Run KERNEL on random inputs, check it, and time it.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own. In
    large problems only excerpts are checked: 64 rows of each of several heads.
    """
    records = [] if kernel == "auto" else [record_named(kernel)]
    operation = records[0].operation if records else "forward"
    command_options.refuse_foreign([operation], *sizes)
    small = backend.name == "simulator"
    (problem,) = sweeps.problems(operation, sizes, *records, small=small)
    if padded:
        problem = transforms.pad(problem, names_of(padded))
    if descales:
        problem = transforms.add_descales(problem, names_of(descales))
    case = Case(operation, problem, seed, values, layout, tokens)
    chosen = select(records[0] if records else "auto", operation, problem, backend.limits)
    planned = plan(chosen, problem, backend.limits, **tiles)
    try:
        with (
            command_options.progress_bar(chosen.name) as progress,
            backend.working_on(None),
            watched(backend, timeout, ends=True) as watch,
        ):
            progress(0, _STEPS, "drawing inputs")
            inputs = written(backend, case, case.inputs(backend, chosen))
            result = trial(
                backend,
                planned,
                inputs,
                reruns=reruns,
                watch=watch,
                excerpts=sampling.excerpts(problem, seed, operation),
                progress=lambda done, total, what: progress(done + 1, _STEPS, what),
            )
    except CompilerNotFound:  # does not depend on the problem
        raise
    except Exception:
        command_options.note(f"the problem was {case}")
        raise
    if result.is_empty:
        command_options.note("no query attends to any key, so only empty rows were checked")
    as_run = problem.with_options(precision=planned.problem.precision)
    case = replace(case, problem=as_run)
    if form == "table":
        found = passed_over(chosen, problem, backend.limits) if kernel == "auto" else None
        click.echo(trial_lines(result, case, backend, found))
    else:
        click.echo(render([trial_row(result, case, backend)], form))
    sys.exit(0 if result.passed else WRONG)
