"""Padded batch elements of different lengths, in every rung that takes them.

All numbers beyond the lengths are NaN, in outputs that are inputs of gradients too.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.problems import FORWARD, name, usual_first

import cupyfa
from cupyfa import Dropout
from cupyfa.errors import Unsupported
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.problem import Problem
from cupyfa.problem.structured_arrays import wrap

F = np.float32
BACKWARD = LADDER["backward"]
ABLE = [x for x in FORWARD.values() if "lengths" in x.features]
ABLE_BACKWARD = [x for x in BACKWARD.values() if "lengths" in x.features]
UNABLE = [x for x in (*FORWARD.values(), *BACKWARD.values()) if "lengths" not in x.features]
M, N = 70, 150
# Elements without queries, without keys, of all rows, and of ends that no tile has.
ROWS, KEYS = (0, 70, 33, 5), (90, 0, 41, 150)
LENGTHS = {"lengths_q": ROWS, "lengths_k": KEYS}
RNG = np.random.default_rng(7)
CASES = (
    {"causal": True, "softcap": 3.0},
    {"causal": "top-left", "score_mod": "score + 0.1 * (position - key) + 0.01 * batch * queries"},
    {"window": (9, 3), "sink": np.array([0.5, -1.0], F)},
    {"mask": "key <= query + keys - queries", "scale": -0.3},
    {"dropout": Dropout(0.3, 5), "alibi_slopes": np.arange(8, dtype=F).reshape(4, 2) / 40},
    {"bias": RNG.standard_normal((4, 1, M, N)).astype("f2"), "causal": True},
    {"mask": RNG.random((1, 2, M, N)) < 0.7, "bias": RNG.standard_normal((1, 1, M, N), F)},
)
QUICK = ("fa2", "mma_split_kv", "wgmma_persistent", "two_pass", "wgmma_columns")
IN_TURN = [(x, CASES[i % len(CASES)]) for i, x in enumerate((*ABLE, *ABLE))]
IN_TURN_BACKWARD = [(x, CASES[(i + 2) % len(CASES)]) for i, x in enumerate((*ABLE_BACKWARD,) * 2)]


def drawn(dtype, count, rows, *, heads, d=24, seed=0):
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.random.default_rng(seed).standard_normal((count, heads, rows, d)).astype(of)


def beyond(array, lengths, value=np.nan):
    """The array with this number in all rows beyond the lengths."""
    made = array.copy()
    for element, length in zip(made, lengths or ()):
        element[:, length:] = value
    return made


def arrays(dtype, *, rows=ROWS, keys=KEYS, value=np.nan, heads=2, d=24, sizes=(M, N)):
    q = drawn(dtype, 4, sizes[0], heads=heads, d=d)
    k, v = (drawn(dtype, 4, sizes[1], heads=1, d=d, seed=x) for x in (1, 2))
    return beyond(q, rows, value), beyond(k, keys, value), beyond(v, keys, value)


def forward(kernel, backend, given, lengths=LENGTHS, **options):
    how = {"kernel": kernel, "backend": backend, "return_lse": True, **options}
    return cupyfa.attention(*wrap(*given, lengths), **how)


def checked(kernel, backend, lengths=LENGTHS, **options):
    of = {"rows": lengths["lengths_q"], "keys": lengths["lengths_k"]}
    given = arrays(usual_dtype(kernel), **of)
    out, lse = forward(kernel, backend, given, lengths, check=True, **options)
    return np.array(out, F), lse


@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK))
def test_every_element_has_its_own_result(backend, kernel):
    out, lse = checked(kernel, backend, causal=True)
    for i, (rows, keys) in enumerate(zip(ROWS, KEYS)):
        unseen = rows if keys == 0 else max(rows - keys, 0)  # queries before the first key
        assert not np.any(out[i, :, :unseen]) and not np.any(out[i, :, rows:])
        assert (lse[i, :, rows:] == -np.inf).all() and (lse[i, :, :unseen] == -np.inf).all()
        assert np.any(out[i, :, unseen:rows], axis=-1).all()


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, how", IN_TURN, ids=lambda x: getattr(x, "name", None) or ",".join(x)
)
def test_options_are_those_of_each_element(backend, kernel, how):
    checked(kernel, backend, **how)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK[:2]))
@pytest.mark.parametrize("alone", LENGTHS)
def test_one_of_both_may_be_given(backend, kernel, alone):
    others = dict.fromkeys(LENGTHS.keys() - {alone})
    checked(kernel, backend, {**LENGTHS, **others}, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [x for x in ABLE if "split_kv" not in x.name], ids=name)
def test_an_element_has_the_bits_of_the_dense_call(backend, kernel):
    q, k, v = arrays(usual_dtype(kernel), value=0)  # rows with NaN are computed in another way
    how = {"kernel": kernel, "backend": backend, "causal": True}
    plan = cupyfa.plan(
        **{x: how[x] for x in ("kernel", "backend")}, M=200, d=24, dtype=str(q.dtype)
    )
    how["tiles"] = plan.constants
    out, lse = forward(given=(q, k, v), **how)
    for i, (rows, keys) in enumerate(zip(ROWS, KEYS)):
        own = q[i, :, :rows], k[i, :, :keys], v[i, :, :keys]
        dense = cupyfa.attention(*own, return_lse=True, **how)
        assert out[i, :, :rows].tobytes() == dense[0].tobytes()
        assert lse[i, :, :rows].tobytes() == dense[1].tobytes()


@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK[:2]))
def test_numbers_beyond_do_not_matter(backend, kernel):
    dtype = usual_dtype(kernel)
    found = [
        [np.array(x, F) for x in forward(kernel, backend, arrays(dtype, value=value))]
        for value in (1, -2, np.nan)
    ]
    once, of_another, of_nan = found
    assert all(a.tobytes() == b.tobytes() for a, b in zip(once, of_another))
    for a, b in zip(once, of_nan):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("heads", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_splits_of_elements_with_few_keys_have_none(backend, heads, dtype):
    """At least three splits, of which some are empty; with 4 heads they share a row tile."""
    kernel, sizes, keys = FORWARD["mma_split_kv"], (3, 400), (400, 0, 1, 130)
    how = {"precision": "float16" if dtype == "float32" else None}
    lengths = {"lengths_q": (3, 2, 3, 0), "lengths_k": keys}
    given = arrays(dtype, rows=(3, 2, 3, 0), keys=keys, heads=heads, sizes=sizes)
    tiles = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 2, "blocks_per_sm": 8}
    options = {"check": True, "tiles": tiles, **how}
    planned = {"heads": heads, "kv_heads": 1, "M": 3, "N": 400, "d": 24, "batch": 4}
    of_plan = {"dtype": dtype, "tiles": tiles, "precision": how["precision"], "backend": backend}
    plan = cupyfa.plan(kernel=kernel, lengths_k=True, **planned, **of_plan)
    assert all(x.numbers["num_splits"] > 2 for x in plan.launches if x.numbers)
    for more in ({}, {"causal": True}, {"window": (30, 0), "sink": np.zeros(heads, F)}):
        forward(kernel, backend, given, lengths, **options, **more)


@pytest.mark.parametrize("kernel", ["fa2", "mma_split_kv"])
def test_lengths_are_read_when_kernels_run(backend, kernel):
    given = arrays(usual_dtype(FORWARD[kernel]), value=0)
    how = {"kernel": kernel, "backend": backend, "causal": True}
    prepared = cupyfa.compile(*wrap(*given, LENGTHS), **how)
    for keys in (KEYS, (1, 2, 3, 150)):
        lengths = {"lengths_q": np.array(ROWS, "i4"), "lengths_k": np.array(keys, "i4")}
        out = prepared(*given, **lengths)
        assert out.tobytes() == cupyfa.attention(*wrap(*given, lengths), **how).tobytes()


@pytest.mark.parametrize("kernel", usual_first(ABLE, QUICK[:2]))
def test_wrong_lengths_of_a_kernel_stay_inside_the_arrays(backend, kernel, monkeypatch):
    # As lengths in GPU memory, which nobody sees before the kernel does.
    monkeypatch.setattr(cupyfa.Prepared, "_with_lengths", lambda _, by_name: by_name)
    given = arrays(usual_dtype(kernel), rows=None, keys=None)
    how = {"kernel": kernel, "backend": backend}
    wrong, kept = np.array([-1, 71, 2**31 - 1, -(2**31)], "i4"), (0, M, M, 0)
    prepared = cupyfa.compile(*wrap(*given, {"lengths_q": kept, "lengths_k": kept}), **how)
    out = prepared(*given, wrong, np.array([151, -1, 2**31 - 1, 7], "i4"))
    lengths = {"lengths_q": kept, "lengths_k": (N, 0, N, 7)}
    right = cupyfa.attention(*wrap(*given, lengths), **how)
    assert out.tobytes() == right.tobytes()


def gradients(kernel, backend, d=24, has_dlse=False, lengths=LENGTHS, **options):
    rows, keys = lengths["lengths_q"], lengths["lengths_k"]
    given = arrays(usual_dtype(kernel), rows=rows, keys=keys, d=d)
    own = {name: x for name, x in options.items() if name != "tiles"}
    out, lse = forward("fa2", backend, given, lengths, **own)
    dout = beyond(drawn(str(out.dtype), 4, M, heads=2, d=d, seed=5), rows)
    dlse = np.where(np.isfinite(lse), lse / 4, 0).astype(lse.dtype) if has_dlse else None
    out, lse = beyond(out, rows), beyond(lse[..., None], rows)[..., 0]
    how = {"kernel": kernel, "backend": backend, "check": True, "dlse": dlse, **options}
    found = cupyfa.backward(dout, *wrap(*given, lengths), out, lse, **how)
    for array, of in zip(found, (rows, keys, keys)):
        assert beyond(array, of, 0).tobytes() == array.tobytes()
        assert np.any(array)


@pytest.mark.parametrize("kernel", usual_first(ABLE_BACKWARD, QUICK))
def test_gradients_are_those_of_each_element(backend, kernel):
    gradients(kernel, backend, causal=True)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, how", IN_TURN_BACKWARD, ids=lambda x: getattr(x, "name", None) or ",".join(x)
)
def test_gradients_with_options(backend, kernel, how):
    gradients(kernel, backend, has_dlse=True, **how)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("alone", LENGTHS)
@pytest.mark.parametrize("kernel", ABLE_BACKWARD, ids=name)
def test_gradients_of_one_of_both(backend, kernel, alone):
    others = dict.fromkeys(LENGTHS.keys() - {alone})
    gradients(kernel, backend, lengths={**LENGTHS, **others})


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["wgmma_columns", "wgmma_two_pass"])
def test_gradients_of_wide_heads(backend, kernel):
    gradients(BACKWARD[kernel], backend, d=160, causal=True)


@pytest.mark.parametrize("kernel", usual_first((*ABLE, *ABLE_BACKWARD), []))
def test_nvrtc_compiles_them(kernel):
    pytest.importorskip("cupyfa.runtime.cuda.device", reason="CuPy and NVRTC are not installed")
    sizes = {"M": 2048, "d": 64, "heads": 4, "kv_heads": 2, "batch": 2, "causal": True}
    problem = Problem.of_sizes(
        **sizes, dtype=usual_dtype(kernel), lengths_q=True, lengths_k=True, softcap=30.0
    )
    arch = kernel.target or "80"
    for launch in planning.plan(kernel, problem, limits_of(arch)).launches:
        assert compile_launch(launch, arch).warnings == ()


@pytest.mark.parametrize("kernel", UNABLE, ids=name)
def test_kernels_that_cannot_say_which_can(kernel):
    q, lse = drawn(usual_dtype(kernel), 2, 4, heads=1), np.zeros((2, 1, 4), F)
    how, arrays = {"kernel": kernel, "backend": "simulator"}, wrap(q, q, q, {"lengths_k": [1, 2]})
    with pytest.raises(Unsupported, match=r"does not support .*lengths.*; kernels that can: "):
        if kernel.operation == "forward":
            cupyfa.attention(*arrays, **how)
        else:
            cupyfa.backward(q, *arrays, q, lse, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa2", "mma_pipelined", "mma_split_kv", "wgmma_persistent"])
def test_a_graph_takes_other_lengths(cuda, kernel):
    import cupy

    dtype = usual_dtype(FORWARD[kernel]).replace("bfloat16", "float16")
    given = list(map(cupy.asarray, arrays(dtype)))
    lengths = {name: cupy.asarray(np.array(x, "i4")) for name, x in LENGTHS.items()}
    after = {"lengths_q": (9, 1, 0, 70), "lengths_k": (20, 150, 41, 3)}
    how = {"backend": "cuda", "causal": True}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        forward(kernel, given=given, lengths=lengths, **how)
        stream.begin_capture()
        out, lse = forward(kernel, given=given, lengths=lengths, **how)
        graph = stream.end_capture()
        for array in given:
            array[...] = cupy.nan_to_num(array)
        for name, x in lengths.items():
            x.set(np.array(after[name], "i4"))
        graph.launch(stream)
        wanted = forward(kernel, given=given, lengths=after, **how)
        stream.synchronize()
    assert out.get().tobytes() == wanted[0].get().tobytes()
    assert lse.get().tobytes() == wanted[1].get().tobytes()
