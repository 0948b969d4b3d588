"""Sweeps: what a line of values means, and which problems come of it."""

import pytest

from cupyfa.bench import sweeps
from cupyfa.bench.sweeps import parsed, problems


@pytest.mark.parametrize(
    "text, expected",
    [
        ("d=64,128,1024", ("d", [64, 128, 1024])),
        ("M=512:16384:*2", ("M", [512, 1024, 2048, 4096, 8192, 16384])),
        ("M=3:30:*3", ("M", [3, 9, 27])),
        ("N=64:256:+64", ("N", [64, 128, 192, 256])),
        ("N=1:8:+3", ("N", [1, 4, 7])),
        ("B=2", ("batch", [2])),
        ("H=4,8", ("heads", [4, 8])),
        ("kv-heads=1", ("kv_heads", [1])),
        ("dtype=float16, bfloat16", ("dtype", ["float16", "bfloat16"])),
        ("causal=none,true,top-left", ("causal", [None, "bottom-right", "top-left"])),
        ("Br=16,32", ("Br", [16, 32])),
        ("scale=-0.5,2", ("scale", [-0.5, 2.0])),
    ],
)
def test_values(text, expected):
    assert parsed(text) == expected


def test_every_combination_in_order_and_once():
    found = problems("forward", {"M": [8, 16], "d": [4, 8, 4], "batch": 1})
    assert [(p.M, p.d) for p in found] == [(8, 4), (8, 8), (16, 4), (16, 8)]


def test_what_is_left_out_is_usual_or_follows():
    (p,) = problems("forward", {"M": 100, "kv_heads": None})
    assert (p.batch, p.heads, p.kv_heads, p.M, p.N, p.d, p.dv) == (4, 16, 16, 100, 100, 64, 64)
    assert (p.dtype.name, p.causal, p.scale) == ("float32", None, 1 / 8)
    assert [p.N for p in problems("forward", {"M": [8, 16], "N": 5})] == [5, 5]


def test_the_customary_grid():
    sizes = {"tokens": 16384, "width": 2048, "M": [512, 16384], "d": [64, 256], "causal": [0, 1]}
    found = problems("forward", {**sizes, "causal": [False, True]})
    assert len(found) == 8
    assert all(p.batch * p.M == 16384 and p.heads * p.d == 2048 == p.kv_heads * p.d for p in found)


def test_a_softmax_has_rows_and_no_d():
    (p,) = problems("softmax", {"d": 32})
    assert (p.M, p.N, p.d) == (16384, 4096, 0)
    assert [p.M for p in problems("softmax", {"M": [5, 7], "N": 3})] == [5, 7]
    assert sweeps.foreign("softmax", {"M": 3, "d": 4, "heads": None}) == ["d"]
    assert sweeps.foreign("forward", {"M": 3, "tokens": 4, "Br": 5}) == ["Br"]
