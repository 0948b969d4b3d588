"""Transfers of NumPy arrays to a device and back, on a simulated device."""

import gc
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise, product

import numpy as np
import pytest
from helpers.far_device import FarDevice, Gate, Mark as FarMark
from helpers.sloped import sloped
from helpers.threads import in_threads
from hypothesis import given, settings, strategies as st

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits
from cupyfa.problem.problem import Problem
from cupyfa.runtime import transfer
from cupyfa.runtime.transfer import host, pieces, streamed_call
from cupyfa.runtime.transfer.host import Buffers, Host, hosts

LIMITS = Limits("a device", shared_bytes=232448)


@pytest.fixture
def far():
    return FarDevice()


@pytest.fixture(autouse=True)
def small():
    """Shrinks chunks and pieces so that even small arrays consist of several pieces."""
    before = transfer.configure()
    transfer.configure(threads=3, chunk_bytes=4096, buffers=4, piece_bytes=20_000, pieces=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_call, "_INLINE", 512)
        patch.setattr(host, "_POOLED", 1024)
        yield
    transfer.configure(**vars(before))


def arrays(*shape_q, kv_heads=None, N=None, dv=None, dtype=np.float32, seed=0):
    *lead, heads, M, d = shape_q
    kv_heads, N, dv = kv_heads or heads, M if N is None else N, dv or d
    rng = np.random.default_rng(seed)
    shapes = (shape_q, (*lead, kv_heads, N, d), (*lead, kv_heads, N, dv))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def same(far, q, k, v, tolerance=0.0, **options):
    """Checks that a far device returns the simulator's results, and returns them."""
    options = {"kernel": "fa2", "return_lse": True} | options
    there = cupyfa.attention(q, k, v, backend=far, **options)
    here = cupyfa.attention(q, k, v, backend="simulator", **options)
    for got, right in zip(there, here):
        assert type(got) is np.ndarray
        np.testing.assert_allclose(
            got.astype(np.float64), right.astype(np.float64), rtol=tolerance, atol=tolerance
        )
    return there


def test_a_kernel_of_one_s_own_gets_the_whole_problem(far):
    q, k, v = arrays(2, 4, 60, 16, kv_heads=2)
    shown = np.random.default_rng(1).random((60, 2)).T < 0.8  # not contiguous
    own = {"slopes": np.array([0.1, 0.2, 0.4, 0.8], np.float32), "is_shown": shown, "cap": 5.0}
    same(far, q, k, v, kernel=sloped.bind(**own, returns=("top",)))
    same(far, q, k, v, kernel=sloped.bind(**own), check=True)
    transfer.configure(device_bytes=20_000)
    with pytest.raises(cupyfa.OutOfMemory, match="sloped on .*: the whole problem needs"):
        cupyfa.attention(q, k, v, kernel=sloped.bind(**own), backend=far)


@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4), most=st.integers(1, 50))
@settings(deadline=None, max_examples=200)
def test_slabs_are_contiguous_small_and_complete(shape, most):
    whole, seen = np.arange(math.prod(shape)).reshape(shape), []
    for index in pieces.slabs(shape, most):
        part = whole[index]
        assert 0 < part.size <= most
        assert (np.diff(part.ravel()) == 1).all()
        seen.extend(part.ravel())
    assert seen == list(range(whole.size))


def planned(kernel, **sizes):
    record = LADDER["forward"].get(kernel) or LADDER["backward"].get(kernel)
    return planning.plan(record, Problem.of_sizes(**sizes), LIMITS)


def planner(plan):
    """Returns a function that plans sub-problems as calls do."""
    return lambda problem: planning.plan(plan.kernel, problem, LIMITS, **plan.constants)


@pytest.mark.parametrize("wanted", [10**3, 3 * 10**4, 2 * 10**5, 10**9])
def test_pieces_are_complete_and_small_enough(wanted):
    plan = planned("fa2", batch=5, heads=12, kv_heads=4, M=30, N=50, d=16)
    made = pieces.cut(plan, planner(plan), wanted, 10**9)
    seen = np.zeros((5, 4, 30, 50), int)
    for piece in made:
        seen[
            tuple(
                slice(r.start, r.stop)
                for r in (piece.batch, piece.kv_heads, piece.rows, piece.keys)
            )
        ] += 1
        part = planner(plan)(piece.problem(plan.problem))
        assert part.constants == plan.constants
        if wanted > 10**3:
            assert pieces.needed(part) <= wanted
    assert (seen == 1).all()
    assert (len(made) == 1) == (wanted == 10**9)


