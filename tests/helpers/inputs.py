"""Calls with each sort of optional input, on host or device arrays.

A path is a form of q, k and v: dense arrays, padded or packed sequences, lists, or a KV cache.
"""

import numpy as np

import cupyfa
from cupyfa import Dropout, Packed, Padded
from cupyfa.problem.optional_inputs import OPTIONAL_INPUTS

F = np.float32
BATCH, HEADS, KV_HEADS, M, D = 2, 4, 2, 20, 16
OFFSETS = np.array([0, 8, 20], np.int32)
LENGTHS = np.array([20, 7], np.int32)
SLOPES = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], F)
PAIRS = np.random.default_rng(9).standard_normal((1, HEADS, M, M)).astype(F)
PATHS = ("dense", "padded", "packed", "lists", "cache")
HOW = {"kernel": "fa2"}
BACKWARD = {"backward_kernel": "two_pass"}

# Maps sorts of optional inputs to arguments of a call, whose arrays may be in any memory.
SORTS = {
    "nothing": {},
    "number": {"score_mod": "score * c1", "captured": {"c1": 0.5}},
    "array": {"score_mod": "score + x[head]", "captured": {"x": SLOPES[0]}},
    "both": {"score_mod": "score * c1 + x[head]", "captured": {"c1": 2, "x": SLOPES[0]}},
    "whole numbers": {"mask": "key % n[0] != 1", "captured": {"n": np.array([3])}},
    "softcap": {"softcap": 2.0},
    "seed": {"dropout": Dropout(0.25, 7)},
    "seed in memory": {"dropout": Dropout(0.25, np.array([7]))},
    "seed and offset in memory": {"dropout": Dropout(0.25, np.array([7]), np.array([3], np.int32))},
    "sink": {"sink": SLOPES[0]},
    "slopes": {"alibi_slopes": SLOPES},
    "bias": {"bias": PAIRS},
    "mask": {"mask": PAIRS > -1},
    "blocks": {"mask": "blocks"},
}
_OF_PAIRS = "bias", "mask", "blocks"


def sorts_of(path):
    """Yields the sorts of inputs that calls of a path accept."""
    for sort, given in SORTS.items():
        if path not in ("dense", "padded") and sort in _OF_PAIRS:
            continue
        if path == "padded" and sort == "blocks":
            continue
        if path == "cache" and "dropout" in given:
            continue
        yield sort


def optional_arrays(name, *sizes):
    """Returns two random arrays, each a valid value of the optional array with this name.

    sizes: batch, heads, M and N of the call.
    """
    record = OPTIONAL_INPUTS[name]
    by_axis = dict(zip(("batch", "heads", "M", "N"), sizes, strict=True))
    shape = tuple(by_axis[axis] for axis in record.axes)
    drawn = np.random.default_rng(0).standard_normal((2, *shape)).astype(F)
    return drawn > 0 if record.dtype == "bool" else drawn


def placed(given, put):
    """Applies ``put`` to the arrays in nested arguments."""
    if isinstance(given, dict):
        return {name: placed(x, put) for name, x in given.items()}
    if isinstance(given, Dropout):
        return Dropout(*(placed(x, put) for x in given))
    return put(given) if isinstance(given, np.ndarray) else given


class Calls:
    """The calls of a path with one sort of input.

    put transfers the NumPy arrays q, k and v to a memory, put_read all other arrays. get transfers
    results back.
    """

    def __init__(self, path, sort, backend, put, put_read, get):
        self.path, self.put, self.put_read, self.get = path, put, put_read, get
        self.how = {"backend": backend, **HOW}
        self.given = placed(SORTS[sort], put_read)
        if sort == "blocks":
            blocks = cupyfa.block_mask(mask_mod="key <= query + 3", M=M, N=M, backend=backend)
            self.given = {"mask": blocks}

    def results(self):
        """Calls every function of the path; returns lists of NumPy arrays by function."""
        found = getattr(self, f"_{self.path}")()
        return {name: [self.get(x) for x in flat(made)] for name, made in found.items()}

    def _qkv(self):
        q, k, v = (np.random.default_rng(i).standard_normal((BATCH, HEADS, M, D)) for i in range(3))
        return [self.put(x.astype(F)) for x in (q, k[:, :KV_HEADS], v[:, :KV_HEADS])]

    def _named(self):
        """Returns the arrays that a prepared call accepts as keyword arguments."""
        given = {**self.given, **self.given.get("captured", {})}
        if "dropout" in given:
            given |= {f"dropout_{x}": y for x, y in given["dropout"]._asdict().items()}
        return {name: x for name, x in given.items() if isinstance(x, list) or hasattr(x, "shape")}

    def _dense(self):
        return self._calls(*self._qkv())

    def _calls(self, q, k, v):
        how = {**self.how, **self.given}
        out, lse = cupyfa.attention(q, k, v, return_lse=True, **how)
        again = [cupyfa.attention(q, k, v, **how) for _ in range(3)]
        made, pull = cupyfa.vjp(q, k, v, **how, **BACKWARD)
        prepared = cupyfa.compile(q, k, v, **how)
        named = self._named()
        backward = {**how, "kernel": BACKWARD["backward_kernel"]}
        gradients = cupyfa.compile(out, q, k, v, out, lse, **backward)
        return {
            "attention": (out, lse, *again, made),
            "prepared": [prepared(q, k, v, **named) for _ in range(3)],
            "pullback": pull(out),
            "prepared backward": gradients(out, q, k, v, lse=lse, out=out, **named),
        }

    def _padded(self):
        rows, keys = (self.put_read(x) for x in (LENGTHS, LENGTHS[::-1].copy()))
        q, k, v = self._qkv()
        return self._calls(Padded(q, rows), Padded(k, keys), Padded(v, keys))

    def _packed(self):
        rows, keys = (self.put_read(OFFSETS) for _ in "qk")
        offsets = rows, keys, keys
        arrays = [Packed(x.swapaxes(1, 2)[0], of) for x, of in zip(self._qkv(), offsets)]
        how = {**self.how, **self.given}
        out, lse = cupyfa.attention(*arrays, return_lse=True, **how)
        made, pull = cupyfa.vjp(*arrays, **how, **BACKWARD)
        prepared = cupyfa.compile(*arrays, **how)
        return {
            "attention": (out, lse, made),
            "prepared": prepared(*arrays, **self._named()),
            "pullback": pull(out),
        }

    def _lists(self):
        q, k, v = self._qkv()
        lists = [[x[0][:, :9], x[1]] for x in (q, k, v)]
        how = {**self.how, **self.given}
        out, pull = cupyfa.vjp(*lists, **how, **BACKWARD)
        return {"attention": cupyfa.attention(*lists, **how), "vjp": out, "pullback": pull(out)}

    def _cache(self):
        q, k, v = self._qkv()
        lengths = [20, 7] if self.put_read is np.ndarray.tolist else self.put(LENGTHS)
        cache = cupyfa.KVCache(k, v, lengths, layout="bhsd")
        return {
            "decode": cupyfa.attention(
                q[:, :, :2], cache, return_lse=True, **self.how, **self.given
            )
        }


def flat(made):
    if isinstance(made, list | tuple):
        return [y for x in made for y in flat(x)]
    return [made]


def require_equal(got, wanted):
    """Asserts that the results of two ``Calls`` are equal bit by bit."""
    assert got.keys() == wanted.keys()
    for name, arrays in got.items():
        for mine, its in zip(arrays, wanted[name], strict=True):
            np.testing.assert_array_equal(mine, its, err_msg=name)
