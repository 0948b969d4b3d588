"""Sizes of 0 on every path: sequences, batch elements, rows, keys, heads and columns."""

import ml_dtypes
import numpy as np
import pytest

import cupyfa
from cupyfa import Dropout, Packed
from cupyfa.problem.structured_arrays import wrap

F = np.float32
SIM = {"backend": "simulator"}
SIZES = {"batch": 2, "heads": 2, "M": 3, "N": 4, "d": 8, "dv": 8}
DTYPES = ("float32", "float64", "float16", ml_dtypes.bfloat16)


# Packed arrays without sequences


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel, back", [("fa2", "columns"), ("auto", "auto")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [7, 0])
def test_packed_rows_of_no_sequence(backend, dtype, rows, kernel, back):
    x, offsets = np.ones((rows, 2, 16)).astype(dtype), np.zeros(1, np.int32)
    more = {"alibi_slopes": np.ones((0, 2), F), "sink": np.ones((0, 2), F)}
    more |= {"captured": {"x": np.ones(0, F)}, "score_mod": "score + x[batch]"}
    for given, used in (({}, None), (more, [])):
        (out, lse), pull = cupyfa.vjp(
            *(Packed(x, offsets), Packed(x, offsets, used), Packed(x, offsets, used)),
            return_lse=True,
            causal=True,
            kernel=kernel,
            backward_kernel=back,
            backend=backend,
            **given,
        )
        gradients = pull(out)
        assert [y.shape for y in (out, *gradients)] == [x.shape] * 4
        assert not any(np.any(y) for y in (out, *gradients)) and (lse == -np.inf).all()
        assert lse.shape == (2, rows)


@pytest.mark.parametrize("rows", [7, 0])
@pytest.mark.parametrize(
    "places, shape", [("batch", (0,)), ("batch, head", (0, 2)), ("head, batch", (2, 0))]
)
def test_prepared_calls_of_no_sequence_with_captured_arrays(backend, rows, places, shape):
    x, offsets, read = np.ones((rows, 2, 16), F), np.zeros(1, np.int32), np.ones(shape, F)
    of = {"score_mod": f"score + x[{places}]", "kernel": "fa2", "backend": backend}
    of_arrays = cupyfa.compile(*[Packed(x, offsets)] * 3, captured={"x": read}, **of)
    assert not np.any(of_arrays(*[Packed(x, offsets)] * 3, captured={"x": read}))
    shapes = [Packed(x.shape, offsets.shape)] * 3
    of_shapes = cupyfa.compile(*shapes, dtype=F, captured={"x": shape}, **of)
    x, offsets, read = map(backend.upload, (x, offsets, read))
    made = of_shapes(*[Packed(x, offsets)] * 3, captured={"x": read})
    assert not np.any(backend.download(made))


def test_lists_of_no_array():
    assert cupyfa.attention([], [], [], **SIM) == []
    assert cupyfa.attention((), (), (), return_lse=True, causal=True, **SIM) == ([], [])
    out = []
    assert cupyfa.attention([], [], [], out=out, **SIM) == []
    for return_lse, wanted in ((False, []), (True, ([], []))):
        made, pull = cupyfa.vjp([], [], [], return_lse=return_lse, **SIM)
        assert made == wanted and pull([]) == ([], [], [])
    assert pull([], []) == ([], [], [])
    with pytest.raises(TypeError, match="dout is .*; pass an empty list"):
        pull(np.ones(3))
    x = np.ones((2, 3, 16), F)
    for lists in (([], [x], [x]), ([x], [], [x]), ([x], [x], [])):
        with pytest.raises(ValueError, match="has 0 arrays.*; pass lists of equal length"):
            cupyfa.attention(*lists, **SIM)


# Arrays with a size of 0


def inputs(**sizes):
    """Makes q, k, v and a dict of optional inputs; ``sizes`` overrides SIZES."""
    s = {**SIZES, **sizes}
    B, H, M, N = (s[x] for x in ("batch", "heads", "M", "N"))
    q, k, v = (
        np.ones((B, H, rows, s[columns]), F) for rows, columns in ((M, "d"), (N, "d"), (N, "dv"))
    )
    blocks = {"batch": B, "heads": H, "M": M, "N": N, **SIM}
    sorts = {
        "causal": {"causal": True},
        "window": {"window": (3, 3)},
        "dropout": {"dropout": Dropout(0.5, np.array([3]))},
        "softcap": {"softcap": 3.0},
        "slopes": {"alibi_slopes": np.ones((B, H), F), "wrt": "q,alibi_slopes"},
        "bias": {"bias": np.ones((B, H, M, N), F), "wrt": "v,bias"},
        "mask": {"mask": np.ones((B, H, M, N), bool)},
        "sink": {"sink": np.ones(H, F), "wrt": "sink"},
        "lengths": {"lengths_q": np.zeros(B, np.int32), "lengths_k": [0] * B},
        "array": {"score_mod": "score + x[query] * c", "captured": {"x": np.ones(M, F), "c": 0.5}},
        "blocks": {"mask": cupyfa.block_mask(mask_mod="key <= query", **blocks)},
        "offset of slopes": {"offset": 2, "alibi_slopes": np.ones((B, H), F)},
        "offset of a score": {"offset": 2, "score_mod": "score + position"},
        "offset of a mask": {"offset": 2, "mask": "key <= position"},
        "offset of blocks": {
            "offset": 2,
            "mask": cupyfa.block_mask(mask_mod="key <= position", **blocks),
        },
    }
    return (q, k, v), sorts


