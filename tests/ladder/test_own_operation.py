"""Kernels of a user's own operation: arrays, floats, outputs and a reference."""

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import sloped as scripts
from helpers.cli import cli
from helpers.problems import qkv

import cupyfa
from cupyfa import Input, Launch, Limits
from cupyfa.lab.verify import failures, sampling
from cupyfa.lab.verify.case import VALUES
from cupyfa.lab.verify.sampling import Judge
from cupyfa.lab.verify.tasks import Task, perform
from cupyfa.numerics import reference, tolerance
from cupyfa.planner import choose_kernel
from cupyfa.planner.evaluate import source_path
from cupyfa.planner.source import KERNELS, text
from cupyfa.runtime.simulator import Simulator

SLOPED, SCRIPT = scripts.sloped, Path(scripts.__file__)
FULL = SCRIPT.with_suffix(".cu").read_text()


def arrays(M=20, N=33, dtype="float32"):
    rng = np.random.default_rng(0)
    own = {"slopes": rng.random(2).astype("f4"), "is_shown": rng.random((2, N)) < 0.8}
    return *qkv(M, N, dtype, heads=2, d=8), own


def right(q, k, v, own, cap=30.0):
    """Computes the result with the record's reference."""
    p = cupyfa.Problem.of(q, k, v)
    c = type("constants", (), {"cap": cap})
    return scripts.attention({"Q": q, "K": k, "V": v, **own}, p, c)


