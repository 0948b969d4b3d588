"""New tokens of a paged cache: written and rotated before attention, and checked."""

import numpy as np
import pytest
from helpers import cli

from cupyfa import Problem, Simulator
from cupyfa.arrays import kv_cache
from cupyfa.errors import WrongResult
from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.case import TOKENS, WRITTEN, Case
from cupyfa.lab.verify.command_line import words_of_problem
from cupyfa.lab.verify.tasks import Task
from cupyfa.lab.verify.tokens import written
from cupyfa.lab.verify.workers import Here
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel

SIZES = {"batch": 3, "heads": 4, "kv_heads": 2, "M": 3, "N": 40, "d": 12, "dv": 6}
SIMULATOR = Simulator()


def case_of(tokens, dtype="float32", **more):
    p = Problem.of_sizes(**SIZES, dtype=dtype, causal="bottom-right", page_size=16)
    return Case("forward", p, 5, tokens=tokens, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_kernel_reads_what_was_written(tokens, dtype):
    (outcome,) = Here(SIMULATOR).run(Task(case_of(tokens, dtype), ("fa2",)))
    assert outcome.kind == "right", outcome.message


def test_what_is_written_are_the_keys_that_were_there():
    case = case_of("appended")
    inputs = case.inputs()
    after = written(SIMULATOR, case, inputs)
    for name in "QKV":
        np.testing.assert_array_equal(after[name], inputs[name])


@pytest.mark.parametrize("tokens", [x for x in TOKENS if x not in ("cached", "appended")])
def test_queries_are_turned_and_new_keys_alone(tokens):
    case = case_of(tokens)
    inputs = case.inputs()
    after = written(SIMULATOR, case, inputs)
    assert (after["Q"] != inputs["Q"]).any()
    changed = np.nan_to_num(after["K"]) != np.nan_to_num(inputs["K"])
    rows = changed.any(axis=(1, 3)).sum()
    assert 0 < rows <= 3 * 3 if tokens in WRITTEN else rows == 0
    np.testing.assert_array_equal(after["V"], inputs["V"])


def test_a_row_that_is_not_a_new_one_must_stay(monkeypatch):
    class Careless(kv_cache.KVCache):
        def __init__(self, k, *rest, **more):
            super().__init__(k, *rest, **more)
            self.spoiled = k

    def step(backend, q, cache, *rest, **more):
        found = real(backend, q, cache, *rest, **more)
        free = np.isnan(cache.spoiled).all(axis=(1, 3))
        page, row = np.argwhere(~free)[0]
        cache.spoiled[page, :, row] += 1
        return found

    real = kv_cache.step
    monkeypatch.setattr(kv_cache, "KVCache", Careless)
    monkeypatch.setattr(kv_cache, "step", step)
    case = case_of("turned")
    with pytest.raises(WrongResult, match="changed row .* of page .* of K"):
        written(SIMULATOR, case, case.inputs())


def test_tokens_without_pages_are_refused():
    case = Case("forward", Problem.of_sizes(M=3, d=8), tokens="appended")
    with pytest.raises(ValueError, match="requires page_size"):
        written(SIMULATOR, case, case.inputs())


def test_the_command_of_a_case_repeats_it():
    case = case_of("rotated", layout="bshd")
    options = case.options()
    assert "rotated" in options and "--page-size=16" in options
    done = cli.cli("run", "fa2", *options, "--backend", "simulator")
    assert "PASS" in done.output and "tokens=rotated" in done.output


def test_padded_lengths_and_descales_have_options():
    p = transforms.pad(Problem.of_sizes(**SIZES, dtype="float16"), ["q", "k"])
    assert [x.name for x in transforms.resize(p, batch=2).operands] == ["lengths_q", "lengths_k"]
    assert "--padded=q,k" in words_of_problem(p)
    p = transforms.add_descales(Problem.of_sizes(**SIZES, dtype="float8_e4m3fn"), "qv")
    assert [x.shape for x in transforms.resize(p, batch=2).operands] == [(2, 2), (2, 2)]
    assert "--descales=q,v" in words_of_problem(p)
    done = cli.cli(
        *("run", "fa2", "-B", "3", "-M", "9", "-N", "21", "-d", "8", "--padded=q,k"),
        *("--backend", "simulator"),
    )
    assert "PASS" in done.output and "lengths_q=i32[3]" in done.output
    for wrong in (["--padded", "q,v"], ["--padded=k", "--page-size=16"], ["--descales=x"]):
        cli.cli("run", "fa2", "-M", "9", *wrong, "--backend", "simulator", code=2)


@pytest.mark.parametrize("multiprocessors, splits", [(2, 1), (44, 38)])
def test_plans_go_by_the_multiprocessors_of_the_simulator(multiprocessors, splits):
    limits = Simulator(multiprocessors=multiprocessors).limits
    p = Problem.of_sizes(M=1, N=38 * 64, d=128, dtype="float16")
    tile = {"Br": 64, "Bc": 64, "Wr": 16, "stages": 2, "blocks_per_sm": 1}
    plan = choose_kernel.plan(record_named("mma_split_kv"), p, limits, **tile)
    assert plan.launches[0].numbers["num_splits"] == pytest.approx(splits, abs=1)