ZEROS = {name: {name: 0} for name in SIZES} | {"all": dict.fromkeys(SIZES, 0)}


@pytest.mark.each_choice
@pytest.mark.parametrize("sort", inputs()[1])
@pytest.mark.parametrize("sizes", ZEROS)
def test_no_elements_with_every_input(sizes, sort):
    (q, k, v), sorts = inputs(**ZEROS[sizes])
    given = dict(sorts[sort])
    wrt = given.pop("wrt", "q,k,v")
    lengths = {x: given.pop(x) for x in ("lengths_q", "lengths_k") if x in given}
    arrays = wrap(q, k, v, lengths)
    (out, lse), pull = cupyfa.vjp(*arrays, return_lse=True, wrt=wrt, **given, **SIM)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
    named = {"q": q, "k": k, "v": v, **given, **given.get("captured", {})}
    for name, x in zip(wrt.split(","), pull(out), strict=True):
        assert x.shape == named[name].shape and not np.isnan(x).any()
    assert not np.isnan(out).any()
    prepared = cupyfa.compile(*arrays, **given, **SIM)
    if "dropout" in given:
        named["dropout_seed"] = given["dropout"].seed
    named = {x: y for x, y in (named | lengths).items() if hasattr(y, "dtype") or x in lengths}
    assert prepared(**named).shape == out.shape


CACHES = {
    "no batch": {"batch": 0},
    "no tokens": {"tokens": 0},
    "no capacity": {"capacity": 0},
    "no heads": {"heads": 0},
    "no values": {"dv": 0},
    "no columns": {"d": 0},
    "nothing": dict.fromkeys(("batch", "tokens", "capacity", "heads", "d", "dv"), 0),
    "pages of no sequence": {"batch": 0, "pages": 2},
    "pages without tokens": {"tokens": 0, "pages": 2},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("sizes", CACHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_of_no_elements(sizes, dtype):
    usual = {"batch": 2, "tokens": 1, "capacity": 8, "heads": 2, "d": 16, "dv": 16, "pages": None}
    s = {**usual, **CACHES[sizes]}
    rows = (s["batch"], s["capacity"]) if s["pages"] is None else (s["pages"], 16)
    table = None if s["pages"] is None else np.zeros((s["batch"], 1), np.int32)

    def of(*shape):
        return np.ones(shape).astype(dtype)

    q = of(s["batch"], 2 * s["heads"], s["tokens"], s["d"])
    new = tuple(of(s["batch"], s["heads"], s["tokens"], s[x]) for x in ("d", "dv"))
    slopes = {"alibi_slopes": np.ones(q.shape[:2], F), "sink": np.ones(q.shape[1], F)}
    shared = of(1, s["heads"], 3, s["d"]), of(1, s["heads"], 3, s["dv"])
    calls = [({}, None), ({"check": True}, None), ({"tiles": {"splits": 2}}, None), (slopes, None)]
    calls += [({"append": new}, None)] if s["capacity"] else []
    calls += [({}, shared)] if s["batch"] else []
    for given, prefix in calls:
        k, v = (of(*rows, s["heads"], s[x]) for x in ("d", "dv"))
        lengths = np.zeros(s["batch"], np.int32)
        cache = cupyfa.KVCache(k, v, lengths, table, layout="bshd", prefix=prefix)
        out, lse = cupyfa.attention(q, cache, return_lse=True, **given, **SIM)
        assert out.shape == (*q.shape[:3], s["dv"]) and lse.shape == q.shape[:3]
        assert not np.isnan(out.astype(F)).any()


def test_other_functions_of_no_elements(tmp_path):
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 4)):
        found, lse = cupyfa.softmax(np.ones(shape, F), return_lse=True, check=True, **SIM)
        assert found.shape == shape and lse.shape == shape[:-1]
    for given in ({"mask": np.ones((0, 5), bool)}, {"mask_mod": "key <= query", "M": 0, "N": 0}):
        mask = cupyfa.block_mask(**given, **SIM)
        assert mask.density == 0.0 and 0 in mask.states(16, 16).shape[2:] and str(mask)
        assert (~(mask & mask)).sizes == mask.sizes
    sizes = {"batch": 0, "heads": 1, "M": 2, "N": 2}
    assert cupyfa.dropout_mask(Dropout(0.5, 1), **sizes).shape == (0, 1, 2, 2)
    assert cupyfa.empty_pinned((0, 3), **SIM).shape == (0, 3)