def test_a_problem_that_cannot_be_cut_says_what_it_needs():
    plan = planned("two_pass", heads=2, M=1000, d=64)
    with pytest.raises(cupyfa.DeviceError, match=r"one head of it needs [\d,]+ bytes.* 5,000 may"):
        pieces.cut(plan, planner(plan), 5000, 5000)


@pytest.mark.parametrize("most", [2048, 1 << 20])
def test_chunks_grow_with_the_root_of_what_is_moved(far, monkeypatch, most):
    transfer.configure(chunk_bytes=most, piece_bytes=1 << 20)
    monkeypatch.setattr(streamed_call, "_CHUNK_COST", 400)
    for M in (40, 160):
        far.copied.clear()
        q, k, v = arrays(1, 1, M, 16)
        same(far, q, k, v, return_lse=False)
        largest = max(size for _, _, size in far.copied)
        assert largest == min(most, int((4 * q.nbytes * 400) ** 0.5) // 64 * 64)  # rows of 64 bytes


def test_the_smallest_chunks(far):
    transfer.configure(chunk_bytes=16)
    same(far, *arrays(1, 2, 5, 3, dtype=np.float64))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_are_those_of_the_whole(far, layout):
    q, k, v = arrays(3, 4, 37, 16, kv_heads=2, N=29, dv=24)
    if layout == "bshd":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    same(far, q, k, v, layout=layout, causal=True)
    assert len(far.copied) > 6


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.repeat(x, 2, axis=3)[..., ::2],
        lambda x: x[:, ::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
        lambda x: np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    ],
    ids=["columns", "reversed", "broadcast", "heads outside", "not aligned"],
)
def test_any_strides_are_accepted(far, change):
    same(far, *map(change, arrays(2, 3, 40, 16)))


@pytest.mark.parametrize(
    "kernel, d", [("wgmma", 20), ("mma_pipelined", 24), ("minimal", 16), ("v1", 8)]
)
def test_kernels_with_other_array_layouts(far, kernel, d):
    same(far, *arrays(2, 2, 40, d, dtype=np.float16), kernel=kernel)


@pytest.mark.parametrize(
    "shape, N",
    [((0, 2, 5, 4), 5), ((2, 2, 0, 4), 5), ((2, 2, 5, 4), 0), ((2, 2, 5, 0), 5)],
    ids=["batch", "M", "N", "d"],
)
def test_empty_arrays(far, shape, N):
    same(far, *arrays(*shape, N=N))


MASKS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (9, 4)},
    {"window": (5, None), "causal": "top-left"},
    {"window": (9, 4), "offset": -7},
]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("M, N", [(50, 70), (90, 33)])
def test_rows_and_keys_are_cut_where_a_head_is_too_large(far, options, M, N):
    transfer.configure(device_bytes=4000)
    q, k, v = arrays(2, 2, M, 16, N=N)
    same(far, q, k, v, tolerance=1e-6, **options)
    plan = cupyfa.plan(kernel="fa2", backend=far, batch=2, heads=2, M=M, N=N, d=16, **options)
    made = pieces.cut(plan, planner(plan), 4000, 4000)
    assert len({x.rows for x in made}) > 1 and len({x.keys for x in made}) > 1


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 4)}], ids=str)
@pytest.mark.parametrize(
    "kernel", ["mma_pipelined", "mma_split_kv", "mma_slices", "wgmma_persistent"]
)
def test_parts_under_a_mask_are_right_for_other_kernels(far, kernel, options):
    transfer.configure(device_bytes=20_000)
    q, k, v = arrays(1, 2, 150, 32, N=170, dtype=np.float16)
    same(far, q, k, v, tolerance=2e-3, kernel=kernel, **options)


def also_slowly(first, *others):
    """Returns test parameters, all but the first of which are marked as slow."""
    return [first, *(pytest.param(x, marks=pytest.mark.slow) for x in others)]


@pytest.fixture
def counts(monkeypatch):
    """Returns a function that lists the number of pieces of each problem."""
    found, cut = [], pieces.cut
    monkeypatch.setattr(pieces, "cut", lambda *x: found.append(made := cut(*x)) or made)
    return lambda: [len(x) for x in found]


def sent_to(far):
    there = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in far.kept]
    return sum(size for to, _, size in far.copied if any(a <= to < b for a, b in there))


SIZES = (3, 4, 24, 21)  # rows of 21 elements are padded in memory


