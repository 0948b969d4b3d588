"""A default check finds each fault of faults.txt, injected into kernels of all families."""

import re
from pathlib import Path

import pytest
from helpers import broken_kernels

import cupyfa
from cupyfa.lab.verify import checker as checking
from cupyfa.lab.verify.workers import Here
from cupyfa.runtime.choose_backend import backend_named

FAULTS = broken_kernels.faults()
SIMULATOR = backend_named("simulator")
PLACE = re.compile(r"(/[^\s():]+):(\d+)")


def found(kernel, **how):
    """Runs a check until its first failure, with default settings unless ``how`` changes them."""

    def progress(done, total, what):
        if what == "1 failed":
            raise KeyboardInterrupt

    try:
        checked = cupyfa.check(kernel, backend="simulator", progress=progress, **how)
    except checking.Interrupted as enough:
        checked = enough.checked
    assert checked.failures, "no failure"
    return checked.failures[0]


def outcomes(kernel, first=0):
    """Yields the outcomes of a default check, beginning with the sample of index ``first``."""
    tasks = checking.tasks_of(kernel, backend=SIMULATOR)
    for task in (tasks[first], *tasks[:first], *tasks[first + 1 :]):
        yield from Here(SIMULATOR).run(task)


def shows(fault, outcome):
    """Returns whether an outcome matches the pattern of a fault and names its source line."""
    message = f"{outcome.kind}: {outcome.message}"
    if not outcome.failed or not re.search(fault.shows, message, re.S):
        return False
    return not fault.line or any(fault.line in line for line in lines_named(message))


def lines_named(message):
    """Returns the source lines that a message names."""
    for file, number in PLACE.findall(message):
        yield Path(file).read_text().splitlines()[int(number) - 1]


@pytest.mark.slow
@pytest.mark.sampled(10, "kernel")
@pytest.mark.parametrize("kernel, fault", [(x.kernel, x) for x in FAULTS], ids=str)
def test_a_fault_is_found(tmp_path, monkeypatch, kernel, fault):
    """Tests one fault per kernel and a sample of the other faults, or every fault with --all."""
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "")
    if fault.is_of_calls:
        broken = broken_kernels.put_in_place(tmp_path, fault, monkeypatch)
    else:
        broken = broken_kernels.broken(tmp_path, fault)
    other = []
    for outcome in outcomes(broken, fault.sample):
        if shows(fault, outcome):
            return
        if outcome.failed:
            other.append(outcome.message)
    pytest.fail(f"no sample shows it, but {other}")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [x for x in FAULTS if " is released " in x.what], ids=str)
def test_a_ring_that_wraps_needs_few_samples(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(checking, "_SHRINKING", 0.0)
    found(broken_kernels.broken(tmp_path, fault), samples=16, seed=1)


@pytest.mark.slow
def test_a_fault_of_gradients_of_arrays_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_SHRINKING", 0.0)
    right, wrong = "extent.dropped(dP, row, key) - delta", "extent.dropped(dP, row, key)"
    file = "backward/steps/expression_gradients.cu"
    fault = broken_kernels.Fault("two_pass", file, "delta is left out", right, wrong, "", None)
    how = {"bias": "1hmn", "sink": "h", "wrt": "q,bias,sink", "samples": 2}
    first = found(broken_kernels.broken(tmp_path, fault), **how)
    assert first.outcome.worst.name == "d_bias" and "--wrt=bias,sink" in first.command


@pytest.mark.slow
def test_a_scale_that_all_gradients_share_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_SHRINKING", 0.0)
    kernel = broken_kernels.broken(tmp_path, broken_kernels.SHARED_SCALE)
    first = found(kernel, bias="bhmn", wrt="bias", samples=16)
    assert first.outcome.worst.name == "d_bias"


@pytest.mark.slow
def test_a_fault_of_the_gradient_of_lse_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_SHRINKING", 0.0)
    right, wrong = "mods.dlse_.read(batch, head, row)", "mods.dlse_.read(batch, head, 0)"
    file = "backward/parts/gradient_of_lse.cuh"
    fault = broken_kernels.Fault("columns", file, "all rows take the first", right, wrong, "", None)
    first = found(broken_kernels.broken(tmp_path, fault), dlse=True, samples=2)
    assert first.outcome.kind == "wrong result" and "--dlse" in first.command


@pytest.mark.slow
def test_a_fault_of_gradients_of_sequences_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_SHRINKING", 0.0)
    right = "found.count = max(0, min(found.count, mods.seqused_k_.data[sequence]));"
    wrong, file = "found.count = max(0, found.count);", "attention/batch.cuh"
    fault = broken_kernels.Fault("two_pass", file, "unused rows count", right, wrong, "", None)
    how = {"lengths": "40,20/50", "samples": 2}
    first = found(broken_kernels.broken(tmp_path, fault), **how)
    assert first.outcome.kind == "wrong result" and "--lengths=40/40,20/50" in first.command


def test_there_are_faults_of_every_family(tmp_path):
    for i, fault in enumerate(FAULTS):  # fails if a kernel no longer contains a fault's code
        folder = tmp_path / str(i)
        folder.mkdir()
        if not fault.is_of_calls:
            broken_kernels.broken(folder, fault)
    assert len(FAULTS) >= 60
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS)
    kernels = {fault.kernel for fault in FAULTS}
    assert {kernel.name for kernel in cupyfa.kernels()} == kernels