def test_a_call_takes_arrays_and_floats_and_gives_outputs(backend):
    q, k, v, own = arrays()
    o, lse, top = cupyfa.attention(
        *(q, k, v),
        kernel=SLOPED.bind(**own, cap=2.0, returns=("top",)),
        return_lse=True,
        backend=backend,
        check=True,
    )
    for name, x in right(q, k, v, own, cap=2.0).items():
        np.testing.assert_allclose({"O": o, "lse": lse, "top": top}[name], x, rtol=1e-4, atol=1e-5)
    plain = cupyfa.attention(q, k, v, kernel=SLOPED.bind(**own), backend=backend)
    np.testing.assert_allclose(plain, right(q, k, v, own)["O"], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_own_arrays_lie_in_any_memory(cuda):
    import cupy

    q, k, v, own = arrays()
    expected = cupyfa.attention(q, k, v, kernel=SLOPED.bind(**own))
    theirs = {name: cupy.asarray(x) for name, x in own.items()}
    on_device = [cupy.asarray(x) for x in (q, k, v)]
    for given, mine in ((on_device, own), (on_device, theirs), ((q, k, v), theirs)):
        out = cupyfa.attention(*given, kernel=SLOPED.bind(**mine))
        assert type(out) is type(given[0])
        np.testing.assert_array_equal(cupy.asnumpy(out), expected)


def test_a_prepared_call_takes_own_arrays_in_order_and_by_name():
    q, k, v, own = arrays()
    expected, shapes = right(q, k, v, own, cap=5.0), (q.shape, k.shape, v.shape)
    of_arrays = SLOPED.bind(**own, cap=5.0, returns=["top"])
    of_shapes = SLOPED.bind(cap=5.0, returns=["top"])
    for prepared in (
        cupyfa.compile(q, k, v, kernel=of_arrays, backend="simulator"),
        cupyfa.compile(*shapes, dtype="float32", kernel=of_shapes, backend="simulator"),
    ):
        for o, top in (prepared(q, k, v, *own.values()), prepared(q, k, v, **own)):
            np.testing.assert_allclose(o, expected["O"], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(top, expected["top"], rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="sloped is bound to slopes, is_shown, but q is a shape"):
        cupyfa.compile(*shapes, dtype="float32", kernel=of_arrays, backend="simulator")


def test_arrays_of_any_strides_and_leading_axes_are_taken():
    q, k, v, own = arrays()
    own["is_shown"] = np.repeat(own["is_shown"], 2, 1)[:, ::2]  # strided, passed by pointer
    split = [x.reshape(2, 1, *x.shape[1:]) for x in (q, k, v)]
    own_split = {**own, "is_shown": own["is_shown"].reshape(2, 1, -1)}
    of, of_split = (SLOPED.bind(**x, returns=("top",)) for x in (own, own_split))
    o, top = cupyfa.attention(q, k, v, kernel=of, backend="simulator")
    o_split, top_split = cupyfa.attention(*split, kernel=of_split, backend="simulator")
    np.testing.assert_allclose(o, right(q, k, v, own)["O"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(o_split.reshape(o.shape), o)
    assert top_split.shape == (2, 1, *top.shape[1:])


def test_an_array_may_be_for_some_problems_only():
    q, k, v, own = arrays()
    slopes = replace(SLOPED.inputs["slopes"], when=lambda p: p.causal is not None)
    kernel = replace(
        one_launch("O slopes is_shown.data", inputs={**SLOPED.inputs, "slopes": slopes}),
        reference=None,
    )
    plans = [
        cupyfa.plan(kernel=kernel, M=4, d=2, causal=x, limits=Simulator().limits)
        for x in (False, True)
    ]
    given, absent = (plan.launches[0].arguments[1] for plan in reversed(plans))
    assert given.value is None and absent.value.dtype.itemsize == 32
    assert "slopes" in plans[1].arrays and "slopes" not in plans[0].arrays
    with pytest.raises(
        ValueError, match="own does not read slopes for batch=2.*do not bind slopes"
    ):
        cupyfa.attention(q, k, v, kernel=kernel.bind(**own), backend="simulator")
    without = kernel.bind(is_shown=own["is_shown"])
    with pytest.raises(TypeError, match="own requires the array slopes"):
        cupyfa.attention(q, k, v, causal=True, kernel=without, backend="simulator")


def test_floats_reach_plans():
    how = {"M": 4, "d": 2, "limits": Simulator().limits}
    for kernel, cap in ((SLOPED, 30.0), (SLOPED.bind(cap=0.1), float(np.float32(0.1)))):
        plan = cupyfa.plan(kernel=kernel, **how)
        (argument,) = (x for x in plan.launches[0].arguments if x.name == "cap")
        assert plan.floats == {"cap": cap} and argument.value == cap
        assert argument.value.dtype == np.float32


def test_accuracy_is_that_of_what_the_kernel_computes():
    (found,) = cupyfa.lab.accuracy(SLOPED, values=("normal",), backend="simulator", M=9, d=4)
    assert 0 < found.rmse < 1e-6 < found.rms


@pytest.mark.parametrize("command", ["run", "check", "bench", "tune"])
def test_commands_work_as_for_a_rung(command):
    sizes = () if command == "check" else ("-B", "1", "-H", "2", "-M", "40", "-d", "8")
    more = {
        "check": ("--grid", "fuzz", "--samples", "3", "--seed", "8", "--dtype", "float32"),
        "bench": ("--budget", "0.01", "--format", "json"),
        "tune": ("--budget", "1", "--fresh", "--format", "json"),
    }.get(command, ())
    done = cli(command, f"{SCRIPT}:sloped", "--backend", "simulator", *sizes, *more, code=0)
    shown = {
        "run": r"top +error",
        "check": r"(\d+) of \1 runs right",
        "bench": r'"kernel": "sloped"(?s:.*)"checked_%": 100.0,\s+"note": ""',
        "tune": r'"state": "right"',
    }
    assert re.search(shown[command], done.stdout), done.stdout


FAULTS = {
    "one key is missing": ("key < extent.kv_end(row)", "key < extent.kv_end(row) - 1"),
    "the scale is wrong by 1 %": ("product * scale", "product * scale * real(1.01)"),
    "an own array is not read": ("real slope = *slopes.row(batch, head, 0)", "real slope = 0"),
    "a float is not read": ("cap * tanh(score / cap)", "score"),
    "an own output is wrong": ("fmax(highest, score)", "score"),
}


def test_a_reference_that_takes_long_is_computed_for_a_smaller_problem(monkeypatch):
    monkeypatch.setattr(sampling, "_WORK", 0)
    asked = []

    def watched(arrays, p, c):
        asked.append((p.batch, p.heads, p.M))
        return scripts.attention(arrays, p, c)

    kernel = replace(SLOPED, reference=watched)
    how = {"batch": 2, "heads": 3, "M": 120, "d": 4, "backend": "simulator", "budget": 0.01}
    (row,) = cupyfa.bench(kernel, alone=True, **how)
    assert row.passed and row.time and set(asked) == {(1, 2, 101)}
    assert row.checked == pytest.approx(2 * 101 / (2 * 3 * 120))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    assert FULL.count(FAULTS[fault][0]) == 1
    (tmp_path / "sloped.cu").write_text(FULL.replace(*FAULTS[fault]))
    case = cupyfa.lab.Case("forward", cupyfa.Problem.of_sizes(M=70, N=70, d=16, heads=2))
    q, k, v, *own = case.inputs(kernel=SLOPED).values()
    with pytest.raises(cupyfa.WrongResult, match="wrong result of sloped"):
        cupyfa.attention(
            *(q, k, v),
            kernel=replace(SLOPED, folder=tmp_path).bind(**dict(zip(SLOPED.inputs, own))),
            backend="simulator",
            check=True,
        )


def test_a_failure_is_stored_with_own_arrays_and_replayed(tmp_path):
    (tmp_path / "sloped.cu").write_text(FULL.replace(*FAULTS["an own array is not read"]))
    (tmp_path / "sloped.py").write_text(SCRIPT.read_text())
    name = f"{tmp_path / 'sloped.py'}:sloped"
    case = cupyfa.lab.Case("forward", cupyfa.Problem.of_sizes(M=9, N=40, d=8))
    *_, outcome = perform(Simulator(), Task(case, (name,), keep=True))
    file = failures.write(tmp_path, failures.Stored(case, outcome), "the command")
    assert outcome.kind == "wrong result" and outcome.worst.name in ("O", "lse", "top")
    with np.load(file) as stored:
        assert {"slopes", "is_shown", "expected_top"} <= set(stored)
    assert cupyfa.lab.replay(file, name, backend="simulator").now == outcome
    (tmp_path / "sloped.cu").write_text(FULL)
    for kernel in (name, "fa2"):
        assert cupyfa.lab.replay(file, kernel, backend="simulator").now.kind == "right"


def test_bounds_may_be_those_of_the_project(tmp_path):
    def turned(arrays, p, c):
        q, k, v = arrays["Q"], -arrays["K"], arrays["V"]
        how = {"dtype": p.dtype.name, "roundings": (c.rounding,), "scale": p.scale}
        return tolerance.expected_attention(q, k, v, **how)[c.rounding]

    kernel = derived(tmp_path, "fa2", ("scorer = {scale", "scorer = {-scale"))
    how = {"check": True, "backend": "simulator"}
    for dtype in ("float32", "float16"):
        q, k, v, _ = arrays(dtype=dtype)
        cupyfa.attention(q, k, v, kernel=replace(kernel, reference=turned), **how)
    p = cupyfa.Problem.of(q, k, v)
    judge = Judge.of(
        choose_kernel.plan(replace(kernel, reference=turned), p, Simulator().limits),
        {"Q": q, "K": k, "V": v},
    )
    right = tolerance.expected_attention(q, -k, v, dtype="float16", scale=p.scale)[None]
    np.testing.assert_array_equal(judge.expected(None)[0][0]["O"].bound, right["O"].bound)


def one_launch(args, **fields):
    """Returns a record of one launch; ``fields`` holds its own arrays and other fields."""
    launch = Launch("own", args=args, grid=lambda p, c: 1, threads=lambda p, c: 32)
    features = ("causal", "strides", "lse", "dv")
    return replace(SLOPED, name="own", launches=(launch,), outputs={}, features=features, **fields)


@pytest.mark.parametrize(
    "axes, strides",
    [
        ("heads", (None, 0, None)),
        ("batch N", (0, None, 1)),
        ("batch heads M", (0, 1, 2)),
        ("kv_heads N d", (None, 0, 1)),
        ("M N", (None, None, 0)),
        (lambda p: (3, 4), (None, None, 0)),
        (lambda p: (5,), (None, None, None)),
    ],
)
def test_strides_of_a_tensor_follow_the_names_of_axes(axes, strides):
    kernel = one_launch("table", inputs={"table": Input(axes)}, floats={})
    plan = cupyfa.plan(kernel=kernel, M=4, d=2, limits=Simulator().limits)
    assert plan.launches[0].arguments[0].strides == strides


@pytest.mark.parametrize("axes", ["M d heads", "batch heads M N d", lambda p: (1, 2, 3, 4, 5)])
def test_other_arrays_are_passed_by_pointer(axes):
    inputs = {"table": Input(axes)}
    how = {"M": 4, "d": 2, "limits": Simulator().limits}
    cupyfa.plan(kernel=one_launch("table.data", inputs=inputs, floats={}), **how)
    with pytest.raises(ValueError, match="but a Tensor has .*; pass a pointer: table.data"):
        cupyfa.plan(kernel=one_launch("table", inputs=inputs, floats={}), **how)


# Gradients, softmax, and kernels derived from rungs

BACKWARD = scripts.sloped_backward


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_one_s_own(backend, dtype):
    p = cupyfa.Problem.of_sizes(M=20, N=33, d=8, heads=4, kv_heads=2, dtype=dtype, causal=True)
    case = cupyfa.lab.Case("backward", p)
    given = case.inputs(kernel=BACKWARD)
    q, k, v, out, lse, dout, slopes = given.values()
    assert list(given) == ["Q", "K", "V", "O", "lse", "dO", "slopes"]
    wide = {name: x.astype("f8") for name, x in given.items()}
    np.testing.assert_allclose(lse, scripts.forward(wide, p, None)["lse"], rtol=1e-5)
    given, how = (dout, q, k, v, out, lse), {"causal": True, "backend": backend}
    grads = cupyfa.backward(*given, kernel=BACKWARD.bind(slopes=slopes), **how, check=True)
    kernel = BACKWARD.bind(slopes=slopes, returns=["dslope"])
    *again, dslope = cupyfa.backward(*given, kernel=kernel, **how, grads=[None] * 3)
    assert dslope.shape == lse.shape and all(map(np.array_equal, grads, again))


def test_each_kernel_of_a_vjp_has_its_own_arrays():
    q, k, v, own = arrays()
    plain = replace(SLOPED, floats={"cap": lambda p, c: 1e6})
    own["is_shown"][:] = True
    kernels = {"kernel": plain.bind(**own), "backward_kernel": BACKWARD.bind(slopes=own["slopes"])}
    how = {**kernels, "backend": "simulator"}
    out, pullback = cupyfa.vjp(q, k, v, **how)
    grads = pullback(np.ones_like(out))
    step = 1e-2 * np.random.default_rng(1).standard_normal(q.shape).astype("f4")
    moved = [cupyfa.vjp(q + x, k, v, **how)[0] for x in (step, -step)]
    expected = (moved[0] - moved[1]).sum() / 2
    np.testing.assert_allclose((grads[0] * step).sum(), expected, rtol=0.02, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SLOPED, BACKWARD], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_correct_kernels_of_one_s_own_pass(kernel, dtype):
    sizes = {"M": 19, "N": 37, "d": 8, "heads": 4, "kv_heads": 2, "causal": True, "dtype": dtype}
    for seed, values in enumerate(VALUES):
        if values == "lowest" and kernel is BACKWARD:  # exp(score - lse) overflows
            continue
        case = cupyfa.lab.Case(kernel.operation, cupyfa.Problem.of_sizes(**sizes), seed, values)
        *_, outcome = perform(Simulator(), Task(case, (kernel,)))
        assert outcome.kind == "right", (values, outcome.message)
        if values in ("normal", "uniform"):
            worst, least = outcome.worst, ml_dtypes.finfo(dtype).smallest_normal
            # The last rounding of a subnormal number takes more of its bound.
            assert worst.ratio < 0.6 or abs(worst.expected) < least, values


def test_a_softmax_of_one_s_own(backend, tmp_path):
    (tmp_path / "tempered.cu").write_text(TEMPERED)
    launch = Launch(
        "tempered",
        args="S P heat.data",
        grid=lambda p, c: p.M,
        threads=lambda p, c: 1,
        constants={"N": lambda p, c: p.N},
    )
    tempered = cupyfa.Kernel(
        name="tempered",
        adds="a temperature for each row",
        operation="softmax",
        launches=(launch,),
        inputs={"heat": Input("M", "real", draw=lambda rng, p: 1 + rng.random(p.M))},
        reference=lambda arrays, p, c: {
            "P": reference.softmax(arrays["S"] / arrays["heat"][:, None])[0]
        },
        folder=tmp_path,
    )
    x, heat = np.random.default_rng(0).standard_normal((3, 9)), np.array([1.0, 2.0, 5.0])
    y = cupyfa.softmax(x, kernel=tempered.bind(heat=heat), backend=backend, check=True)
    np.testing.assert_allclose(y, reference.softmax(x / heat[:, None])[0], rtol=1e-12)


TEMPERED = """\
#include <tile/math.cuh>
#include <tile/tensor.cuh>

extern "C" __global__ void tempered(Tensor<const scalar> S, Tensor<scalar> P, const real* heat) {
  const int row = blockIdx.x;
  real sum = 0;
  for (int i = 0; i < N; ++i) sum += exp(real(S.row(0, 0, row)[i]) / heat[row]);
  for (int i = 0; i < N; ++i)
    P.row(0, 0, row)[i] = scalar(exp(real(S.row(0, 0, row)[i]) / heat[row]) / sum);
}
"""


def derived(folder, rung, change=("", "")):
    """Returns a rung with a changed copy of its .cu file; it still uses the project's headers."""
    kernel = cupyfa.kernel(rung)
    text = (KERNELS / "forward" / f"{rung}.cu").read_text()
    assert change[0] in text
    (folder / f"{rung}.cu").write_text(text.replace(*change))
    return replace(kernel, name="mine", folder=folder)


def test_a_kernel_derived_from_a_rung_finds_the_project_s_files(tmp_path):
    kernel = derived(tmp_path, "mma_pipelined")
    p = cupyfa.Problem.of_sizes(M=70, d=16, precision="float16")
    plan = choose_kernel.plan(kernel, p, Limits("an A100", 166912, arch="80"))
    of = {x.entry: x.path for x in plan.launches}
    assert of["mma_pipelined"] == tmp_path / "mma_pipelined.cu"
    assert of["round_operands"] == Path("forward/steps/round_operands.cu")
    assert all("extern" in text(x) for x in plan.launches)


@pytest.mark.parametrize("file", ["backward/delta.cu", "backward/steps/delta.cu"])
def test_a_record_finds_a_helper_launch_with_and_without_its_folder(tmp_path, file):
    (tmp_path / "rows.cu").touch()
    rows = replace(cupyfa.kernel("rows"), folder=tmp_path)
    delta = replace(rows.launches[0], file=file)
    assert source_path(rows, delta) == Path("backward/steps/delta.cu")


def test_a_kernel_derived_from_a_rung_computes_what_its_file_says(tmp_path):
    q, k, v, _ = arrays()
    kernel = derived(tmp_path, "fa2", ("softmax.inverse_sum()", "(2 * softmax.inverse_sum())"))
    mine, fa2 = (cupyfa.attention(q, k, v, kernel=x, backend="simulator") for x in (kernel, "fa2"))
    np.testing.assert_allclose(mine, 2 * fa2, rtol=1e-6)


def test_a_folder_without_any_file_of_a_kernel_is_refused(tmp_path):
    q, k, v, _ = arrays()
    with pytest.raises(OSError, match=r"fa2.cu, the file of kernel fa2, cannot be read"):
        kernel = replace(cupyfa.kernel("fa2"), name="mine", folder=tmp_path)
        cupyfa.attention(q, k, v, kernel=kernel, backend="simulator")