def of_form(form, dtype=np.float16):
    """Returns a random array. Letters in `form` name its axes; 1 is a broadcast axis."""
    shape = [1 if axis == "1" else SIZES["bhmn".index(axis)] for axis in form]
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def same_gradients(far, given, options):
    there, here = (cupyfa.backward(*given, backend=x, **options) for x in (far, "simulator"))
    for got, right in zip(there, here):
        np.testing.assert_array_equal(got, right)


def of_sizes(piece_bytes=12_000):
    transfer.configure(piece_bytes=piece_bytes)
    batch, heads, M, N = SIZES
    return arrays(batch, heads, M, 16, kv_heads=2, N=N)


@pytest.mark.parametrize("form", ["1hmn", "b1mn", "bhmn", "11mn"])
def test_each_part_of_a_bias_is_sent_once_for_its_pieces(far, counts, form):
    q, k, v = of_sizes()
    bias = of_form(form)
    same(far, q, k, v, bias=bias)
    assert counts() == [6]
    assert sent_to(far) == sum(x.nbytes for x in (q, k, v)) + bias.nbytes // 21 * 24


def padded(q, k, v):
    k, v = (cupyfa.Padded(x, [5, 21, 16]) for x in (k, v))
    return cupyfa.Padded(q, [24, 0, 11]), k, v


