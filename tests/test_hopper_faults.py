"""Every wait, arrival, fence and barrier of the rungs for Hopper is needed: without it, a fault."""

import re
from dataclasses import replace
from itertools import count

import pytest
from problems import inputs_of

from cupyfa import Problem, WrongResult, calls, planning, sources
from cupyfa.backends.simulator import Simulator
from cupyfa.backends.simulator.machine import SimulatorFault
from cupyfa.ladder import LADDER

ORDERS = re.compile(
    r"(?:if \([^;(]*(?:\(\))?\) )?\b(?:wait|arrive|arrive_expecting|barrier_sync|barrier_arrive"
    r"|publish_to_copies|publish_barriers|begin_products|commit_products|wait_for_products<\w+>"
    r"|pass_turn|commit_stores|wait_until_stores_have_read|__syncthreads)\([^;{]*\);"
)
RUNGS = {name: kernel for kernels in LADDER.values() for name, kernel in kernels.items()}
# Tiles with which stages come again; of dS there is but one.
TILES = {
    "wgmma_persistent": {"Br": 128, "Bc": 64, "stages": 2, "Q_stages": 1},
    "wgmma_columns": {"Br": 64, "Bc": 128, "stages": 2, "dS_stages": 1},
    "wgmma_two_pass": {"Br": 64, "Bc": 128, "Bk": 64, "stages": 2},
}
# Headers that order things, each with a rung that needs all that it says.
HEADERS = {
    "consumers.cuh": "wgmma",
    "boxes.cuh": "wgmma",
    "turns.cuh": "wgmma_overlap",
    "gradient_warpgroups.cuh": "wgmma_two_pass",
}
# For d > 128, each with its kernel; longer to compile, so that is done once for all statements.
WIDE = {
    "wgmma_columns_wide.cu": "wgmma_columns",
    "wgmma_two_pass_columns_wide.cu": "wgmma_two_pass",
}
# Turns are for speed, so nobody need wait for them.
AWAITS_TURN = "barrier_sync(1 + consumers + warpgroup, 2 * warpgroup_size);"
# Registers written since the last wait must be announced to a device's products alone.
ANNOUNCES_REGISTERS = "own_keys = parts == 1 ? own.warpgroup : 0;\n    begin_products();"
# Sums that came out as NaN would be computed once more.
MENDED = "recompute_gradients.cuh", ("return __any_sync(full_warp, strange);", "return false;")


def text_of(file):
    return next(sources.KERNELS.glob(f"*/{file}")).read_text()


def files_of(kernel):
    return [f"{launch.entry}.cu" for launch in RUNGS[kernel].launches]


def places():
    """Each statement that orders something: kernel, file, and where it stands there."""
    files = [(kernel, file) for file, kernel in HEADERS.items()]
    files += [
        (name, file)
        for name in RUNGS
        if name.startswith("wgmma")
        for file in files_of(name)
        if file.startswith("wgmma") and file not in WIDE
    ]
    for kernel, file in files:
        text = text_of(file)
        for found in ORDERS.finditer(text):
            announces = text[: found.end()].endswith(ANNOUNCES_REGISTERS)
            if found[0] != AWAITS_TURN and not announces:
                line = text[: found.start()].count("\n") + 1
                yield pytest.param(kernel, file, found.span(), id=f"{file}:{line}-{found[0]}")


def run_without(tmp_path, kernel, file, span, schedules=(None, 1, 2, 7, 9)):
    """Runs a kernel without part of a file: two warpgroups, stages that come again, Q < 0.

    Unless that is about turns, nobody waits for them, so that they make up for nothing.
    """
    with_turns = file == "turns.cuh" or "pass_turn" in text_of(file)[slice(*span)]
    mended, change = MENDED
    (tmp_path / mended).write_text(text_of(mended).replace(*change))
    for name in {*HEADERS, *files_of(kernel)}:
        text = text_of(name) if with_turns else text_of(name).replace(AWAITS_TURN, ";")
        start, end = span if name == file else (0, 0)
        (tmp_path / name).write_text(text[:start] + (";" if end else "") + text[end:])
    broken = replace(RUNGS[kernel], folder=tmp_path)
    sizes = {"heads": 3, "M": 200, "N": 300, "d": 72, "dv": 64, "causal": "top-left"}
    problem = Problem.of_sizes(**sizes, scale=-0.2, dtype="float16")
    limits = replace(Simulator().limits, multiprocessors=2)
    tiles = TILES.get(kernel, {"Br": 128, "Bc": 64, "stages": 2})
    plan = planning.plan(broken, problem, limits, **tiles)
    for schedule in schedules:
        calls.checked(Simulator(schedule=schedule), plan, inputs_of(plan), {})


@pytest.mark.parametrize("kernel, file, span", list(places()))
def test_what_is_removed_is_missed(tmp_path, kernel, file, span):
    with pytest.raises((SimulatorFault, WrongResult)):
        run_without(tmp_path, kernel, file, span)


def run_with_choice(tmp_path, file, choice, schedules=(None, 1, 2, 7, 9)):
    """Runs a kernel for d > 128 without the statement of that number, from 1; 0 leaves out none.

    Which one it is the file is told as it runs, so it is compiled but once.
    """
    kernel = RUNGS[WIDE[file]]
    number = count(1)
    text = ORDERS.sub(lambda found: f"if (left_out != {next(number)}) {found[0]}", text_of(file))
    text = text.replace("struct Shared", "static int left_out;\nstruct Shared", 1)
    text = text.replace("real scale) {\n", "real scale, int choice) {\n  left_out = choice;\n")
    mended, change = MENDED
    (tmp_path / mended).write_text(text_of(mended).replace(*change))
    for name in files_of(kernel.name):
        (tmp_path / name).write_text(text if name == file else text_of(name))
    launches = [
        replace(x, args=f"{x.args} choice", numbers={"choice": lambda p, c: choice})
        if f"{x.entry}.cu" == file
        else x
        for x in kernel.launches
    ]
    broken = replace(kernel, folder=tmp_path, launches=launches)
    sizes = {"heads": 4, "kv_heads": 2, "M": 140, "N": 100, "d": 136, "dv": 24, "causal": True}
    problem = Problem.of_sizes(**sizes, scale=-0.2, dtype="float16")
    plan = planning.plan(broken, problem, replace(Simulator().limits, multiprocessors=2))
    for schedule in schedules:
        calls.checked(Simulator(schedule=schedule), plan, inputs_of(plan), {})


@pytest.mark.parametrize("file", WIDE)
def test_nothing_of_wide_kernels_may_be_left_out(tmp_path, file):
    run_with_choice(tmp_path, file, 0, schedules=(None, 5))
    statements = ORDERS.findall(text_of(file))
    assert len(statements) > 15
    for choice, statement in enumerate(statements, 1):
        try:
            run_with_choice(tmp_path, file, choice)
        except (SimulatorFault, WrongResult):
            continue
        pytest.fail(f"{statement} was not missed, number {choice} of {file}")


@pytest.mark.parametrize("kernel", ["wgmma_overlap", "wgmma_persistent"])
def test_results_do_not_depend_on_turns(tmp_path, kernel):
    start = text_of("turns.cuh").index(AWAITS_TURN)
    run_without(tmp_path, kernel, "turns.cuh", (start, start + len(AWAITS_TURN)))
