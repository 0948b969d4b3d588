"""Short runs of soak.py in separate processes."""

import os
from functools import partial

import pytest
from helpers.scripts import printed

soak = partial(printed, "soak.py")


def test_calls_from_many_threads_are_right_without_leaks():
    said = soak("--backend", "simulator", "--calls", 200)
    assert "from 8 threads" in said and "\n200 calls, " in said


def test_calls_are_right_after_ctrl_c():
    faults = ("--faults", "--only", "interrupted", "--interrupts", 22)
    assert "all are right after" in soak("--backend", "simulator", *faults)


@pytest.mark.gpu
def test_calls_from_many_threads_on_the_gpu(cuda):
    shared = ["--shared"] if "PYTEST_XDIST_WORKER" in os.environ else []
    assert "nothing has leaked" in soak("--backend", "cuda", "--calls", 3000, *shared)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["out_of_memory", "trapped", "killed", "interrupted"])
def test_faults_on_the_gpu(cuda, fault):
    assert soak("--backend", "cuda", "--faults", "--only", fault, "--interrupts", 100)