ALIKE = {  # inputs that pieces receive in part or as a whole
    "mask and slopes": {"mask": of_form("b11n") > -1, "alibi_slopes": of_form("bh", np.float32)},
    "sinks": {"sink": of_form("h", np.float32), "mask": of_form("1hmn") > -1, "causal": True},
    "text": {
        "score_mod": "score - slope[query % 2] * abs(position - key)",
        "mask": "key <= position + seen[0]",
        "captured": {"slope": np.array([0.1, 0.2]), "seen": np.array([5])},
        "bias": of_form("bh1n"),
    },
    "lengths": {"mask": of_form("b1mn") > -1},
    "block mask": {
        "mask": cupyfa.block_mask(
            mask_mod="key // 8 == query // 8 or key == x[0]",
            **{"captured": {"x": np.array([3])}, "M": 24, "N": 21, "backend": "simulator"},
        ),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", also_slowly(*ALIKE))
def test_arrays_and_texts_go_through_the_pieces(far, counts, what):
    """Results and gradients have the same bits as in one piece."""
    q, k, v = of_sizes()
    if what == "lengths":
        q, k, v = padded(q, k, v)
    out, lse = same(far, q, k, v, **ALIKE[what])
    assert counts() == [6]
    rng = np.random.default_rng(2)
    dout, dlse = (rng.standard_normal(x.shape).astype(np.float32) for x in (out, lse))
    options = {"kernel": "two_pass", "dlse": dlse, **ALIKE[what]}
    same_gradients(far, (dout, q, k, v, out, lse), options)
    assert counts() == [6, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, form, count, needs",
    [
        ("sink", "h", 2, "its smallest piece needs .* fewer"),
        ("sink", "bh", 6, "one head of it needs"),
        ("bias", "bhmn", 1, "the whole problem needs"),
    ],
)
def test_gradients_of_arrays_are_not_cut_where_they_are_sums(far, counts, name, form, count, needs):
    """Those of sinks are cut along heads, and those of what texts read are one piece."""
    q, k, v = of_sizes()
    options = {name: of_form(form, np.float32)}
    out, lse = same(far, q, k, v, **options)
    options |= {"kernel": "two_pass", "wrt": ("q", name)}
    same_gradients(far, (out, q, k, v, out, lse), options)
    assert counts() == [6, count]
    transfer.configure(device_bytes=4000)
    with pytest.raises(cupyfa.OutOfMemory, match=needs):
        cupyfa.backward(out, q, k, v, out, lse, backend=far, **options)


ONE_PIECE = {
    "dropout": {"dropout": cupyfa.Dropout(0.5, 7)},
    "head": {"score_mod": "score - 0.1 * head", "bias": of_form("1hmn")},
    "batch": {"mask": "key < seen[batch]", "captured": {"seen": np.array([9, 20, 4])}},
    "block mask": {"mask": cupyfa.block_mask(of_form("b1mn") > 0, backend="simulator")},
}


@pytest.mark.parametrize("what", also_slowly(*ONE_PIECE))
def test_what_counts_heads_is_one_piece(far, counts, what):
    q, k, v = of_sizes()
    same(far, q, k, v, **ONE_PIECE[what])
    assert counts() == [1]
    transfer.configure(device_bytes=4000)
    with pytest.raises(
        cupyfa.DeviceError, match="the whole problem needs .* fewer batch elements or heads"
    ):
        cupyfa.attention(q, k, v, kernel="fa2", backend=far, **ONE_PIECE[what])


@pytest.mark.slow
@pytest.mark.parametrize("names, count", [("q sink", 2), ("q bias", 1)])
def test_tangents_of_sinks_are_cut_along_heads_and_those_of_texts_are_not(
    far, counts, names, count
):
    q, k, v = of_sizes()
    values = {"q": q, "sink": of_form("bh", np.float32), "bias": of_form("1hmn", np.float32)}
    given = {name: np.stack([values[name], 2 - values[name]]) for name in names.split()}
    how = {"sink": values["sink"], "bias": values["bias"], "tangents": given}
    there = cupyfa.jvp(q, k, v, backend=far, **how)
    here = cupyfa.jvp(q, k, v, backend="simulator", **how)
    for got, right in zip((*there[0], *there[1]), (*here[0], *here[1])):
        np.testing.assert_array_equal(got, right)
    assert counts() == [count]


BEYOND = {  # inputs for calls whose pieces are smaller than a head
    "bias and mask": {"bias": of_form("1hmn"), "mask": of_form("b11n") > -1},
    "bias and slopes": {"bias": of_form("bh1n"), "alibi_slopes": of_form("h"), "softcap": 3.0},
    "mask": {"mask": of_form("11mn") > -1, "alibi_slopes": of_form("bh"), "causal": "top-left"},
    "sinks": {"sink": of_form("h"), "bias": of_form("11m1")},
}


@pytest.mark.parametrize("what", also_slowly(*BEYOND))
def test_arrays_are_cut_along_rows_and_keys(far, what):
    transfer.configure(device_bytes=6000)
    same(far, *of_sizes(), tolerance=1e-6, **BEYOND[what])


@pytest.mark.parametrize(
    "text", also_slowly("score - 0.1 * abs(position - key)", "score * (query % 2)")
)
def test_rows_and_keys_of_texts_that_name_them_are_not_cut(far, text):
    transfer.configure(device_bytes=6000)
    with pytest.raises(cupyfa.OutOfMemory, match="one head of it needs"):
        cupyfa.attention(*of_sizes(), kernel="fa2", backend=far, score_mod=text)
    transfer.configure(device_bytes=20_000)
    same(far, *of_sizes(), score_mod=text)


def test_rows_and_keys_of_lengths_are_not_cut(far):
    transfer.configure(device_bytes=6000)
    with pytest.raises(cupyfa.OutOfMemory, match="one head of it needs"):
        cupyfa.attention(*padded(*of_sizes()), kernel="fa2", backend=far)


def test_pieces_are_cut_again_only_for_other_sizes(monkeypatch):
    plan = planned("fa2", batch=5, heads=4, M=30, N=50, d=16)
    kept, done, again = transfer.Pieces(plan, planner(plan)), [], pieces.cut
    monkeypatch.setattr(pieces, "cut", lambda *x: done.append(x) or again(*x))
    for wanted, most in (
        *((30_000, 10**6), (30_000, 10**7), (20_000, 10**6)),
        *((500, 10**6), (500, 10**7), (9000, 9000)),  # smaller than a head; a limit below one head
    ):
        assert kept.cut(wanted, most).pieces == again(plan, planner(plan), wanted, most)
    assert [x[2] for x in done] == [30_000, 20_000, 500, 9000, 9000]


@pytest.mark.parametrize(
    "options",
    also_slowly({}, {"bias": of_form("1hmn")}, {"mask": of_form("b1mn") > 0, "sink": of_form("h")}),
    ids=lambda options: " ".join(options) or "plain",
)
def test_device_memory_stays_within_its_limit(far, options):
    transfer.configure(device_bytes=30_000)
    far.limits  # noqa: B018
    taken, empty = [], far.empty
    far.empty = lambda shape, dtype: (
        taken.append(math.prod(shape) * dtype.itemsize) or empty(shape, dtype)
    )
    same(far, *of_sizes(), **options)
    assert 15_000 < sum(taken) <= 30_000


def test_merged_parts_of_keys_are_rounded_once(far):
    transfer.configure(device_bytes=4000)
    q, k, v = arrays(1, 2, 50, 16, N=70, dtype=np.float16)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    exact = cupyfa.attention(*wide, kernel="fa2", backend="simulator").astype(np.float16)
    out = cupyfa.attention(q, k, v, kernel="fa2", backend=far)
    assert np.mean(out != exact) < 0.01  # with 16-bit partial results it would be 0.4


def test_nan_stays_in_its_row_when_keys_are_merged(far):
    transfer.configure(device_bytes=4000)
    q, k, v = arrays(1, 1, 40, 16, N=60)
    q[0, 0, 7, 0] = np.nan
    v[0, 0, 50, 3] = np.nan
    o, lse = cupyfa.attention(
        q, k, v, kernel="fa2", backend=far, return_lse=True, causal="top-left"
    )
    bad = np.isnan(o).any(-1)[0, 0]
    assert bad.nonzero()[0].tolist() == [7]
    assert np.isnan(lse[0, 0]).nonzero()[0].tolist() == [7]


@pytest.mark.slow
def test_largest_scores_of_pieces_are_those_of_the_whole(far):
    q, k, v = arrays(2, 4, 50, 16, N=70)
    q[0, 0, 7, 0] = np.nan
    how = {"kernel": "fa2", "return_max": True, "causal": True}
    _, whole = cupyfa.attention(q, k, v, backend="simulator", **how)
    for room in (100_000, 4000):  # pieces of one head; then of some rows and keys
        transfer.configure(device_bytes=room)
        _, found = cupyfa.attention(q, k, v, backend=far, **how)
        np.testing.assert_array_equal(found, whole)


def test_gradients_and_softmax_are_transferred_too(far):
    q, k, v = arrays(3, 4, 20, 16, kv_heads=2)
    out, lse = cupyfa.attention(q, k, v, kernel="fa2", backend="simulator", return_lse=True)
    options = {"kernel": "two_pass", "causal": False}
    dout = np.ones_like(out)
    there = cupyfa.backward(dout, q, k, v, out, lse, backend=far, **options)
    here = cupyfa.backward(dout, q, k, v, out, lse, backend="simulator", **options)
    for got, right in zip(there, here):
        np.testing.assert_array_equal(got, right)
    x = np.random.default_rng(0).standard_normal((7, 90, 100), np.float32)
    np.testing.assert_array_equal(
        cupyfa.softmax(x, backend=far), cupyfa.softmax(x, backend="simulator")
    )


def test_out_may_be_a_view(far):
    q, k, v = arrays(2, 3, 40, 16)
    memory = np.full((2, 3, 80, 16), 7, np.float32)
    out = memory[:, :, ::2]
    assert cupyfa.attention(q, k, v, kernel="fa2", backend=far, out=out) is out
    np.testing.assert_array_equal(out, cupyfa.attention(q, k, v, kernel="fa2", backend="simulator"))
    assert (memory[:, :, 1::2] == 7).all()


def test_checked_calls_are_transferred_too(far):
    same(far, *arrays(1, 2, 20, 16), check=True)


def test_progress_is_reported_for_each_piece(far):
    told = []
    q, k, v = arrays(4, 3, 40, 16)
    on = cupyfa.Devices(progress=lambda *x: told.append(x), backend=far)
    cupyfa.attention(q, k, v, kernel="fa2", backend=on)
    total = told[0][1]
    assert total > 3 and [done for done, _, _ in told] == list(range(total + 1))
    assert told[0][2].startswith("fa2 on batch=4")


@pytest.mark.parametrize(
    "dtype, kernel, batch, heads, M, taken",
    [
        ("float32", "wgmma_fp16x2", 4, 16, 8192, 4),  # 2 heads occupy 33 MiB
        ("float64", "mma_f64", 4, 16, 2048, 16),
        ("float16", "wgmma_persistent", 64, 16, 512, 16),  # transfers dominate
    ],
)
def test_pieces_have_tiles_for_a_device_where_kernels_take_a_while(
    dtype, kernel, batch, heads, M, taken
):
    p = Problem.of_sizes(batch=batch, heads=heads, M=M, N=M, d=128, dtype=dtype)
    limits = Limits("a device", shared_bytes=232448, arch="90")
    plan = planning.plan(LADDER["forward"][kernel], p, limits)
    made = pieces.cut(
        *(plan, lambda part: planning.plan(plan.kernel, part, limits, **plan.constants)),
        *(33 << 20, 10**12),
    )
    assert {len(x.kv_heads) for x in made} == {taken}


def pinned(far, shape, dtype=np.float32):
    return far.pinned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def test_pinned_arrays_need_no_buffers(far, monkeypatch):
    """The first kernel starts before the next piece is sent."""
    sent, launch = [], pieces.Layout.launch

    def launched(*args):
        sent.append(len(far.copied))
        launch(*args)

    monkeypatch.setattr(pieces.Layout, "launch", launched)
    host = arrays(2, 2, 64, 16)
    q, k, v = (pinned(far, x.shape) for x in host)
    for mine, x in zip((q, k, v), host):
        mine[...] = x
    out = pinned(far, q.shape)
    cupyfa.attention(q, k, v, kernel="fa2", backend=far, out=out)
    np.testing.assert_array_equal(out, cupyfa.attention(*host, kernel="fa2", backend="simulator"))
    assert hosts[far][0].bytes == 0
    assert sent[0] == len("qkv") and len(sent) > 2


@pytest.mark.parametrize("least", [256, 1 << 18])
def test_parts_of_pinned_arrays_need_no_buffers(far, monkeypatch, least):
    """Each contiguous part of a strided array is copied separately, unless it is small."""
    monkeypatch.setattr(pieces, "_LEAST_RUN", least)
    monkeypatch.setattr(pieces, "_LEAST_TILES", 1)
    host = arrays(2, 4, 64, 16, kv_heads=1)
    whole = [pinned(far, (*x.shape[:2], 80, 16)) for x in (*host, host[0])]
    whole[3][...] = 7
    q, k, v, out = (x[:, :, 8:72] for x in whole)
    for mine, x in zip((q, k, v), host):
        mine[...] = x
    cupyfa.attention(q, k, v, kernel="fa2", backend=far, out=out)
    np.testing.assert_array_equal(out, cupyfa.attention(*host, kernel="fa2", backend="simulator"))
    assert (np.delete(whole[3], np.s_[8:72], axis=2) == 7).all()
    assert (hosts[far][0].bytes == 0) == (least == 256)


def test_buffer_memory_is_bounded_reported_and_freed(far):
    q, k, v = arrays(4, 4, 64, 16)
    out = np.empty_like(q)
    cupyfa.attention(q, k, v, kernel="fa2", backend=far, out=out)
    assert 0 < transfer.held() <= transfer.configure().most_held == 2 * 4 * 4096
    assert len(far.memory) * 4096 == transfer.held()
    transfer.release()
    assert transfer.held() == 0
    same(far, q, k, v)


def test_results_of_a_repeated_size_are_pinned_within_the_limit(far):
    q, k, v = arrays(2, 2, 64, 16)
    transfer.configure(pinned_results=q.nbytes)
    first, second, third = (cupyfa.attention(q, k, v, kernel="fa2", backend=far) for _ in range(3))
    assert [far.is_pinned(x) for x in (first, second, third)] == [False, True, False]
    assert (second == first).all() and second.flags.writeable
    before = transfer.held()
    del second
    assert transfer.held() == before - q.nbytes


def test_an_error_in_a_thread_ends_the_call(far):
    q, k, v = arrays(2, 4, 64, 16)
    far.failing = True
    with pytest.raises(RuntimeError, match="the bus failed"):
        cupyfa.attention(q, k, v, kernel="fa2", backend=far)
    far.failing = False
    same(far, q, k, v)


@pytest.mark.parametrize("what", ["no memory", "a lost device"])
def test_an_error_with_few_buffers_ends_the_call(far, what):
    """Threads waiting for a buffer are woken, and a buffer whose copy failed is returned."""
    transfer.configure(buffers=2, threads=4)
    ended, wait = threading.Event(), FarMark.wait

    def fail(*_):
        raise RuntimeError(what)

    def call():
        with pytest.raises(RuntimeError, match=what):
            cupyfa.attention(*arrays(4, 4, 64, 16), kernel="fa2", backend=far)
        ended.set()

    with pytest.MonkeyPatch.context() as patch:
        if what == "no memory":
            patch.setattr(far, "pinned", lambda size: time.sleep(0.05) or fail())
        else:
            patch.setattr(FarMark, "done", False)
            patch.setattr(FarMark, "wait", fail)
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        assert ended.wait(20)
        thread.join()
    assert FarMark.wait is wait


def test_pinned_results_stay_within_the_limit(far):
    """Covers concurrent threads, dropped results and a failing allocation."""
    size, held = 3 << 10, []
    transfer.configure(pinned_results=2 * 4096)
    transfer.new_result(far, (size,), np.dtype("u1"))
    far.pinned = lambda size, pinned=far.pinned: time.sleep(0.02) or pinned(size)

    def ask(_=None):
        held.append(transfer.new_result(far, (size,), np.dtype("u1")))

    in_threads(ask, range(6))
    assert sum(far.is_pinned(x) for x in held) == 2
    assert transfer.held() == 2 * 4096
    held.clear()
    assert transfer.held() == 0
    ask()
    with host._lock:  # a finalizer may run while the lock is held
        held.clear()
    assert transfer.held() == 0
    far.pinned = lambda size: 1 / 0
    with pytest.raises(ZeroDivisionError):
        ask()
    gc.collect()
    assert transfer.held() == 0


def test_several_threads_may_call_at_once(far):
    problems = [arrays(2, 3, 40 + seed, 16, seed=seed) for seed in range(4)]
    results = in_threads(lambda x: cupyfa.attention(*x, kernel="fa2", backend=far), problems)
    for problem, result in zip(problems, results):
        right = cupyfa.attention(*problem, kernel="fa2", backend="simulator")
        np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("where, kernel", [("to", "fa2"), ("back", "fa2"), ("launch", "baseline")])
def test_a_device_that_stands_still_holds_up_no_other(far, where, kernel):
    """Each device has its own threads, buffers and locks; here one call occupies all of them."""
    transfer.configure(threads=1, buffers=1)
    q, k, v = arrays(2, 2, 64, 16)
    outs = [np.empty_like(q) for _ in range(2)]  # pageable memory needs buffers
    gate = far.gates[0, where] = Gate()

    def call(device):
        far.use(device)
        cupyfa.attention(q, k, v, kernel=kernel, backend=far, out=outs[device])

    with ThreadPoolExecutor(2) as pool:
        try:
            still = pool.submit(call, 0)
            assert gate.arrived.acquire(timeout=20)
            pool.submit(call, 1).result(timeout=20)
            assert not still.done()
        finally:
            gate.opened.set()
    right = cupyfa.attention(q, k, v, kernel=kernel, backend="simulator")
    for out in outs:
        np.testing.assert_array_equal(out, right)
    assert transfer.held() == 2 * transfer.configure().most_held == 4 * 4096


def of_transfer():
    return [x for x in threading.enumerate() if x.name.startswith("cupyfa_")]


@pytest.mark.parametrize("failing", [False, True])
def test_threads_end_with_their_buffers(far, failing):
    transfer.release()
    gc.collect()  # frees the garbage of other tests
    for thread in of_transfer():
        thread.join(60)
    gc.disable()  # a failed call must leave no reference cycle
    try:
        out = np.empty((4, 4, 64, 16), np.float32)
        cupyfa.attention(*arrays(4, 4, 64, 16), kernel="fa2", backend=far, out=out)
        far.failing = failing
        with pytest.raises(RuntimeError) if failing else nullcontext():
            cupyfa.attention(*arrays(4, 4, 64, 16), kernel="fa2", backend=far, out=out)
        running = of_transfer()
        assert len(running) == 2 * transfer.configure().threads
        transfer.release()
        for thread in running:
            thread.join(20 / len(running))
        assert not of_transfer()
    finally:
        gc.enable()


def test_buffers_are_reused_before_new_ones_are_made(far):
    taken = Buffers(far, transfer.configure())
    with far.lanes() as (lane, _, _):
        first, second = taken.take(), taken.take()
        for buffer in (first, second):
            taken.give(buffer)
        assert taken.take() is second and taken.made == 2
        there = far.empty((4096,), np.dtype("u1"))
        lane.copy(far.address(there), second.address, 4096)
        second.copied(lane)
        taken.give(second)
        assert taken.take() is first  # the other buffer's copy is still running
        lane.synchronize()
        assert taken.take() is second and taken.made == 2


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_a_part_has_the_mask_of_the_whole(options):
    whole = Problem.of_sizes(M=7, N=9, d=1, **options)

    def sees(p, i, j):
        right = p.right is None or j <= i + p.causal_offset
        return right and (p.left is None or j >= i + p.window_offset)

    for (m, last_m), (n, last_n) in product(
        [(0, 7), (3, 7), (6, 7)], [(0, 9), (0, 2), (4, 5), (8, 9)]
    ):
        part = whole.part(1, 1, range(m, last_m), range(n, last_n))
        assert part.left is None or part.right is None or part.causal_offset >= part.window_offset
        for i, j in product(range(part.M), range(part.N)):
            assert sees(part, i, j) == sees(whole, i + m, j + n)


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_during_a_transfer_ends_the_call(far, monkeypatch, begun):
    """Copies are submitted all together or not at all; the call waits for submitted copies."""
    q, k, v = arrays(2, 4, 50, 16)
    submit, left = Host.submit, [4]

    def interrupted(self, move, copies):
        left[0] -= 1
        if begun or left[0]:
            submit(self, move, copies)
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Host, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cupyfa.attention(q, k, v, backend=far, kernel="fa2")
    same(far, q, k, v)


BOUNDS = {  # offsets of five sequences; the second has no queries, the fourth no keys
    "q": np.array([2, 30, 30, 65, 71, 90], np.int32),
    "k": np.array([0, 21, 40, 66, 66, 93], np.int32),
}
USED = {
    "q": np.array([27, 0, 5, 6, 1], np.int32),
    "k": np.array([3, 19, 26, 0, 27], np.int32),
}
OF_SEQUENCES = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"window": (9, 4)},
    "arrays": {
        "alibi_slopes": np.linspace(0.1, 1, 20, dtype=np.float32).reshape(5, 4),
        "sink": np.array([1, -1, 0.5, 2], np.float32),
        "score_mod": "score + weight[query]",
        "captured": {"weight": np.linspace(-1, 1, 40, dtype=np.float32)},
    },
}


