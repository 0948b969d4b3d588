"""Dask arrays: the tasks' results match a single call on the whole arrays."""
# ruff: noqa: F401 (the calls of bad_calls.txt use some of the names that are imported here)

import os
import pickle
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.cli import table
from helpers.merged import of_parts

import cupyfa
from cupyfa import Devices, Dropout, Limits, Packed, Padded, Problem, Unsupported
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics import tolerance
from cupyfa.numerics.tolerance import Expected
from cupyfa.planner.source import ROOT

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from cupyfa.dask import MergedKeys  # noqa: E402  # after the check for Dask
from cupyfa.partition.position_names import places  # noqa: E402
from cupyfa.partition.visible_chunks import ranges, strip_of, tile_of, visible  # noqa: E402
from cupyfa.problem.options import AttentionOptions  # noqa: E402

TILES = {"Br": 16, "Bc": 16}
FORWARD = {"kernel": "fa2", "tiles": TILES, "backend": "simulator"}
BACKWARD = {"backward_kernel": "two_pass"}
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 48, "N": 80, "d": 8, "dv": 8}
EVEN = {"batch": 1, "heads": 1, "rows": 16, "keys": 32}
WHOLE = {"batch": 2, "heads": 2, "rows": -1, "keys": -1}
# Overrides of SIZES, chunk sizes ("heads" counts key heads) and options of the call.
CASES = {
    "plain": ({}, EVEN, {}),
    "causal": ({}, EVEN, {"causal": True}),
    "top-left": ({}, EVEN, {"causal": "top-left"}),
    "more rows than keys": ({"M": 96, "N": 40}, EVEN, {"causal": True}),
    "top-left, more rows": ({"M": 64, "N": 24}, EVEN, {"causal": "top-left"}),
    "window": ({}, EVEN, {"window": (20, 9)}),
    "causal window": ({}, EVEN, {"window": (20, None), "causal": True}),
    "window on the right": ({}, EVEN, {"window": (None, 3)}),
    "window of rows beyond the keys": ({"M": 80, "N": 32}, EVEN, {"window": (2, 3), "offset": 9}),
    "offset": ({}, EVEN, {"causal": True, "offset": -21}),
    "one key head": ({"kv_heads": 1}, EVEN, {"causal": True}),
    "as many key heads": ({"heads": 2}, {**EVEN, "heads": 2}, {"causal": True}),
    "dv": ({"dv": 5}, EVEN, {"causal": True}),
    "ragged chunks": (
        {},
        {**EVEN, "rows": (1, 15, 32), "keys": (7, 1, 0, 41, 31)},
        {"causal": True},
    ),
    "one chunk": ({}, WHOLE, {"causal": True}),
    "batch and heads cut": ({}, {**WHOLE, "batch": 1, "heads": 1}, {"causal": True}),
    "scale and softcap": ({}, EVEN, {"scale": -0.3, "softcap": 2.0}),
    "text": ({}, EVEN, {"score_mod": "score - 0.1 * (position - key)", "causal": True}),
    "float64": ({"dtype": "float64"}, EVEN, {"causal": True}),
    "float16": ({"dtype": "float16"}, EVEN, {"causal": True}),
    "bfloat16": ({"dtype": ml_dtypes.bfloat16}, EVEN, {"causal": True}),
}


