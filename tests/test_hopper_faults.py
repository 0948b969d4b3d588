"""Every wait, arrival, fence and barrier of the rungs for Hopper is needed: without it, a fault."""

import re
from dataclasses import replace

import pytest
from problems import FORWARD, inputs_of

from cupyfa import Problem, WrongResult, calls, planning, sources
from cupyfa.backends.simulator import Simulator
from cupyfa.backends.simulator.machine import SimulatorFault

ORDERS = re.compile(
    r"(?:if \([^;(]*(?:\(\))?\) )?\b(?:wait|arrive|arrive_expecting|barrier_sync|barrier_arrive"
    r"|publish_to_copies|publish_barriers|begin_products|commit_products|wait_for_products<\d>"
    r"|pass_turn|__syncthreads)\([^;{]*\);"
)
# Headers that order things, each with a rung that needs all that it says.
HEADERS = {"consumers.cuh": "wgmma", "boxes.cuh": "wgmma", "turns.cuh": "wgmma_overlap"}
# Turns are for speed, so nobody need wait for them.
AWAITS_TURN = "barrier_sync(1 + consumers + warpgroup, 2 * warpgroup_size);"


def text_of(file):
    folder = sources.INCLUDE if file in HEADERS else sources.KERNELS / "forward"
    return (folder / file).read_text()


def places():
    """Each statement that orders something: kernel, file, and where it stands there."""
    files = [(kernel, file) for file, kernel in HEADERS.items()]
    files += [(name, f"{name}.cu") for name in FORWARD if name.startswith("wgmma")]
    for kernel, file in files:
        text = text_of(file)
        for found in ORDERS.finditer(text):
            if found[0] != AWAITS_TURN:
                line = text[: found.start()].count("\n") + 1
                yield pytest.param(kernel, file, found.span(), id=f"{file}:{line}-{found[0]}")


def run_without(tmp_path, kernel, file, span, schedules=(None, 1, 2)):
    """Runs a kernel without part of a file: two warpgroups, stages that come again, Q < 0."""
    for name in {*HEADERS, "quantise.cu", f"{kernel}.cu"}:
        text = text_of(name)
        start, end = span if name == file else (0, 0)
        (tmp_path / name).write_text(text[:start] + (";" if end else "") + text[end:])
    broken = replace(FORWARD[kernel], folder=tmp_path)
    sizes = {"heads": 3, "M": 200, "N": 300, "d": 72, "dv": 64, "causal": "top-left"}
    problem = Problem.of_sizes(**sizes, scale=-0.2, dtype="float16")
    limits = replace(Simulator().limits, multiprocessors=2)
    tiles = {"Q_stages": 1} if kernel == "wgmma_persistent" else {}
    plan = planning.plan(broken, problem, limits, Br=128, Bc=64, stages=2, **tiles)
    for schedule in schedules:
        calls.checked(Simulator(schedule=schedule), plan, inputs_of(plan), {})


@pytest.mark.parametrize("kernel, file, span", list(places()))
def test_what_is_removed_is_missed(tmp_path, kernel, file, span):
    with pytest.raises((SimulatorFault, WrongResult)):
        run_without(tmp_path, kernel, file, span)


@pytest.mark.parametrize("kernel", ["wgmma_overlap", "wgmma_persistent"])
def test_results_do_not_depend_on_turns(tmp_path, kernel):
    start = text_of("turns.cuh").index(AWAITS_TURN)
    run_without(tmp_path, kernel, "turns.cuh", (start, start + len(AWAITS_TURN)))
