"""``cupyfa run``."""

from __future__ import annotations

import random
import sys
from typing import Any

import click

from cupyfa.bench import trial
from cupyfa.commands import WRONG
from cupyfa.commands.options import (
    backend_option,
    engine_named,
    format_option,
    input_options,
    problem_of,
    problem_options,
    reruns_option,
    schedule_option,
    tile_options,
    tile_sizes,
)
from cupyfa.ladder import lookup as records
from cupyfa.planner import select as planning
from cupyfa.report import tables as report
from cupyfa.verify.case import Case


@click.command()
@click.argument("kernel")
@problem_options
@input_options
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Of the random sizes and inputs.  [default: a new one]",
)
@reruns_option
@backend_option
@schedule_option
@tile_options
@format_option
def run(
    kernel: str,
    seed: int | None,
    reruns: int,
    backend: str,
    schedule: int | None,
    values: str,
    layout: str,
    form: str,
    Br: int | None,
    Bc: int | None,
    constants: tuple[str, ...],
    **sizes: Any,
) -> None:
    """Run KERNEL on random inputs, check it, and time it.

    KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record of your own. Sizes
    left out are drawn at random by the seed.
    """
    seed = random.randrange(2**31) if seed is None else seed
    given = tile_sizes(Br, Bc, constants)
    record = None if kernel == "auto" else records.record_named(kernel)
    operation = record.operation if record else "forward"
    case = Case(operation, problem_of(operation, record, seed, sizes), seed, values, layout)
    engine = engine_named(backend, schedule)
    chosen = planning.select(record or "auto", operation, case.problem, engine.limits)
    plan = planning.plan(chosen, case.problem, engine.limits, **given)
    try:
        with engine.working_on(None):
            result = trial.trial(engine, plan, case.inputs(engine), reruns=reruns)
    except Exception:
        click.echo(f"note: this was {case}", err=True)
        raise
    if form == "table":
        click.echo(report.trial_lines(result, case, engine))
    else:
        click.echo(report.render([report.trial_row(result, case, engine)], form))
    sys.exit(0 if result.passed else WRONG)
