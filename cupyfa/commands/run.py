"""``cupyfa run``."""

import random
import sys
from dataclasses import replace
from typing import Any

import click

from cupyfa.bench import sweeps
from cupyfa.bench.trial import trial
from cupyfa.commands import WRONG, options
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.lookup import record_named
from cupyfa.planner.select import plan, select
from cupyfa.problem import Problem
from cupyfa.report.tables import render, trial_lines, trial_row
from cupyfa.runtime.backend import Backend
from cupyfa.verify.case import Case

_USUAL_D = 64


@click.command()
@click.argument("kernel")
@options.problem_options()
@options.input_options
@click.option(
    "--seed", type=click.IntRange(0), help="Seed of the random sizes and inputs.  [default: random]"
)
@options.reruns_option
@options.backend_options
@options.tile_options
@options.format_option
def run(
    kernel: str,
    backend: Backend,
    seed: int | None,
    reruns: int,
    values: str,
    layout: str,
    constants: dict[str, int],
    form: str,
    **sizes: Any,
) -> None:
    """Run KERNEL on random inputs, check it, and time it.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own.
    Default sizes are random; with M given, N is M and d is 64.
    """
    seed = random.randrange(2**31) if seed is None else seed
    record = None if kernel == "auto" else record_named(kernel)
    operation = record.operation if record else "forward"
    options.refuse_foreign([operation], *sizes)
    case = Case(operation, problem_of(operation, record, seed, sizes), seed, values, layout)
    chosen = select(record or "auto", operation, case.problem, backend.limits)
    planned = plan(chosen, case.problem, backend.limits, **constants)
    try:
        with backend.working_on(None):
            result = trial(backend, planned, case.inputs(backend), reruns=reruns)
    except Exception:
        options.note(f"this was {case}")
        raise
    as_run = case.problem.with_options(precision=planned.problem.precision)
    case = replace(case, problem=as_run)
    if form == "table":
        click.echo(trial_lines(result, case, backend))
    else:
        click.echo(render([trial_row(result, case, backend)], form))
    sys.exit(0 if result.passed else WRONG)


def problem_of(operation: str, record: Kernel | None, seed: int, sizes: dict[str, Any]) -> Problem:
    """The problem of the given sizes, and small random ones that suit the kernel for the others."""
    given, pick = options.given_sizes(sizes), random.Random(seed)
    drawn = {"kv_heads": pick.randint(1, 2), "batch": pick.randint(1, 2)}
    drawn["heads"] = drawn["kv_heads"] * pick.randint(1, 2)
    drawn |= {"M": pick.randint(1, 200), "N": pick.randint(1, 200), "d": pick.randint(1, 128)}
    if "heads" in given or (record and "gqa" not in record.features):
        drawn["kv_heads"] = given.get("heads", drawn["heads"])
    if "kv_heads" in given:
        drawn["heads"] = given["kv_heads"]
    if "M" in given:
        drawn |= {"N": given["M"], "d": _USUAL_D}
    (problem,) = sweeps.problems(operation, {**drawn, **given}, *([record] if record else []))
    return problem
