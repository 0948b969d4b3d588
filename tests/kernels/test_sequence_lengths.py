"""Sequences of different lengths, packed or padded, in every rung that supports them.

Padded arrays hold NaN beyond the lengths, including the outputs that gradients read.
"""

import numpy as np
import pytest
from helpers.problems import FORWARD, able, drawn, usual_first

import cupyfa
from cupyfa import Dropout, Packed
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.problem.structured_arrays import wrap

F = np.float32
BACKWARD = LADDER["backward"]
QUICK = ("fa2", "mma_split_kv", "wgmma_persistent", "two_pass", "wgmma_columns")
FEW = QUICK[:2]


def random(*shape, dtype, seed=0):
    return drawn(shape, dtype=dtype, seed=seed)[0]


class PackedSequences:
    """Packed sequences, with unused rows before the first and after the last.

    Sequences may be empty, have a single row, lack keys, exceed a tile or end within a tile.
    """

    feature, before, after = "ragged", 2, 3
    rows, keys = (5, 0, 17, 1, 73, 0), (9, 4, 17, 0, 150, 0)
    used = np.array([5, 0, 9, 1, 70, 0]), np.array([0, 4, 17, 0, 99, 0])
    partly = ({"used": used},)
    options = (
        {"dropout": Dropout(0.3, 5), "alibi_slopes": np.arange(12, dtype=F).reshape(6, 2) / 40},
    )

    def __init__(self):
        self.lengths = [self.starts(x) for x in (self.rows, self.keys)]

    def starts(self, lengths):
        return np.cumsum([self.before, *lengths]).astype(np.int32)

    def drawn(self, dtype, d=24, value=None):
        """Returns random q, k and v; `value` fills all rows except the third sequence's."""
        made = []
        for i, (starts, heads) in enumerate(zip(self._of_arrays(self.lengths), (2, 1, 1))):
            array = random(starts[-1] + self.after, heads, d, dtype=dtype, seed=i)
            if value is not None:
                array[: starts[2]] = array[starts[3] :] = value
            made.append(array)
        return made

    @staticmethod
    def _of_arrays(of_both):
        rows, keys = of_both
        return rows, keys, keys

    def wrapped(self, arrays, lengths=None, used=(None, None)):
        of = zip(arrays, self._of_arrays(lengths or self.lengths), self._of_arrays(used))
        return [Packed(*x) for x in of]

    def unspoilt(self, out, lse):
        """Returns the third sequence's results, which do not depend on `value`."""
        third = slice(*self.lengths[0][2:4])
        return out[third], lse[:, third]

    def sequences(self, arrays, out, lse):
        (q, k, v), (rows, keys) = arrays, self.lengths
        for i in range(len(self.rows)):
            own, read = slice(*rows[i : i + 2]), slice(*keys[i : i + 2])
            of_heads = (x.swapaxes(0, 1) for x in (q[own], k[read], v[read], out[own]))
            yield *of_heads, lse[:, own]

    def spoil(self, array):
        """Changes nothing: rows outside all sequences have unspecified contents."""

    def outside(self, array, i):
        return array[: self.before], array[self._of_arrays(self.lengths)[i][-1] :]


class PaddedSequences:
    """Padded batch elements: without queries, without keys, full, or ending within a tile."""

    feature, M, N = "lengths", 70, 150
    rows, keys = lengths = (0, 70, 33, 5), (90, 0, 41, 150)
    partly = {"lengths": (rows, None)}, {"lengths": (None, keys)}
    options = (
        {"dropout": Dropout(0.3, 5), "alibi_slopes": np.arange(8, dtype=F).reshape(4, 2) / 40},
        {"bias": random(4, 1, M, N, dtype="float16"), "causal": True},
        {
            "mask": np.random.default_rng(7).random((1, 2, M, N)) < 0.7,
            "bias": random(1, 1, M, N, dtype="float32"),
        },
    )

    def drawn(self, dtype, d=24, value=np.nan, heads=2, lengths=lengths, sizes=(M, N)):
        """Returns random q, k and v with `value` beyond the lengths."""
        q = random(4, heads, sizes[0], d, dtype=dtype)
        k, v = (random(4, 1, sizes[1], d, dtype=dtype, seed=x) for x in (1, 2))
        rows, keys = lengths
        for array, own in ((q, rows), (k, keys), (v, keys)):
            self._set(array, own, value)
        return q, k, v

    @staticmethod
    def _set(array, lengths, value):
        for element, length in zip(array, lengths or ()):
            element[:, length:] = value

    def wrapped(self, arrays, lengths=lengths):
        return wrap(*arrays, dict(zip(("lengths_q", "lengths_k"), lengths)))

    def unspoilt(self, out, lse):
        return out, lse

    def sequences(self, arrays, out, lse):
        q, k, v = arrays
        for i, (rows, keys) in enumerate(zip(self.rows, self.keys)):
            yield q[i, :, :rows], k[i, :, :keys], v[i, :, :keys], out[i, :, :rows], lse[i, :, :rows]

    def spoil(self, array):
        self._set(array, self.rows, np.nan)

    def outside(self, array, i):
        return [x[:, length:] for x, length in zip(array, self.lengths[min(i, 1)])]