def of_sequences(dtype=np.float32, used=None):
    used = used or dict.fromkeys("qk")
    rng = np.random.default_rng(0)
    sizes = (94, 4, 16), (93, 2, 16), (93, 2, 24)
    arrays = (rng.standard_normal(x).astype(dtype) for x in sizes)
    return [cupyfa.Packed(x, BOUNDS[name], used[name]) for x, name in zip(arrays, "qkk")]


def same_sequences(far, given, **options):
    """Checks a ragged batch's results and gradients; returns the far device's."""

    def made(backend):
        how = {"backend": backend, "kernel": "fa2", "backward_kernel": "two_pass", **options}
        (out, lse), pullback = cupyfa.vjp(*given, return_lse=True, **how)
        return out, lse, *pullback(np.cos(out), np.where(np.isfinite(lse), 0.5, 0).astype("f4"))

    there, here = map(made, (far, "simulator"))
    for got, right in zip(there, here):
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, right)
    return there


@pytest.mark.slow
@pytest.mark.parametrize("what", also_slowly(*OF_SEQUENCES))
def test_sequences_go_through_the_pieces(far, counts, what):
    """Pieces of whole sequences or of single heads give the same bits as a single piece."""
    for piece_bytes in (70_000, 18_000):
        transfer.configure(piece_bytes=piece_bytes)
        given = of_sequences(used=USED if what == "lengths" else None)
        same_sequences(far, given, **OF_SEQUENCES[what])
    assert counts() == [1, 2, 1, 3, 2, 10, 2, 10]


