"""A short run of host_times.py in a separate process."""

import json
from functools import partial

import pytest
from helpers.scripts import printed

host_times = partial(printed, "host_times.py")


def groups(backend, *args):
    """Maps each group to its rows of times, by name; all times must be positive."""
    told = json.loads(host_times("--backend", backend, "--format", "json", *args))
    assert told["environment"]["device"] and told["environment"]["cupyfa"]
    found = {}
    for row in told["rows"]:
        assert 0 < row["best"] <= row["median"], row
        found.setdefault(row["group"], {})[row["what"]] = row
    return found


SIZES = ("-B", 1, "-H", 2, "-M", 24, "-d", 16, "--rounds", 3)


@pytest.mark.slow
def test_each_group_has_times():
    few = ("--calls", 1, "--loops", 3, "--processes", 1)
    found = groups("simulator", *SIZES, *few)
    assert {name: len(rows) for name, rows in found.items()} == {
        "round-trip": 4,
        "calls": 10,
        "first": 2,
        "import": 2,
    }


@pytest.mark.parametrize("form", ["table", "csv", "md"])
def test_one_group_in_other_formats(form):
    told = host_times("--backend", "simulator", *SIZES, "--only", "round-trip", "--format", form)
    assert "cupyfa, all pinned" in told and "import" not in told


@pytest.mark.gpu
def test_each_group_has_times_on_the_gpu(cuda):
    found = groups("cuda", *SIZES, "--calls", 20, "--loops", 5, "--processes", 1)
    assert found["first"].keys() >= {"import cupy", "CUDA context"}
    assert "cupy.empty" in found["calls"]
    ways = found["round-trip"]
    assert ways["the bus alone, both ways at a time"]["%_of_bus"] == 100
    assert all(row["x"] > 0 for what, row in ways.items() if what != "the kernel alone")
