"""Block masks: tile states, set operations, drawings and errors."""

import numpy as np
import pytest
from helpers.pictures import assert_readable

import cupyfa
from cupyfa.arrays import block_mask
from cupyfa.lab.report import plots
from cupyfa.runtime import tile_maps

M, N = 150, 170
RNG = np.random.default_rng(0)
DOC = np.sort(RNG.integers(0, 6, N))
QUERY, KEY = np.arange(M)[:, None], np.arange(N)
POSITION = QUERY + N - M
# Mask expressions, the arrays that they capture, and the pairs that they leave visible.
TEXTS = {
    "doc[query] == doc[key]": ({"doc": DOC}, DOC[QUERY] == DOC[KEY]),
    "doc[query] == doc[key] and key <= position": (
        {"doc": DOC},
        (DOC[QUERY] == DOC[KEY]) & (KEY <= POSITION),
    ),
    "abs(position - key) < 20 or key < g": ({"g": 5}, (abs(POSITION - KEY) < 20) | (KEY < 5)),
    "(key // 32 + query // 16) % 3 == 0": ({}, (KEY // 32 + QUERY // 16) % 3 == 0),
    "key % 64 >= 60 or query % 2 == 1": ({}, (KEY % 64 >= 60) | (QUERY % 2 == 1)),
    "key < 40 or key <= query": ({}, (KEY < 40) | (KEY <= QUERY)),
    "weight[key] * 0.5 < 0.2": ({"weight": DOC / 6.0}, (DOC / 6 * 0.5 < 0.2) & (QUERY >= 0)),
}


def made(text="key <= query", captured=None, **sizes):
    sizes = {"M": M, "N": N, **sizes}
    return cupyfa.block_mask(mask_mod=text, captured=captured, **sizes, backend="simulator")


def expected(seen, rows, keys):
    """Returns the state of every tile, computed one by one."""
    return [
        [
            tile_maps.FULL if tile.all() else tile_maps.PARTIAL if tile.any() else tile_maps.EMPTY
            for first in range(0, seen.shape[1], keys)
            for tile in [seen[row : row + rows, first : first + keys]]
        ]
        for row in range(0, seen.shape[0], rows)
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_states_are_those_of_all_pairs(text):
    captured, seen = TEXTS[text]
    mask = made(text, captured)
    for rows, keys in ((64, 64), (16, 48), (150, 7), (1, 200)):
        assert mask.states(rows, keys)[0, 0].tolist() == expected(seen, rows, keys)
    array = cupyfa.block_mask(seen, backend="simulator")
    assert np.array_equal(array.states(32, 16), mask.states(32, 16))


def test_the_kernel_finds_the_same_states(backend):
    text = "doc[batch, query] == doc[batch, key] and key <= position + head"
    mask = made(text, {"doc": np.stack([DOC, DOC[::-1] // 3])}, heads=2, batch=2)
    arrays = {"doc": backend.upload(mask.captured["doc"])}
    for rows, keys in ((64, 32), (150, 7)):
        found = tile_maps.states_on_device(backend, mask._problem, arrays, rows, keys)
        assert np.array_equal(found, mask.states(rows, keys))


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_the_kernel_finds_the_states_of_all_texts(backend, text):
    mask = made(text, TEXTS[text][0])
    arrays = {name: backend.upload(x) for name, x in mask.captured.items() if name != "g"}
    for rows, keys in ((64, 64), (16, 48), (1, 200)):
        found = tile_maps.states_on_device(backend, mask._problem, arrays, rows, keys)
        assert np.array_equal(found, mask.states(rows, keys))


@pytest.mark.parametrize("name, alone", [("key_tiles", True), ("row_tiles", False)])
def test_launches_make_the_same_maps(backend, name, alone):
    mask = made("abs(position - key) < 30 + 9 * head or key % 97 == 3", heads=2)
    states = mask.states(16, 4)
    if name == "row_tiles":
        states = states.swapaxes(2, 3)
    assert states.shape[3] > 32 or name == "row_tiles"
    found = tile_maps.DeviceMap(backend, mask._problem, {}, name, 16, 4, alone=alone)
    found.make()
    assert np.array_equal(backend.download(found.array), tile_maps.map_of(states, alone))


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_updated_arrays(backend, on_device, monkeypatch):
    if on_device:  # as on a GPU, where a kernel computes the tile states
        monkeypatch.setattr(block_mask, "_is_host", lambda backend: False)
    doc, other = DOC.copy(), np.sort(RNG.integers(0, 3, N))
    mask = made("doc[query] == doc[key]", {"doc": doc})
    joined, states = ~mask, mask.states(64, 64)
    q, k, v = RNG.standard_normal((3, 2, N, 8))
    q = q[:, :M]
    prepared = cupyfa.compile(q, k, v, mask=mask, backend=backend, kernel="fa2")
    plain = {"backend": backend, "kernel": "fa2"}
    for given in (doc, other, other[::-1], doc):
        mask.update({"doc": given})
        seen = given[QUERY] == given[KEY]
        assert mask.states(64, 64)[0, 0].tolist() == expected(seen, 64, 64)
        new = made("doc[query] == doc[key]", {"doc": given})
        out = cupyfa.attention(q, k, v, mask=new, **plain)
        np.testing.assert_array_equal(prepared(q, k, v), out)
        np.testing.assert_array_equal(cupyfa.attention(q, k, v, mask=mask, **plain), out)
        later = mask & joined
    mask.update({"doc": other})
    assert (joined & ~made("doc[query] == doc[key]", {"doc": DOC})).density == joined.density
    assert later.density == 0  # both masks read the array DOC
    assert not np.array_equal(mask.states(64, 64), states)


def test_a_map_leads_from_one_tile_to_the_next():
    states = np.array([[0, 1, 2, 0], [2, 0, 0, 0], [0, 0, 0, 0]], np.uint8)[None, None]
    assert tile_maps.map_of(states)[0, 0].tolist() == [
        [3, 3, 4, 8, 8, 0],
        [0, 8, 8, 8, 8, 1],
        [8, 8, 8, 8, 8, 2],
    ]
    assert tile_maps.map_of(states, alone=False)[0, 0, 0].tolist() == [3, 3, 5, 8, 8, 0]


def test_joined_masks_are_those_of_both():
    (a, of_a), (b, of_b) = list(TEXTS.items())[1:3]
    one, other = made(a, of_a[0]), made(b, of_b[0])
    array = cupyfa.block_mask(of_a[1], backend="simulator")
    for joined, seen in (
        (one & other, of_a[1] & of_b[1]),
        (one | other, of_a[1] | of_b[1]),
        (~one, ~of_a[1]),
        (array & cupyfa.block_mask(of_b[1], backend="simulator"), of_a[1] & of_b[1]),
        (~array | other & made("key > 9 if query > 3 else key < 2"), None),
    ):
        if seen is None:
            seen = ~of_a[1] | (of_b[1] & np.where(QUERY > 3, KEY > 9, KEY < 2))
        assert joined.states(32, 16)[0, 0].tolist() == expected(seen, 32, 16)


def test_axes_that_the_text_does_not_name_are_one():
    assert made(batch=3, heads=4).states(64, 64).shape == (1, 1, 3, 3)
    assert made("key <= query + head", heads=4).states(64, 64).shape == (1, 4, 3, 3)
    padding = cupyfa.block_mask(np.ones((2, 1, 1, N), bool), M=M, heads=4, backend="simulator")
    assert (padding.batch, padding.heads, padding.M, padding.N) == (2, 4, M, N)
    assert padding.states(64, 64).shape == (2, 1, 3, 3)


def test_density_and_drawings(tmp_path):
    mask = made("key <= query", M=512, N=512)
    assert mask.density == 10 / 16
    assert str(mask).splitlines()[1:] == ["|░   |", "|█░  |", "|██░ |", "|███░|"]
    assert "density 0.625" in str(mask) and "M=512" in repr(mask)
    assert str(made("key <= query", M=100_000, N=100_000)).count("\n") <= 64
    of_heads = made("key < 256 + head", M=512, N=512, heads=2)
    assert str(of_heads).splitlines()[1] == "|██░ |"
    cupyfa.lab.draw_blocks(mask, tmp_path / "mask.svg")
    drawn = (tmp_path / "mask.svg").read_text()
    assert "key &lt;= query, density 0.625" in drawn
    assert {"key", "query"} <= assert_readable(plots._tiles(mask, "A mask"))


def test_arrays_are_copied():
    doc = DOC.copy()
    mask = made("doc[query] == doc[key]", {"doc": doc})
    doc[:] = 0
    assert mask.states(64, 64)[0, 0].tolist() == expected(DOC[QUERY] == DOC[KEY], 64, 64)


@pytest.mark.parametrize(
    "text, message",
    [("key <= nowhere", "there is no 'nowhere'"), ("key + 1", "must be a condition")],
)
def test_wrong_expressions(text, message):
    with pytest.raises(ValueError, match=message):
        made(text)
