"""Dropout's random number generator, and the masks that it produces."""

import numpy as np
import pytest

import cupyfa
from cupyfa.numerics import reference, tolerance
from cupyfa.score.dropout import KeptWeights, philox
from cupyfa.score.numpy_evaluation import Modifications

# Known answers of Random123: counter, key, words.
ANSWERS = [
    ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize("counter, seed, words", ANSWERS)
def test_philox_has_the_known_answers(counter, seed, words):
    found = philox([np.array(x) for x in counter], KeptWeights(0.5, seed, 0, 1).round_keys)
    np.testing.assert_array_equal(found, words)


def mask(rate=0.25, seed=11, offset=0, *, batch=2, heads=3, M=70, N=131):
    dropout = cupyfa.Dropout(rate, seed, offset)
    return cupyfa.dropout_mask(dropout, batch=batch, heads=heads, M=M, N=N)


def test_bits_are_those_of_the_definition():
    p, seed, offset = 0.37, 2**50 + 3, 9
    found = mask(p, seed, offset)
    keys = KeptWeights(p, seed, offset, 3).round_keys
    rng = np.random.default_rng(0)
    for batch, head, query, key in rng.integers(0, (2, 3, 70, 131), (50, 4)):
        counter = key & ~9, query & ~8, batch * 3 + head, np.array(offset)
        word = int(philox(counter, keys)[(key >> 3 & 1) * 2 + (query >> 3 & 1)])
        bits = (word >> 16 if key & 1 else word) % 16384
        assert found[batch, head, query, key] == (bits >= round(p * 16384))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_the_probability_says(p):
    kept = mask(p, M=256, N=512)
    deviation = (p * (1 - p) / kept.size) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    for axis in range(4):  # per batch element, head, query and key
        share = np.moveaxis(kept, axis, 0).reshape(kept.shape[axis], -1).mean(1)
        bound = 6 * deviation * kept.shape[axis] ** 0.5
        assert np.abs(share - (1 - p)).max() < bound


def test_neighbours_and_other_seeds_are_independent():
    kept = mask(0.5, M=256, N=512)
    others = [
        *(np.roll(kept, shift, axis) for axis in range(4) for shift in (1, 8, 16)),
        *(mask(0.5, *x, M=256, N=512) for x in ((12,), (2**32 + 11,), (11, 1))),
    ]
    for other in others:
        # Rolling an axis of length 2 by 8 or 16 changes nothing.
        if other is not kept and not np.array_equal(other, kept):
            assert abs((other == kept).mean() - 0.5) < 5 * 0.5 / kept.size**0.5


def test_a_part_has_the_mask_of_the_part():
    whole = mask()
    np.testing.assert_array_equal(whole[:, :, :33, :90], mask(M=33, N=90))
    np.testing.assert_array_equal(whole[:1], mask(batch=1))
    bits = KeptWeights(0.25, 11, 0, 3).kept(
        np.array([[[1]], [[0]]]),
        np.array([[[2]], [[1]]]),
        np.arange(5, 60)[:, None],
        np.arange(13, 131),
    )
    np.testing.assert_array_equal(bits, [whole[1, 2, 5:60, 13:], whole[0, 1, 5:60, 13:]])


def test_probabilities_are_rounded():
    np.testing.assert_array_equal(mask(0.1), mask(round(0.1 * 16384) / 16384))
    assert KeptWeights(0.1, 0, 0, 1).factor == 16384 / (16384 - 1638)
    assert mask(0).all() and mask(1e-6).all()
    assert mask(0.5, batch=0, heads=2, M=3, N=0).shape == (0, 2, 3, 0)


def test_the_reference_is_the_formula_and_its_gradients_are_slopes():
    rng = np.random.default_rng(3)
    q, k, v, grad = (
        rng.standard_normal((2, h, n, 5)) for h, n in ((4, 9), (2, 20), (2, 20), (4, 9))
    )
    how = {"scale": 0.4, "mods": Modifications(dropout=KeptWeights(0.3, 5, 2, 4))}
    out, lse = reference.attention(q, k, v, **how)
    keys, values = (np.repeat(x, 2, axis=1) for x in (k, v))
    P = np.exp(0.4 * q @ keys.mT - lse[..., None])
    Z = mask(0.3, 5, 2, heads=4, M=9, N=20)
    np.testing.assert_allclose(out, (P * Z * 16384 / (16384 - 4915)) @ values, 1e-12)
    np.testing.assert_allclose(P.sum(-1), 1, 1e-12)
    gradients = {name: np.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
    for tile in reference.tiles(q, k, v, **how):
        rows = (reference.flat(x)[tile.where] for x in (grad, out, lse))
        made = reference.differentiate(tile, *rows, np.zeros_like(lse.reshape(8, 9)))
        reference.flat(gradients["q"])[tile.where] = made.dq
        reference.add_to_heads(reference.flat(gradients["k"]), tile, made.dk)
        reference.add_to_heads(reference.flat(gradients["v"]), tile, made.dv)
    given = {"q": q, "k": k, "v": v}
    for name, gradient in gradients.items():
        step = rng.standard_normal(given[name].shape)
        moved = [{**given, name: given[name] + h * step} for h in (1e-6, -1e-6)]
        ahead, behind = (reference.attention(**x, **how)[0] for x in moved)
        slope = ((ahead - behind) * grad).sum() / 2e-6
        np.testing.assert_allclose((gradient * step).sum(), slope, 1e-7, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_wrong_weights_exceed_the_bounds(dtype):
    rng = np.random.default_rng(5)
    q, k, v, grad = (rng.standard_normal((1, 2, 30, 16)).astype(dtype) for _ in range(4))

    def mods(seed=5, probability=0.1):
        return {"scale": 0.25, "mods": Modifications(dropout=KeptWeights(probability, seed, 0, 2))}

    def results(**given):
        out, lse = reference.attention(q, k, v, **mods(**given))
        how = {"dtype": dtype, **mods(**given)}
        out, lse = out.astype(dtype), lse.astype(np.float32)
        gradients = tolerance.expected_gradients(q, k, v, out, lse, grad, **how)[None]
        return {"O": out, "lse": lse} | {name: x.value for name, x in gradients.items()}, out, lse

    right, out, lse = results()
    how = {"dtype": dtype, **mods()}
    expected = tolerance.expected_attention(q, k, v, **how)[None]
    expected |= tolerance.expected_gradients(q, k, v, out, lse, grad, **how)[None]
    assert all(x.passed for x in tolerance.compare(right, expected))
    for wrong in ({"seed": 6}, {"probability": 0.11}):
        verdicts = {x.name: x for x in tolerance.compare(results(**wrong)[0], expected)}
        assert verdicts.pop("lse").passed
        assert not any(x.passed for x in verdicts.values())
