"""How much a reader has to read: a kernel with its headers, and the step from rung to rung."""

import difflib
import re
from itertools import chain, product

import pytest
from helpers.cli import table

import cupyfa
from cupyfa import Launch
from cupyfa.ladder import LADDER
from cupyfa.planner import includes
from cupyfa.planner.source import INCLUDE, KERNELS

# The headers that every kernel shares count once for all of them, and have a limit of their own.
SHARED = ("attention/score.cuh", "attention/extent.cuh")
SHARED_LINES = 400


def own_files(rung):
    """The files that only this rung has: folder and name."""
    entries = [x.entry for x in rung.launches if isinstance(x, Launch)]
    names = dict.fromkeys(x for x in entries if x.startswith(rung.name))
    return [f"{rung.operation}/{name}" for name in names]


def steps():
    """Files of a rung, each after that of the same part of a rung that it is declared after."""
    for rung in cupyfa.kernels():
        for before in (LADDER[rung.operation][name] for name in rung.after):
            for old, new in product(own_files(before), own_files(rung)):
                same_part = re.findall(r"[^_/]+$", old) == re.findall(r"[^_/]+$", new)
                if same_part or len(own_files(before)) == len(own_files(rung)) == 1:
                    yield old, new


# Steps of the ladder: the second file is read as the first one and a change.
STEPS = tuple(steps())
# What holds the step back, at most five.
LONGER_STEPS = {}
# What does not hold yet.
TODO = {name: reason for name, reason, _ in table("ladder/todo.txt")}


def path_of(name):
    return KERNELS / f"{name}.cu"


def headers(name):
    """The headers that a kernel includes, directly or not, without those all kernels share."""
    reached = includes.reached(path_of(name).read_text(), [INCLUDE, KERNELS])
    return {
        path: content.decode()
        for path, content in reached.items()
        if not path.as_posix().endswith(SHARED)
    }


def lines(text):
    return text.count("\n")


def limit(name):
    """The most lines that a reader of one kernel is asked to read."""
    folder, kernel = name.split("/")
    is_gradient = folder == "backward"
    if kernel.startswith("wgmma") or kernel == "finish_dQ":
        return 1100 if is_gradient else 900
    if kernel.startswith("mma"):
        return 900 if is_gradient else 600
    return 264 if kernel == "fa2" else 600


def marked(names):
    """Parameters, of which those that do not hold yet are expected to fail."""
    for name in names:
        reason = TODO.get(name if isinstance(name, str) else " after ".join(reversed(name)))
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        values = name if isinstance(name, tuple) else (name,)
        yield pytest.param(*values, marks=marks, id="-".join(values))


NAMES = sorted(f"{path.parent.name}/{path.stem}" for path in KERNELS.glob("*/*.cu"))


@pytest.mark.parametrize("name", marked(NAMES))
def test_lines_to_read_for_one_kernel(name):
    files = [path_of(name).read_text(), *headers(name).values()]
    assert sum(map(lines, files)) <= limit(name)


@pytest.mark.parametrize("before, name", marked(STEPS))
def test_a_step_of_the_ladder_is_short(before, name):
    old, new = (path_of(x).read_text().splitlines() for x in (before, name))
    changes = [x[0] for x in difflib.unified_diff(old, new, n=0) if x[:3] not in ("---", "+++")]
    first_used = [text for path, text in headers(name).items() if path not in headers(before)]
    changed, most = max(changes.count("+"), changes.count("-")), LONGER_STEPS.get(name, 100)
    assert changed <= most, f"{changed} changed lines of {name}.cu"
    assert sum(map(lines, first_used)) <= 80, "lines of headers that were not used before"


def test_the_headers_that_all_kernels_share():
    found = [INCLUDE / name for name in SHARED if (INCLUDE / name).exists()]
    assert sum(lines(path.read_text()) for path in found) <= SHARED_LINES


def test_steps_are_of_kernels_that_exist_and_few_are_longer():
    assert set(chain(*STEPS)) <= set(NAMES)
    assert len(LONGER_STEPS) <= 5 and set(LONGER_STEPS) <= {name for _, name in STEPS}