def arrays(batch, heads, kv_heads, M, N, d, dv, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = ((batch, heads, M, d), (batch, kv_heads, N, d), (batch, kv_heads, N, dv))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def cut(q, k, v, chunks):
    """Returns Dask arrays; chunks of q's heads correspond to chunks of key heads."""
    batch, heads, rows, keys = (chunks[x] for x in ("batch", "heads", "rows", "keys"))
    group = q.shape[1] // max(k.shape[1], 1)
    of_k = batch, heads, keys, -1
    return (
        da.from_array(q, chunks=(batch, max(heads * group, 1), rows, -1)),
        da.from_array(k, chunks=of_k),
        da.from_array(v, chunks=of_k),
    )


def case(name):
    sizes, chunks, options = CASES[name]
    given = arrays(**{**SIZES, **sizes})
    return given, cut(*given, chunks), options


def merging(q, k, v, fan_in=4):
    """Returns the arrays with k wrapped, so that each task reads one chunk of keys."""
    return q, MergedKeys(k, fan_in), v


def computed(*arrays):
    return dask.compute(*arrays, scheduler="synchronous")


def assert_same_bits(found, right):
    for x, y in zip(found, right, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def require_right(found, given, chunked, *, fan_in=None, dout=None, dlse=None, **options):
    """Raises if results exceed the error bounds.

    found: out, lse and, with dout, the gradients. fan_in: number of partial results merged at a
    time; None where keys are gathered.
    """
    p = Problem.of(*given, options=AttentionOptions(**options))
    arrays = dict(zip("QKV", given))
    rows, keys = (ranges(x.chunks[2]) for x in chunked[:2])
    of_rows = [of_parts(arrays, p, x, keys if fan_in else [range(p.N)], fan_in) for x in rows]
    wanted = {
        name: Expected(*(np.concatenate(x, axis=2) for x in zip(*(x[name] for x in of_rows))))
        for name in ("O", "lse")
    }
    if dout is not None:
        of_lse = {} if dlse is None else {"mods.dlse": dlse}
        arrays |= {"O": found[0], "lse": found[1], "dO": dout, **of_lse}
        wanted |= OPERATIONS["backward"].reference(arrays, p, (None,))[None]
    tolerance.require(tolerance.compare(dict(zip(wanted, found, strict=True)), wanted), str(p))


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_call(name):
    given, chunked, options = case(name)
    right = cupyfa.attention(*given, return_lse=True, **FORWARD, **options)
    found = cupyfa.attention(*chunked, return_lse=True, **FORWARD, **options)
    assert [x.shape for x in found] == [x.shape for x in right]
    assert [x.dtype for x in found] == [x.dtype for x in right]
    assert_same_bits(computed(*found), right)
    how = {"return_lse": True, **FORWARD, **options}
    merged = computed(*cupyfa.attention(*merging(*chunked, 2), **how))
    require_right(merged, given, chunked, fan_in=2, **options)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_call(name):
    given, chunked, options = case(name)
    how = {"return_lse": True, "backward_tiles": TILES, **FORWARD, **BACKWARD, **options}
    (out, lse), back = cupyfa.vjp(*given, **how)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)
    results, pullback = cupyfa.vjp(*chunked, **how)
    found = pullback(da.from_array(dout))
    assert [x.shape for x in found] == [x.shape for x in given]
    found, right = computed(*results, *found), (out, lse, *back(dout))
    if name != "ragged chunks":
        assert_same_bits(found, right)
    else:  # chunks of keys that end within a tile change the order of sums
        require_right(found, given, chunked, dout=dout, **options)


def test_gradients_of_lse_and_of_merged_keys():
    given, chunked, options = case("causal")
    dout, dlse = (x[..., ::-1].copy() for x in cupyfa.attention(*given, return_lse=True, **FORWARD))
    how = {"return_lse": True, **FORWARD, **options}
    results, pullback = cupyfa.vjp(*merging(*chunked), **how)
    found = computed(*results, *pullback(da.from_array(dout), da.from_array(dlse)))
    require_right(found, given, chunked, fan_in=4, dout=dout, dlse=dlse, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_merged_results_are_rounded_once(dtype):
    given = arrays(**{**SIZES, "dtype": dtype})
    chunked = cut(*given, {"batch": 1, "heads": 1, "rows": 40, "keys": 16})
    merged, how = merging(*chunked, 2), {"causal": True, **FORWARD}
    out, pullback = cupyfa.vjp(*merged, out="float32", **how)
    gradients = pullback(out.astype(dtype))
    (narrow,) = computed(cupyfa.attention(*merged, **how))
    wide, *found = computed(out, *gradients)
    assert {x.dtype.name for x in (out, wide, *gradients, *found)} == {"float32"}
    np.testing.assert_array_equal(narrow, wide.astype(dtype))


def test_rows_that_see_no_key():
    """In some chunks no row sees a key; in one chunk only some rows do."""
    q, k, v = arrays(**{**SIZES, "M": 64, "N": 24})
    chunked, how = cut(q, k, v, EVEN), {"causal": True, "return_lse": True, **FORWARD}
    for given in (chunked, merging(*chunked)):
        out, lse = computed(*cupyfa.attention(*given, **how))
        assert not out[:, :, :40].any() and (lse[:, :, :40] == -np.inf).all()
        assert np.isfinite(lse[:, :, 40:]).all()


@pytest.mark.parametrize("axis", ["batch", "heads", "kv_heads", "M", "N", "d", "dv"])
def test_empty_arrays(axis):
    empty = {axis: 0} if axis != "kv_heads" else {"kv_heads": 0, "heads": 0}
    given = arrays(**{**SIZES, "M": 20, "N": 20, **empty})
    options = {"causal": True, "return_lse": True, "kernel": "fa2", "backend": "simulator"}
    right, back = cupyfa.vjp(*given, **options)
    found, pullback = cupyfa.vjp(*map(da.from_array, given), **options)
    assert_same_bits(computed(*found), right)
    assert_same_bits(computed(*pullback(found[0])), back(right[0]))


def test_chunks_of_d_and_of_other_arrays_are_rechunked():
    q, k, v = arrays(**SIZES)
    chunked = (
        da.from_array(x, chunks=y) for x, y in ((q, 3), (k, (2, 1, 32, 5)), (v, (1, 2, 9, 8)))
    )
    found = cupyfa.attention(*chunked, **FORWARD)
    assert found.chunks == ((2,), (2, 2), (3,) * 16, (8,))
    assert_same_bits(computed(found), [cupyfa.attention(q, k, v, **FORWARD)])


def test_the_plan_is_made_once_for_the_whole():
    """If chunks were planned separately, tiles would differ, and with them the results' bits."""
    q, k, v = arrays(**{**SIZES, "M": 256, "N": 40, "d": 16})
    chunked = cut(q, k, v, {"batch": 2, "heads": 1, "rows": 128, "keys": 20})
    found = cupyfa.attention(*chunked, causal=True, backend="simulator")
    assert_same_bits(computed(found), [cupyfa.attention(q, k, v, causal=True, backend="simulator")])


def test_limits_of_another_device_choose_the_kernel():
    x = da.ones((1, 1, 64, 64), chunks=32, dtype="float16")
    other = Limits("an H100", 232448, arch="90")
    found = cupyfa.attention(x, x, x, backend=Devices(limits=other, backend="cuda"))
    right = cupyfa.plan(M=64, d=64, dtype="float16", limits=other)
    task = next(x for x in found.dask.layers[found.name.removesuffix("-out")].values())[0]
    assert task.how["kernel"] == right.kernel.name and task.how["tiles"] == right.constants
    assert task.how["backend"] == "cuda"


def test_chunks_that_are_hidden_are_not_taken():
    q, k, v = case("causal")[1]
    found = cupyfa.attention(q, k, v, causal=True, offset=0, **FORWARD)
    needed = found.blocks[:, :, :2].dask.cull(
        [(found.name, b, h, i, 0) for b in range(2) for h in range(2) for i in range(2)]
    )
    assert {key[3] for key in needed.to_dict() if key[0] == k.name} == {0}


def test_equal_calls_have_equal_names():
    chunked = case("causal")[1]
    one, other = (cupyfa.attention(*chunked, causal=True, **FORWARD) for _ in range(2))
    assert one.name == other.name
    assert one.name != cupyfa.attention(*chunked, **FORWARD).name


def test_tasks_can_be_sent():
    """The caller traces a Python function, so that tasks contain an expression."""
    chunked = case("causal")[1]
    found = cupyfa.attention(
        *chunked, score_mod=lambda score, position, slope: score - slope * position,
        captured={"slope": 0.25}, **FORWARD,
    )  # fmt: skip
    pickle.loads(pickle.dumps(dict(found.dask)))


@pytest.mark.parametrize(
    "options, chunks",
    [
        ({"score_mod": "score - 0.1 * position", "window": (10, 10)}, EVEN),
        ({"mask": "key <= position"}, EVEN),
        ({"mask": "key // 8 == position // 8", "window": (10, 10)}, EVEN),
        ({"score_mod": "score * (head + 1) - query + queries"}, WHOLE),
        ({"score_mod": "score + 0.1 * keys - batch", "window": (4, 4)}, WHOLE),
        ({"score_mod": "score - slope * position", "captured": {"slope": 0.1}}, EVEN),
    ],
    ids=str,
)
def test_texts_count_as_in_the_whole(options, chunks):
    given = arrays(**SIZES)
    right = cupyfa.attention(*given, **FORWARD, **options)
    assert_same_bits(
        computed(cupyfa.attention(*cut(*given, chunks), **FORWARD, **options)), [right]
    )


def test_options_are_as_of_attention():
    given, chunked, _ = case("plain")
    options = {"window": (9, 3), "scale": 0.5}
    right = cupyfa.attention(*given, **options, **FORWARD)
    assert_same_bits(computed(cupyfa.attention(*chunked, **options, **FORWARD)), [right])
    how = {"return_lse": True, "check": True, **FORWARD}
    checked = computed(*cupyfa.attention(*merging(*chunked), **options, **how))
    require_right(checked, given, chunked, fan_in=4, **options)


X = np.ones((1, 2, 8, 4), np.float32)
A = da.from_array(X, chunks=(1, 1, 4, 4))


@pytest.mark.parametrize("given, error, words", table("dask/bad_calls.txt"))
@pytest.mark.parametrize("function", [cupyfa.attention, cupyfa.vjp])
def test_wrong_arguments(function, given, error, words):
    """Errors are raised before anything is computed."""
    wrong = eval(f"dict({given})")
    with pytest.raises(eval(error), match=".*".join(words)):
        function(**{"q": A, "k": A, "v": A, "backend": "simulator", **wrong})


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ((X,), TypeError, "dout is of type ndarray; pass a Dask array like out"),
        ((A[..., :3],), ValueError, r"dout has shape \(1, 2, 8, 3\); it must be \(1, 2, 8, 4\)"),
        (
            (A.astype("f2"),),
            TypeError,
            "dout is float16; it must be float32 for these q, k and v: convert it",
        ),
        ((A, A), ValueError, r"dlse is float32 .*; it must be float32 \(1, 2, 8\), like lse"),
    ],
)
def test_wrong_gradients(wrong, error, message):
    _, pullback = cupyfa.vjp(A, A, A, backend="simulator")
    with pytest.raises(error, match=message):
        pullback(*wrong)