PACKED, PADDED = FORMS = PackedSequences(), PaddedSequences()
OPTIONS = (
    {"causal": True},
    {"causal": True, "softcap": 3.0},
    {"causal": "top-left", "score_mod": "score + 0.1 * (position - key) + 0.01 * batch * queries"},
    {"window": (9, 3), "sink": np.array([0.5, -1.0], F)},
    {"mask": "key <= query + keys - queries", "scale": -0.3},
)


def kernels(form, operation="forward"):
    return able(form.feature, operation)


def each(operation="forward", quick=QUICK):
    """Returns test parameters (form, kernel) and marks kernels that are not in `quick` as slow."""
    return [
        pytest.param(form, *x.values, id=f"{form.feature}-{x.id}", marks=x.marks)
        for form in FORMS
        for x in usual_first(kernels(form, operation), quick)
    ]


def in_turn(operation):
    """Returns test parameters (form, kernel, options).

    Each kernel runs with a causal mask, and in slow tests with two other sets of options.
    """
    found = [
        pytest.param(*x.values, OPTIONS[0], id=f"{x.id}-causal", marks=x.marks)
        for x in each(operation)
    ]
    for form in FORMS:
        options = (*OPTIONS[1:], *form.options)
        for i, kernel in enumerate(kernels(form, operation) * 2):
            how = options[i % len(options)]
            label = f"{form.feature}-{kernel.name}-{','.join(how)}"
            found.append(pytest.param(form, kernel, how, id=label, marks=pytest.mark.slow))
    return found


def forward(form, kernel, backend, arrays, given=None, **options):
    """Returns out and lse; ``given`` holds arguments of ``wrapped``."""
    how = {"kernel": kernel, "backend": backend, "return_lse": True, **options}
    return cupyfa.attention(*form.wrapped(arrays, **given or {}), **how)


@pytest.mark.parametrize("form, kernel, how", in_turn("forward"))
def test_every_sequence_has_its_own_result(backend, form, kernel, how):
    forward(form, kernel, backend, form.drawn(usual_dtype(kernel)), check=True, **how)