def test_pieces_of_sequences_are_complete_and_small_enough():
    plan = planned("fa2", lengths=[9, 0, 31, 4, 4, 4, 60, 0], heads=4, kv_heads=2, d=16)
    starts = [np.array([0, 9, 9, 40, 44, 48, 52, 112, 112])] * 2
    for wanted in (4_000, 12_000, 30_000):
        made, seen = pieces.cut(plan, planner(plan), wanted, 10**9, starts), np.zeros((8, 2), int)
        for piece in made:
            seen[slice(piece.sequences.start, piece.sequences.stop), piece.kv_heads.start :] += 1
            seen[slice(piece.sequences.start, piece.sequences.stop), piece.kv_heads.stop :] -= 1
            assert (piece.rows.start, piece.rows.stop) == tuple(
                starts[0][[piece.sequences.start, piece.sequences.stop]]
            )
            part = planner(plan)(piece.problem(plan.problem))
            assert part.constants == plan.constants
            assert wanted < 30_000 or pieces.needed(part) <= wanted * 9 / 8
        assert (seen == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, back", [("wgmma_persistent", "wgmma_two_pass"), ("mma_async", "mma_two_pass")]
)
def test_sequences_of_16_bits_go_through_the_pieces(far, counts, kernel, back):
    how = {"kernel": kernel, "backward_kernel": back, "deterministic": True, "causal": True}
    same_sequences(far, of_sequences(np.float16), **how)
    assert max(counts()) > 2


@pytest.mark.slow
def test_sequences_with_lists_dropout_and_checks(far, counts):
    """Calls with dropout are not divided, since the mask depends on the index of a sequence."""
    transfer.configure(piece_bytes=35_000)
    packed = of_sequences()
    lists = [[x.array[a:b] for a, b in pairwise(x.offsets)] for x in packed]
    how = {"kernel": "fa2", "layout": "bshd"}
    for got, right in zip(
        *(cupyfa.attention(*lists, backend=x, **how) for x in (far, "simulator"))
    ):
        np.testing.assert_array_equal(got, right)
    out = np.empty((94, 4, 24), np.float32)
    cupyfa.attention(*packed, backend=far, kernel="fa2", check=True, out=out)
    assert counts() == [1, 3]
    same_sequences(far, packed, dropout=cupyfa.Dropout(0.2, 3))
    assert counts() == [1, 3, 1, 1]