def test_kernels_that_are_not_deterministic_are_refused_if_they_have_to_be():
    how = {"backend": "simulator", "backward_kernel": "columns"}
    with pytest.raises(Unsupported, match="sums dQ in arbitrary order"):
        cupyfa.vjp(A, A, A, deterministic=True, **how)
    cupyfa.vjp(A, A, A, **how)


@pytest.mark.parametrize(
    "text, found",
    [
        ("score - abs(position - key) * (key - position) + where(key <= position, 1, 0)", ""),
        ("score - position", "position"),
        ("score - (position - 1 - key)", "key position"),
        ("score + (key - key) + head * (query - key)", "head query key"),
        ("score + where(0 <= key <= position, 1, 0)", "key position"),
    ],
)
def test_what_texts_count(text, found):
    assert {*places(AttentionOptions(score_mod=text))} == {*found.split()}


def test_gradients_that_name_key_need_one_chunk_of_keys():
    with pytest.raises(Unsupported, match="uses the index key, which starts at 0"):
        cupyfa.vjp(A, A, A, mask="key > 1", backend="simulator")
    whole = A.rechunk({2: -1})
    cupyfa.vjp(A, whole, whole, mask="key > 1", backend="simulator")


@pytest.mark.parametrize("seed", range(20))
def test_strips_are_the_chunks_that_are_met(seed):
    rng = np.random.default_rng(seed)
    rows, keys = (ranges(rng.integers(0, 9, 5).tolist()) for _ in range(2))
    if not keys[-1].stop:
        return
    shift, tile = int(rng.integers(-20, 20)), int(rng.integers(1, 5))
    before, after = (None if rng.random() < 0.3 else int(rng.integers(0, 9)) for _ in range(2))
    for own in rows:
        seen = {
            key
            for row in own
            for key in range(keys[-1].stop)
            if (before is None or key >= row + shift - before)
            and (after is None or key <= row + shift + after)
        }
        found = strip_of(visible(own, keys[-1].stop, shift, before, after, tile), keys)
        taken = [key for n in found.chunks for key in keys[n]][found.skipped :]
        assert taken == list(range(taken[0], taken[-1] + 1)) if taken else True
        assert not taken or taken[0] == found.start
        assert seen <= {*taken}
        if seen:
            assert found.start % tile == 0 or found.start == keys[found.chunks[0]].start
            assert not {*keys[found.chunks[0]]}.isdisjoint(range(found.start, max(seen) + 1))
            assert max(seen) in keys[found.chunks[-1]]


