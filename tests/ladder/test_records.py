"""Kernel records: lookup by name, text form, pickling, and valid constants and fields."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from helpers import own_kernel

import cupyfa
from cupyfa import Kernel, Launch, Limits, Problem
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import ROUNDINGS
from cupyfa.numerics import reference
from cupyfa.planner import choose_kernel as planning, source as sources

H100 = Limits("an H100", shared_bytes=232448, arch="90")
RUNGS = cupyfa.kernels()
FA2 = LADDER["forward"]["fa2"]


@pytest.mark.parametrize("kernel", RUNGS, ids=lambda kernel: kernel.name)
def test_a_rung_is_found_by_name_and_shown_in_one_line(kernel):
    assert cupyfa.kernel(kernel.name) is kernel
    assert "\n" not in repr(kernel) and len(repr(kernel)) <= 100
    for fact in (kernel.name, kernel.operation, kernel.arch, *kernel.dtypes):
        assert fact in repr(kernel)
    for launch in kernel.launches:
        assert "\n" not in repr(launch) and " at 0x" not in repr(launch)
        if isinstance(launch, cupyfa.Launch):
            assert repr(launch) == f"<launch {launch.entry}({launch.args})>"


@pytest.mark.parametrize("kernel", RUNGS, ids=lambda kernel: kernel.name)
def test_rungs_and_their_launches_are_pickled_by_name(kernel):
    assert pickle.loads(pickle.dumps(kernel)) is kernel
    for one in kernel.launches:
        again = pickle.loads(pickle.dumps(one))
        assert again is one or again == one  # launches of matrix products are pickled by value


def test_a_plan_is_pickled():
    plan = cupyfa.plan(kernel="mma_split_kv", M=1, N=4096, d=64, dtype="float16", limits=H100)
    again = pickle.loads(pickle.dumps(plan))
    assert again.kernel is plan.kernel
    assert [x.launch for x in again.launches] == [x.launch for x in plan.launches]
    assert [x.grid for x in again.launches] == [x.grid for x in plan.launches]


def test_a_record_of_a_script_is_found_by_another_process(tmp_path):
    script = own_kernel.write(tmp_path)
    mine = cupyfa.kernel(f"{script}:mine")
    pickled = pickle.dumps([mine, mine.launches[0]])
    here, launch = pickle.loads(pickled)
    assert here.name == mine.name and here.launches[0] is launch
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)[0])"
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True)
    assert done.stdout.decode().strip() == repr(mine), done.stderr.decode()


def test_records_that_cannot_be_pickled_have_a_remedy():
    for one in (replace(FA2, name="mine"), replace(FA2.launches[0], entry="mine")):
        with pytest.raises(pickle.PicklingError, match=r"mine.*cupyfa.kernel\('script.py:name'\)"):
            pickle.dumps(one)


def test_records_are_copied_as_they_are():
    mine = replace(FA2, name="mine")
    assert copy.copy(mine) is copy.deepcopy(mine) is mine
    assert copy.copy(mine.launches[0]) is copy.deepcopy(mine.launches[0])


def own(value):
    launch = Launch(
        "own",
        args="Q",
        grid=lambda p, c: 1,
        threads=lambda p, c: 32,
        constants={"factor": lambda p, c: value},
    )
    return Kernel(name="own", adds="", launches=(launch,))


def declared(value, tmp_path):
    (tmp_path / "own.cu").write_text('extern "C" __global__ void own() { factor; }')
    kernel = replace(own(value), folder=tmp_path)
    (launch,) = planning.plan(kernel, Problem.of_sizes(M=1, d=1), H100).launches
    (line,) = (x for x in sources.text(launch).splitlines() if " factor = " in x)
    return line


@pytest.mark.parametrize(
    "value, line",
    [
        (3, "constexpr int factor = 3;"),
        (np.int64(-(2**31)), "constexpr int factor = -2147483648;"),
        (np.bool_(True), "constexpr bool factor = true;"),
        (0.5, "constexpr float factor = 0x1.0000000000000p-1f;"),
        (np.float64(-3), "constexpr float factor = -0x1.8000000000000p+1f;"),
        (np.float32(2.5), "constexpr float factor = 0x1.4000000000000p+1f;"),
        (0.1, "constexpr float factor = 0x1.99999a0000000p-4f;"),
    ],
)
def test_constants_are_declared_by_their_type(tmp_path, value, line):
    assert declared(value, tmp_path) == line


FRACTIONS = (Fraction(5, 2), Decimal("2.5"), np.array(2.5))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e39, 2**31, *FRACTIONS, "1"])
def test_other_constants_are_refused(value):
    with pytest.raises(ValueError, match=r"the record's constant factor of own is .*; it must"):
        planning.plan(own(value), Problem.of_sizes(M=1, d=1), H100)


@pytest.mark.parametrize("value", [2.5, np.float32(2.5), *FRACTIONS, np.bool_(True)])
def test_fractions_are_no_numbers_tiles_or_sizes(value):
    number = Launch(
        "own", "Q k", lambda p, c: 1, lambda p, c: 32, numbers={"k": lambda p, c: value}
    )
    plain = own(1).launches[0]
    sized = (replace(plain, **{x: lambda p, c: value}) for x in ("grid", "threads", "shared"))
    for launch in (number, *sized):
        with pytest.raises(ValueError, match="must return .*whole number"):
            kernel = Kernel(name="own", adds="", launches=(launch,))
            planning.plan(kernel, Problem.of_sizes(M=1, d=1), H100)
    with pytest.raises(ValueError, match="tiles"):
        Kernel(name="own", adds="", launches=(plain,), tiles=({"Br": value},))


def test_a_record_may_round_to_a_precision_of_the_reference():
    assert set(ROUNDINGS) == set(reference.PRECISIONS)
