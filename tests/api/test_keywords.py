"""Keyword arguments of all functions: defaults, types, and kernels that accept them."""

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import cupyfa
from cupyfa import Dropout, Packed, Padded, Problem
from cupyfa.lab.bench import sweeps
from cupyfa.problem.options import OPTIONS, AttentionOptions

F = np.float32
Q = np.random.default_rng(0).standard_normal((1, 2, 5, 16)).astype(F)
LSE = np.ones((1, 2, 5), F)
ROWS, OFFSETS = Q[0].swapaxes(0, 1), np.array([0, 2, 5], np.int32)
SIM = {"backend": "simulator", "kernel": "fa2"}
BACK = {"backend": "simulator", "kernel": "columns"}


PACKED = [Packed(ROWS, OFFSETS)] * 3


def decoded(**how):
    x = np.ones((1, 2, 8, 16), F)
    cache = cupyfa.KVCache(x, x, np.ones(1, np.int32))
    return cupyfa.attention(Q[:, :, :1], cache, backend="simulator", **how)


def of_dask(function):
    def call(**how):
        pytest.importorskip("cupyfa.dask")
        da = pytest.importorskip("dask.array")
        x = da.from_array(Q, chunks=(1, 1, 3, -1))
        return function(x, x, x, **SIM, **how)

    return call


def of_ranks(function):
    def call(**how):
        from cupyfa import distributed

        def run(group):
            return function(*[distributed.Sharded(Q, group)] * 3, **SIM, **how)

        return distributed.threads(1, run)

    return call


# Maps test ids to calls of every function that accepts options.
FUNCTIONS = {
    "attention": lambda **how: cupyfa.attention(Q, Q, Q, **SIM, **how),
    "lists": lambda **how: cupyfa.attention([Q[0]], [Q[0]], [Q[0]], **SIM, **how),
    "backward": lambda **how: cupyfa.backward(Q, Q, Q, Q, Q, LSE, **BACK, **how),
    "vjp": lambda **how: cupyfa.vjp(Q, Q, Q, **SIM, **how),
    "vjp of lists": lambda **how: cupyfa.vjp([Q[0]], [Q[0]], [Q[0]], **SIM, **how),
    "ragged": lambda **how: cupyfa.attention(*PACKED, **SIM, **how),
    "ragged backward": lambda **how: cupyfa.backward(ROWS, *PACKED, ROWS, LSE[0], **BACK, **how),
    "ragged vjp": lambda **how: cupyfa.vjp(*PACKED, **SIM, **how),
    "decode": decoded,
    "compile": lambda **how: cupyfa.compile(Q, Q, Q, **SIM, **how),
    "compile of shapes": lambda **how: cupyfa.compile(
        Q.shape, Q.shape, Q.shape, dtype=F, **SIM, **how
    ),
    "compile of gradients": lambda **how: cupyfa.compile(Q, Q, Q, Q, Q, LSE, **BACK, **how),
    "plan": lambda **how: cupyfa.plan(M=5, d=16, **SIM, **how),
    "dask": of_dask(cupyfa.attention),
    "dask vjp": of_dask(cupyfa.vjp),
    "ranks": of_ranks(cupyfa.attention),
    "ranks vjp": of_ranks(cupyfa.vjp),
}
# Explicit values that equal the default of an option.
DEFAULTS = {"causal": False} | dict.fromkeys(
    ("window", "offset", "scale", "softcap", "score_mod", "mask", "dropout", "precision")
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_defaults_may_be_given(function):
    """Functions also accept None for optional arrays."""
    arrays = dict.fromkeys(("alibi_slopes", "bias", "sink", "captured"))
    FUNCTIONS[function](**DEFAULTS, **arrays)


def test_problems_take_none_for_the_default_of_an_option():
    unset, sizes = dict.fromkeys(OPTIONS), {"M": 5, "d": 16}
    assert Problem.of_sizes(**sizes, **unset) == Problem.of_sizes(**sizes)
    assert list(sweeps.problems("forward", {**sizes, **unset})) == list(
        sweeps.problems("forward", sizes)
    )


# Maps former keywords to the replacement that the error suggests.
FORMER = {
    "mask_mod": 'mask="key <= query"',
    "out_dtype": 'out="float32"',
    "dropout_seed": "Dropout(rate, seed, offset)",
    "dropout_offset": "Dropout(rate, seed, offset)",
    "options": "**options",
    "own": "kernel.bind(",
    "return_own": "kernel.bind(",
    "devices": 'backend=Devices("all")',
    "progress": "backend=Devices(progress=",
    "lengths_q": "Padded(q, lengths_q)",
    "lengths_k": "Padded(k, lengths_k)",
    "cu_seqlens_q": "Packed(q, cu_seqlens_q)",
    "cu_seqlens_k": "Packed(k, cu_seqlens_k)",
    "seqused_q": "Packed(q, offsets, used=",
    "seqused_k": "Padded(k, lengths)",
    "q_descale": "Scaled(q, q_descale)",
    "k_descale": "Scaled(k, k_descale)",
    "v_descale": "Scaled(v, v_descale)",
    "rotary": "KVCache(…, rotary=",
    "prefix": "KVCache(…, prefix=",
    "interleaved": "Rotary(cos, sin, interleaved=True)",
    "splits": 'tiles={"splits": n}',
}


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "function, name",
    [x for x in product(FUNCTIONS, FORMER) if x[0] != "plan" or not x[1].startswith("lengths_")],
)
def test_a_former_keyword_shows_what_to_write(function, name):
    with pytest.raises(TypeError, match=f"no argument '{name}'; .*{re.escape(FORMER[name])}"):
        FUNCTIONS[function](**{name: 1})