@pytest.mark.parametrize("form, kernel", each(quick=FEW))
def test_lengths_of_queries_or_of_keys_alone(backend, form, kernel):
    """Tests padded arrays with lengths of only queries or keys, and packed arrays with `used`."""
    for given in form.partly:
        given_arrays = form.drawn(usual_dtype(kernel))
        forward(form, kernel, backend, given_arrays, given, check=True, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("form, kernel", each())
def test_a_sequence_has_the_bits_of_the_dense_call(backend, form, kernel):
    if form is PADDED and "split_kv" in kernel.name:
        pytest.skip("the number of splits is that of the longest element")
    arrays = form.drawn(usual_dtype(kernel), value=0)  # rows with NaN are computed differently
    on = {"kernel": kernel, "backend": backend}
    tiles = cupyfa.plan(**on, M=200, d=24, dtype=str(arrays[0].dtype)).constants
    how = {**on, "causal": True, "tiles": tiles}
    out, lse = forward(form, arrays=arrays, **how)
    for *own, out_of_own, lse_of_own in form.sequences(arrays, out, lse):
        dense = cupyfa.attention(*own, return_lse=True, **how)
        assert out_of_own.tobytes() == dense[0].tobytes()
        assert lse_of_own.tobytes() == dense[1].tobytes()


@pytest.mark.parametrize("form, kernel", each(quick=FEW))
def test_numbers_of_others_do_not_matter(backend, form, kernel):
    """Changes the values of other sequences and the padding; results must not change."""
    once, of_another, of_nan = (
        form.unspoilt(*forward(form, kernel, backend, form.drawn(usual_dtype(kernel), value=value)))
        for value in (1, -2, np.nan)
    )
    for one, other, third in zip(once, of_another, of_nan):
        assert one.tobytes() == other.tobytes()
        np.testing.assert_allclose(one.astype(F), third.astype(F), rtol=2e-2, atol=1e-2)


def gradients(form, kernel, backend, given=None, d=24, has_dlse=False, **options):
    arrays = form.drawn(usual_dtype(kernel), d=d)
    out, lse = forward(form, "fa2", backend, arrays, given, **options)
    dout = random(*out.shape, dtype=out.dtype.name, seed=5)
    dlse = np.where(np.isfinite(lse), lse / 4, 0).astype(lse.dtype) if has_dlse else None
    if not given:
        for array in (dout, out, lse[..., None]):
            form.spoil(array)
    how = {"kernel": kernel, "backend": backend, "check": True, "dlse": dlse, **options}
    found = cupyfa.backward(dout, *form.wrapped(arrays, **given or {}), out, lse, **how)
    for i, array in enumerate(found):
        assert np.any(array)
        assert given or not any(np.any(x) for x in form.outside(array, i))


@pytest.mark.parametrize("form, kernel, how", in_turn("backward"))
def test_gradients_are_those_of_each_sequence(backend, form, kernel, how):
    gradients(form, kernel, backend, has_dlse=how is not OPTIONS[0], **how)


@pytest.mark.slow
@pytest.mark.parametrize("form, kernel", each("backward"))
def test_gradients_with_lengths_of_queries_or_of_keys_alone(backend, form, kernel):
    for given in form.partly:
        gradients(form, kernel, backend, given)


def test_blocks_that_share_a_group_take_each_tile(backend):
    """Sequences have two, one and two tiles of keys, in the order of ragged_order.cuh."""
    offsets = np.int32([0, 130, 135, 264])
    q, dout = (random(264, 2, 16, dtype="float16", seed=seed) for seed in (0, 1))
    k, v = random(2, 264, 1, 16, dtype="float16", seed=2)
    arrays, how = [Packed(x, offsets) for x in (q, k, v)], {"causal": True, "backend": backend}
    out, lse = cupyfa.attention(*arrays, return_lse=True, kernel="fa2", **how)
    given = (dout, *arrays, out, lse)
    plan = cupyfa.compile(*given, kernel="wgmma_columns", **how).plan
    assert any(x.constants.get("shares_groups") for x in plan.launches)
    cupyfa.backward(*given, kernel="wgmma_columns", check=True, **how)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.feature)
@pytest.mark.parametrize("kernel", ["wgmma_columns", "wgmma_two_pass", "wgmma_fp16x2_two_pass"])
def test_gradients_of_wide_heads(backend, form, kernel):
    gradients(form, BACKWARD[kernel], backend, d=160, causal=True)


