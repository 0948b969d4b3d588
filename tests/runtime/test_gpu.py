"""Properties that need a GPU: large sizes, memory, several processes."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.device_code import code
from helpers.problems import FORWARD, check_case, name, planned

import cupyfa
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics import tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard

pytestmark = pytest.mark.gpu
KERNELS = pytest.mark.parametrize("kernel", FORWARD.values(), ids=name)


@KERNELS
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_heads_than_a_grid_axis_holds(cuda, kernel, axis):
    check_case(kernel, cuda, {"M": 3, "N": 5, "d": 4, axis: 70_000})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_offsets_beyond_two_to_the_31(cuda, much_memory, dtype):
    import cupy

    heads, N, d = 33, 2**20, 64
    assert heads * N * d > 2**31
    rng = cupy.random.default_rng(0)
    q = rng.standard_normal((heads, 2, d), dtype=np.float32).astype(dtype)
    k, v = (cupy.empty((heads, N, d), dtype) for _ in range(2))
    for array in (k, v):
        for head in range(heads):
            array[head] = rng.standard_normal((N, d), dtype=np.float32)
    last = [x[-1:] for x in (q, k, v)]
    inputs = dict(zip("QKV", (x.get()[None] for x in last)))
    problem = cupyfa.Problem.of(*inputs.values())

    @cache
    def expected(p, rounding):
        return OPERATIONS["forward"].reference(inputs, p, [rounding])[rounding]

    for kernel in FORWARD.values():
        if dtype != next(x for x in ("float16", "float32", "float64") if x in kernel.dtypes):
            continue
        all_heads = cupyfa.attention(q, k, v, kernel=kernel)
        o, lse = cupyfa.attention(*last, kernel=kernel, return_lse=True)
        results = {"O": o.get()[None], "lse": lse.get()[None]}
        plan = planning.plan(kernel, problem, cuda.limits)
        right = expected(plan.problem, plan.rounding)
        tolerance.require(tolerance.compare(results, right), kernel.name)
        # cuBLAS and kernels that split keys sum in an order that depends on the number of heads.
        splits = "split_kv" in kernel.name or kernel.name in ("wgmma_slices", "wgmma_latent")
        by_batch = splits or kernel.name.startswith("baseline")
        np.testing.assert_allclose(
            *(x.get() for x in (all_heads[-1:], o)),
            rtol=0,
            atol=1e-4 if by_batch else 0,
            err_msg=kernel.name,
        )


CALL = (
    "import numpy as np, cupyfa; x = np.ones((2, 40, 24), 'f4');"
    "print(cupyfa.attention(x, x, x, kernel='fa2', backend='cuda', check=True).sum())"
)


@pytest.fixture
def process(cuda, tmp_path):
    """Returns a function that starts a process with one call and an empty compile cache."""
    where = {"PYTHONPATH": str(Path(cupyfa.__file__).parents[1]), "CUPYFA_CACHE_DIR": str(tmp_path)}

    def start():
        command = [sys.executable, "-c", CALL]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | where)

    return start


def test_processes_may_compile_the_same_kernel_at_once(process):
    started = [process() for _ in range(4)]
    outputs = [each.communicate()[0] for each in started]
    assert [each.returncode for each in started] == [0] * 4
    assert len(set(outputs)) == 1


def test_a_second_process_uses_the_kernel_on_disk(process, tmp_path):
    written = []
    for _ in range(2):
        run = process()
        run.communicate()
        assert run.returncode == 0
        written.append({path: path.stat().st_ino for path in tmp_path.rglob("*.cubin")})
    assert written[0] and written[0] == written[1]


def test_named_barriers_order_the_warps_that_meet(cuda):
    import cupy

    from cupyfa.planner.source import INCLUDE

    text = code("named_barriers_order_the_warps_that_meet")
    kernel = cupy.RawModule(code=text, options=(f"-I{INCLUDE}",)).get_function("halves")
    out = cupy.zeros(128, np.int32)
    kernel((1,), (128,), (out,))
    assert (out.get() == np.repeat([10, 20], 64)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_scale_of_zero_does_not_hide_nan_from_the_baseline(cuda, dtype):
    plan = planned(FORWARD["baseline"], cuda, {"M": 5, "N": 7, "d": 4, "scale": 0.0}, dtype)
    for values in ("normal", "huge", "nan", "inf"):
        case = Case("forward", plan.problem, values=values)
        guard.checked(cuda, plan, case.inputs(), {})