# Types of keyword arguments

FLAGS = {
    "check": ("attention", "backward", "vjp", "ragged", "ragged backward", "decode", "lists"),
    "return_lse": ("attention", "vjp", "vjp of lists", "ragged", "ragged vjp", "decode", "compile"),
    "deterministic": ("backward", "vjp", "ragged backward", "ragged vjp", "compile of gradients"),
}
FLAGS["check"] += ("dask", "dask vjp", "ranks", "ranks vjp")
FLAGS["return_lse"] += ("dask", "dask vjp", "ranks", "ranks vjp")
FLAGS["deterministic"] += ("dask vjp", "ranks vjp")


@pytest.mark.parametrize("value", ["no", 1, 0.0, [True], np.array([1])], ids=repr)
@pytest.mark.parametrize("name, function", [(x, y) for x, every in FLAGS.items() for y in every])
def test_flags_are_true_or_false(name, function, value):
    with pytest.raises(TypeError, match=rf"{name} is .*; pass True or False"):
        FUNCTIONS[function](**{name: value})


def test_flags_may_be_of_numpy():
    assert cupyfa.attention(Q, Q, Q, check=np.bool_(False), **SIM).shape == Q.shape


NUMBERS = {"scale": 0.5, "softcap": 3, "rate": 0.25, "offset": 3, "causal": True}