def test_whole_tiles():
    assert tile_of({"Br": 128, "Bc": 48, "stages": 5}) == 384 and tile_of({}) == 1


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_cupyfa_imports_nothing_of_dask():
    assert python("import sys, cupyfa; print('dask' in sys.modules)") == "False"


@pytest.mark.parametrize(
    "before, message",
    [
        ("sys.modules['dask'] = None", 'install it: pip install "dask[array]"'),
        (
            "import dask; dask.config.set({'array.query-planning': True})",
            "set array.query-planning to False",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(before, message):
    if "query-planning" in before and not hasattr(da, "array_expr_enabled"):
        pytest.skip("this Dask plans no queries of arrays")
    said = python(f"import sys; {before}; import cupyfa.dask")
    assert said.startswith("ImportError: cupyfa.dask") and message in said


@pytest.fixture(scope="module")
def client():
    """Starts two worker processes with one thread each."""
    distributed = pytest.importorskip("distributed")
    quiet = {"silence_logs": 50, "dashboard_address": None}
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, **quiet) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def computed_by(client, *arrays, **how):
    return [x.result(timeout=120) for x in client.compute(arrays, **how)]


@pytest.mark.slow
def test_processes_compute_the_same(client):
    for name in ("plain", "causal window"):
        given, chunked, options = case(name)
        right = cupyfa.attention(*given, **FORWARD, **options)
        found = cupyfa.attention(*chunked, **FORWARD, **options)
        assert_same_bits(computed_by(client, found), [right])
        how = {"return_lse": True, **FORWARD, **options}
        merged = cupyfa.attention(*merging(*chunked), **how)
        require_right(computed_by(client, *merged), given, chunked, fan_in=4, **options)


def test_an_error_of_a_worker_arrives_as_itself(client):
    q, k, v = case("plain")[1]
    shorter = v.map_blocks(lambda x: x[:, :, 1:], dtype=v.dtype, chunks=v.chunks)
    found = cupyfa.attention(q, k, shorter, **FORWARD)
    with pytest.raises(ValueError, match="N, the number of keys, must be equal"):
        found.compute()


def deadly(x, folder, block_id):
    """Kills the first worker process that calls this function."""
    runs = folder / "-".join(map(str, block_id))
    with runs.open("a") as file:
        file.write("run ")
    with suppress(FileExistsError), (folder / "dead").open("x") as file:
        file.write(f"{os.getpid()} {runs}")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def require_right_if_one_dies(client, folder, given, chunked, **options):
    """Checks results after a worker dies and another worker repeats its task."""
    q, k, v = chunked
    of_q = q.map_blocks(deadly, folder, dtype=q.dtype, meta=q._meta)
    future = client.compute(cupyfa.attention(of_q, k, v, **options))
    assert_same_bits([future.result(timeout=120)], [cupyfa.attention(*given, **options)])
    victim, runs = (folder / "dead").read_text().split()
    assert Path(runs).read_text() == "run run "
    client.wait_for_workers(2, timeout=60)
    assert int(victim) not in client.run(os.getpid).values()


@pytest.mark.slow
def test_tasks_of_a_worker_that_dies_are_repeated(client, tmp_path):
    given, chunked, options = case("causal")
    require_right_if_one_dies(client, tmp_path, given, chunked, **FORWARD, **options)


@pytest.fixture(scope="module")
def of_two_gpus(two_gpus):
    """Starts two worker processes, each with its own GPU, as the example does."""
    distributed = pytest.importorskip("distributed")
    start = runpy.run_path(str(ROOT / "examples" / "dask_attention.py"))["cluster"]
    with start(2) as cluster, distributed.Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


# Chunk boundaries are multiples of every kernel's tile sizes.
OF_GPUS = {**SIZES, "batch": 1, "M": 1536, "N": 1536, "d": 64, "dv": 64}
STRIPS = {"batch": 1, "heads": 1, "rows": 768, "keys": 768}


def gpu():
    import cupy

    return cupy.cuda.Device().pci_bus_id


@pytest.mark.gpu
def test_each_worker_has_a_gpu_of_its_own(of_two_gpus):
    assert len({*of_two_gpus.run(gpu).values()}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("keys", ["gather", "merge"])
def test_workers_with_a_gpu_each_compute_the_same(of_two_gpus, keys, dtype):
    """Chunks are NumPy arrays, which move between the processes."""
    given = arrays(**{**OF_GPUS, "dtype": dtype})
    chunked = cut(*given, STRIPS)
    how = {"causal": True, "return_lse": True, "deterministic": True}
    q, k, v = chunked if keys == "gather" else merging(*chunked)
    results, pullback = cupyfa.vjp(q, k, v, **how)
    kept = of_two_gpus.persist([*results, *pullback(chunked[0])])
    found = computed_by(of_two_gpus, *kept)
    assert all(of_two_gpus.has_what().values())  # each worker computed some results
    if keys == "merge":
        require_right(found, given, chunked, fan_in=4, dout=given[0], causal=True)
    else:
        right, back = cupyfa.vjp(*given, **how)
        assert_same_bits(found, (*right, *back(given[0])))


@pytest.mark.gpu
def test_chunks_in_the_memory_of_two_gpus(of_two_gpus):
    """Each worker holds one key head's chunks, which stay on its GPU.

    The kernel is fixed, because "auto" would select one whose splits depend on the number of rows.
    """
    import cupy

    given = arrays(**{**OF_GPUS, "dtype": "float16"})
    meta = cupy.empty((0, 0, 0, 0), "float16")
    for head, worker in enumerate(of_two_gpus.run(gpu)):
        of_head = given[0][:, 2 * head : 2 * head + 2], *(x[:, head : head + 1] for x in given[1:])
        q, k, v = (x.map_blocks(cupy.asarray, meta=meta) for x in cut(*of_head, STRIPS))
        how = {"causal": True, "deterministic": True, "kernel": "mma_async"}
        out, pullback = cupyfa.vjp(q, k, v, **how)
        results = [x.map_blocks(cupy.asnumpy, dtype=x.dtype) for x in (out, *pullback(q))]
        found = computed_by(of_two_gpus, *results, workers=[worker])
        right, back = cupyfa.vjp(*of_head, **how)
        assert_same_bits(found, (right, *back(of_head[0])))


@pytest.mark.gpu
def test_tasks_of_a_worker_with_a_gpu_that_dies_are_repeated(of_two_gpus, tmp_path):
    given = arrays(**{**OF_GPUS, "dtype": "float16"})
    require_right_if_one_dies(of_two_gpus, tmp_path, given, cut(*given, STRIPS), causal=True)
    assert len({*of_two_gpus.run(gpu).values()}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["gather", "merge"])
def test_chunks_in_gpu_memory_stay_there(cuda, keys):
    import cupy

    given = arrays(**{**SIZES, "M": 512, "N": 700, "d": 64, "dv": 64, "dtype": "float16"})
    chunks = {"batch": 1, "heads": 1, "rows": 256, "keys": 256}
    meta = cupy.empty((0, 0, 0, 0), "float16")
    chunked = [x.map_blocks(cupy.asarray, meta=meta) for x in cut(*given, chunks)]
    q, k, v = map(cupy.asarray, given)
    right, back = cupyfa.vjp(q, k, v, causal=True, deterministic=True)
    of_parts = chunked if keys == "gather" else merging(*chunked)
    out, pullback = cupyfa.vjp(*of_parts, causal=True)
    found = computed(out, *pullback(chunked[0]))
    assert all(isinstance(x, cupy.ndarray) for x in found)
    for x, y in zip(found, (right, *back(q)), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        cupy.testing.assert_allclose(x.astype("f4"), y.astype("f4"), rtol=2e-2, atol=2e-2)
    if keys == "gather":
        cupy.testing.assert_array_equal(found[0], right)