@pytest.mark.parametrize("heads", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_splits_of_elements_with_few_keys_have_none(backend, heads, dtype):
    """Uses at least three splits, some of them without keys. Four heads share a tile of rows."""
    kernel, lengths = FORWARD["mma_split_kv"], ((3, 2, 3, 0), (400, 0, 1, 130))
    arrays = PADDED.drawn(dtype, heads=heads, lengths=lengths, sizes=(3, 400))
    tiles = {"Br": 16, "Bc": 16, "Wr": 16, "stages": 2, "blocks_per_sm": 8}
    how = {"tiles": tiles, "precision": "float16" if dtype == "float32" else None}
    sizes = {"heads": heads, "kv_heads": 1, "M": 3, "N": 400, "d": 24, "batch": 4}
    plan = cupyfa.plan(**sizes, kernel=kernel, dtype=dtype, lengths_k=True, backend=backend, **how)
    assert all(x.numbers["num_splits"] > 2 for x in plan.launches if x.numbers)
    given = {"lengths": lengths}
    for more in ({}, {"causal": True}, {"window": (30, 0), "sink": np.zeros(heads, F)}):
        forward(PADDED, kernel, backend, arrays, given, check=True, **how, **more)


@pytest.mark.parametrize("kernel", FEW)
def test_lengths_are_read_when_kernels_run(backend, kernel):
    arrays = PADDED.drawn(usual_dtype(FORWARD[kernel]), value=0)
    how = {"kernel": kernel, "backend": backend, "causal": True}
    prepared = cupyfa.compile(*PADDED.wrapped(arrays), **how)
    for keys in (PADDED.keys, (1, 2, 3, 150)):
        lengths = [np.array(x, "i4") for x in (PADDED.rows, keys)]
        out = prepared(*arrays, *lengths)
        assert out.tobytes() == cupyfa.attention(*PADDED.wrapped(arrays, lengths), **how).tobytes()


@pytest.mark.parametrize("kernel", usual_first(kernels(PADDED), FEW))
def test_wrong_lengths_of_a_kernel_stay_inside_the_arrays(backend, kernel, monkeypatch):
    # Models lengths in GPU memory, which the host does not check.
    monkeypatch.setattr(cupyfa.Prepared, "_with_lengths", lambda _, by_name: by_name)
    arrays = PADDED.drawn(usual_dtype(kernel), lengths=(None, None))
    how = {"kernel": kernel, "backend": backend}
    M, N = PADDED.M, PADDED.N
    kept = (0, M, M, 0)
    prepared = cupyfa.compile(*PADDED.wrapped(arrays, (kept, kept)), **how)
    wrong = [-1, M + 1, 2**31 - 1, -(2**31)], [N + 1, -1, 2**31 - 1, 7]
    out = prepared(*arrays, *(np.array(x, "i4") for x in wrong))
    right = cupyfa.attention(*PADDED.wrapped(arrays, (kept, (N, 0, N, 7))), **how)
    assert out.tobytes() == right.tobytes()


@pytest.mark.parametrize(
    "kernels",
    [
        ("fa2", "two_pass"),
        pytest.param(("mma_pipelined", "mma_columns"), marks=pytest.mark.slow),
        pytest.param(("wgmma_persistent", "wgmma_columns"), marks=pytest.mark.slow),
        pytest.param(("wgmma", "wgmma_two_pass"), marks=pytest.mark.slow),
    ],
    ids=lambda x: x[0],
)
@pytest.mark.parametrize("offsets", [(0, 9, 4, 4), (-7, 5, 90, 7), (30, 20, 10, 0)], ids=str)
def test_wrong_offsets_of_a_kernel_stay_inside_the_arrays(backend, kernels, offsets, monkeypatch):
    monkeypatch.setattr(cupyfa.runtime.ragged, "_check_offsets", lambda *_: None)
    dtype = "float32" if kernels[0] == "fa2" else "float16"
    arrays = [random(20, heads, 24, dtype=dtype) for heads in (2, 1, 1)]
    given = {"lengths": [np.array(offsets, "i4")] * 2}
    out, lse = forward(PACKED, kernels[0], backend, arrays, given)
    wrapped = PACKED.wrapped(arrays, **given)
    cupyfa.backward(np.ones_like(out), *wrapped, out, lse, kernel=kernels[1], backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form, before, after",
    [
        (PACKED, [(0, 10, 60, 90)] * 2, [(0, 45, 46, 90)] * 2),
        (PADDED, PADDED.lengths, ((9, 1, 0, 70), (20, 150, 41, 3))),
    ],
    ids=["packed", "padded"],
)
@pytest.mark.parametrize("kernel", ["fa2", "mma_pipelined", "mma_split_kv", "wgmma_persistent"])
def test_a_graph_takes_other_lengths(cuda, kernel, form, before, after):
    import cupy

    if form.feature not in FORWARD[kernel].features:
        pytest.skip(f"{kernel} does not support {form.feature}")
    dtype = usual_dtype(FORWARD[kernel]).replace("bfloat16", "float16")
    arrays = list(map(cupy.asarray, form.drawn(dtype)))
    before, after = ([np.array(x, "i4") for x in lengths] for lengths in (before, after))
    lengths = list(map(cupy.asarray, before))
    stream = cupy.cuda.Stream(non_blocking=True)

    def call(lengths):
        return forward(form, kernel, "cuda", arrays, {"lengths": lengths}, causal=True)

    with stream:
        call(lengths)
        stream.begin_capture()
        out, lse = call(lengths)
        graph = stream.end_capture()
        for array in arrays:
            array[...] = cupy.nan_to_num(array)
        for array, x in zip(lengths, after):
            array.set(x)
        graph.launch(stream)
        wanted = call(after)
        stream.synchronize()
    assert out.get().tobytes() == wanted[0].get().tobytes()
    assert lse.get().tobytes() == wanted[1].get().tobytes()