@pytest.mark.parametrize(
    "of",
    [
        np.array,
        lambda x: np.float64(x) if isinstance(x, float) else np.array(x)[()],
        lambda x: ml_dtypes.bfloat16(x) if isinstance(x, float) else np.array(x),
        lambda x: np.array(x, ml_dtypes.bfloat16) if isinstance(x, float) else np.array(x),
    ],
    ids=["array", "scalar", "bfloat16", "array of bfloat16"],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_arrays_without_axes(name, of):
    more = {"causal": True} if name == "offset" else {}

    def call(x):
        given = {"dropout": Dropout(x, 1)} if name == "rate" else {name: x}
        return cupyfa.attention(Q, Q, Q, **given, **more, **SIM).tobytes()

    assert call(of(NUMBERS[name])) == call(NUMBERS[name])
    more |= {"dropout_seed": 1} if name == "rate" else {}
    option = "dropout" if name == "rate" else name
    read = [AttentionOptions(**{option: x}, **more) for x in (of(NUMBERS[name]), NUMBERS[name])]
    assert read[0] == read[1]


def test_an_array_without_axes_may_change_between_calls():
    scale = np.array(0.5)
    found = cupyfa.attention(Q, Q, Q, scale=scale, **SIM)
    scale[...] = 0.5 + 2**-50  # differs in digits that repr of an array omits
    again = cupyfa.attention(Q, Q, Q, scale=scale, **SIM)
    scale[...] = 0.25
    other = cupyfa.attention(Q, Q, Q, scale=scale, **SIM)
    assert found.tobytes() == again.tobytes() != other.tobytes()


LISTS = {
    "alibi_slopes": [0.5, 0.25],
    "sink": (1.0, -1.0),
    "bias": [[0.5] * 5] * 5,
    "mask": [[True, False, True, True, False]] * 5,
    "captured": {"x": [0.5, 2.0], "n": (3,)},
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_arrays(name):
    def as_arrays(x):
        return {y: as_arrays(z) for y, z in x.items()} if isinstance(x, dict) else np.array(x)

    text = {"score_mod": "score * x[head] + n[0]"} if name == "captured" else {}
    how = {**SIM, **text}
    results = []
    for given in (LISTS[name], as_arrays(LISTS[name])):
        out, pull = cupyfa.vjp(Q, Q, Q, backward_kernel="two_pass", **{name: given}, **how)
        results.append([x.tobytes() for x in (out, *pull(Q))])
        prepared = cupyfa.compile(Q, Q, Q, **{name: given}, **how)
        named = given if isinstance(given, dict) else {name: given}
        assert prepared(Q, Q, Q, **named).tobytes() == results[-1][0]
    assert results[0] == results[1]


def test_lists_of_lengths_are_arrays():
    results = []
    for rows, keys in (([3], (4,)), (np.array([3]), np.array([4]))):
        arrays = Padded(Q, rows), Padded(Q, keys), Padded(Q, keys)
        out, pull = cupyfa.vjp(*arrays, backward_kernel="two_pass", **SIM)
        results.append([x.tobytes() for x in (out, *pull(Q))])
        prepared = cupyfa.compile(*arrays, **SIM)
        assert prepared(*arrays).tobytes() == results[-1][0]
    assert results[0] == results[1]


def test_caches_take_lists_of_numbers():
    k = np.random.default_rng(1).standard_normal((3, 16, 2, 16)).astype(F)
    results = []
    for of in (list, lambda x: np.array(x, np.int32)):
        table = of([0, 2, 4]), of([2, 0, 1, 2]), of([3, 4])
        for cache in (
            cupyfa.KVCache(k, k, of([5, 20]), of([[2, 0], [1, 2]]), layout="bshd"),
            cupyfa.KVCache.from_csr(k, k, *table, layout="bshd"),
        ):
            results.append(cupyfa.attention(np.ones((2, 2, 1, 16), F), cache, backend="simulator"))
    np.testing.assert_array_equal(results[:2], results[2:])


# Kernel records, and scalars in cache keys

OF_RECORDS = {
    "number": {"score_mod": "score * c", "captured": {"c": 0.5}},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout": Dropout(0.5, 3)},
    "tiles": {"score_mod": "score + c", "captured": {"c": 1}, "tiles": {"Br": 32, "Bc": 32}},
    "mask": {"mask": "key != n", "captured": {"n": 2}},
}


@pytest.mark.parametrize("sort", OF_RECORDS)
def test_a_record_takes_numbers(sort):
    given = OF_RECORDS[sort]
    how = {"backend": "simulator", **given}
    records = {name: cupyfa.kernel(name) for name in ("fa2", "two_pass")}
    shared = {name: x for name, x in how.items() if name != "tiles"}
    wanted = cupyfa.attention(Q, Q, Q, kernel="fa2", return_lse=True, **how)
    for _ in range(3):
        found = cupyfa.attention(Q, Q, Q, kernel=records["fa2"], return_lse=True, **how)
        assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]
    gradients = [
        cupyfa.backward(Q, Q, Q, Q, *wanted, kernel=x, **shared)
        for x in ("two_pass", records["two_pass"])
    ]
    assert [x.tobytes() for x in gradients[0]] == [x.tobytes() for x in gradients[1]]
    prepared = cupyfa.compile(Q, Q, Q, kernel=records["fa2"], **how)
    assert prepared(Q, Q, Q).tobytes() == wanted[0].tobytes()


def test_records_keep_their_options_apart():
    """Calls with a record and different options are cached separately."""
    how = {"backend": "simulator", "score_mod": "score * c", "captured": {"c": 0.5}}
    record = cupyfa.kernel("fa2")
    for more in ({}, {"causal": True}, {"softcap": 1.0}, {"scale": 0.1}, {"captured": {"c": 2}}):
        named, given = (
            cupyfa.attention(Q, Q, Q, kernel=x, **{**how, **more}) for x in ("fa2", record)
        )
        assert named.tobytes() == given.tobytes()


def test_splits_of_decode_take_numbers():
    text = {"score_mod": "score * c", "captured": {"c": 0.5}}
    found = decoded(tiles={"splits": 2}, **text)
    np.testing.assert_allclose(found, decoded(**text), rtol=1e-6)


@pytest.mark.parametrize("kernel", ["fa2", "record"])
def test_zeros_of_two_signs_are_two_numbers(kernel):
    kernel = cupyfa.kernel("fa2") if kernel == "record" else kernel
    text = "score + 1 if 1 / c > 0 else score * key"
    how = {"backend": "simulator", "kernel": kernel, "score_mod": text}
    plus, minus = (cupyfa.attention(Q, Q, Q, captured={"c": c}, **how) for c in (0.0, -0.0))
    assert plus.tobytes() != minus.tobytes()


# Tile sizes of the two kernels of vjp


@pytest.mark.parametrize("function", ["vjp", "vjp of lists", "ragged vjp"])
def test_each_kernel_of_a_pullback_has_its_own_tiles(function, monkeypatch):
    seen, plan = [], cupyfa.api.planning.plan
    monkeypatch.setattr(
        cupyfa.api.planning,
        "plan",
        lambda kernel, *a, **given: seen.append((kernel.name, given)) or plan(kernel, *a, **given),
    )
    dout = {"vjp": Q, "vjp of lists": [Q[0]], "ragged vjp": ROWS}[function]
    tiles, own = {"Br": 32, "Bc": 16}, {"Bc": 16}
    for given in ({"tiles": tiles}, {"backward_tiles": own}):
        seen.clear()
        _, pull = FUNCTIONS[function](scale=0.5 + len(given), backward_kernel="columns", **given)
        pull(dout)
        assert dict(seen) == {
            "fa2": given.get("tiles", {}),
            "columns": given.get("backward_tiles", {}),
        }


def test_gradients_are_deterministic_if_asked_for_everywhere():
    from inspect import signature

    for function in (cupyfa.vjp, cupyfa.backward):
        assert signature(function).parameters["deterministic"].default is False


# Error messages


@pytest.mark.parametrize("wrong", [{"tiles": {"Br": 64.0}}, {"layout": ["bhsd"]}, {"dropout": 0.5}])
def test_a_refused_call_is_refused_again(wrong):
    """A rejected call is not cached."""
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="Br=64.0|layout is|dropout is"):
            cupyfa.attention(Q, Q, Q, **wrong, **SIM)
