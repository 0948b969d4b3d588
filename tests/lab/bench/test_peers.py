"""Peers: other libraries' attention on cupyfa's arrays, skipped if a library is not installed.

Without a GPU, torch computes on the CPU with the simulator's arrays.
"""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cupyfa import Problem, Simulator, Unsupported
from cupyfa.lab.bench import peers, torch_masks
from cupyfa.lab.bench.sweeps import problem_of_cache
from cupyfa.lab.bench.timing import placed
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.operations import OPERATIONS, exact_attention, modifications, without_pages
from cupyfa.numerics import tolerance
from cupyfa.problem.optional_inputs import STARTS
from cupyfa.score.functions import FUNCTIONS

SIZES = {"batch": 2, "heads": 4, "M": 24, "N": 40, "d": 16}
MASKS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"causal": True, "M": 40},
    {"kv_heads": 2},
    {"kv_heads": 1, "causal": True},
    {"scale": -0.7},
]


def installed(name):
    module = {"cudnn-frontend": "cudnn"}.get(name, "torch")
    return importlib.util.find_spec(module) is not None


def asked(engine, name, layout="bhsd", operation="forward", **sizes):
    """Runs a peer and compares its results with the error bounds of a 16-bit or tf32 kernel.

    Returns the peer and the verdicts.
    """
    problem = Problem.of_sizes(**{x: y for x, y in {**SIZES, **sizes}.items() if y is not None})
    inputs = Case(operation, problem, seed=5, layout=layout).inputs()
    with engine.working_on(None):
        peer = peers.peer(name, engine, problem, placed(engine, inputs, {}), operation)
    rounding = "tf32" if problem.dtype.name == "float32" else None
    expected = OPERATIONS[operation].reference(inputs, problem, [rounding])[rounding]
    return peer, tolerance.compare(peer.outputs, expected)


def agrees(engine, name, **sizes):
    peer, verdicts = asked(engine, name, **sizes)
    for verdict in verdicts:
        assert verdict.passed, f"{peer.label}: {verdict}"
    return peer


on_cpu = pytest.mark.parametrize("name", ["math", "fa2"])


@pytest.fixture
def simulator():
    return Simulator()


def needs(name):
    if not installed(name):
        pytest.skip(f"{peers.PACKAGES[name]} is not installed")


@pytest.mark.parametrize("mask", [{}, {"causal": True, "M": 40}], ids=str)
def test_tangents_are_those_of_torch(simulator, mask):
    needs("math")
    agrees(simulator, "math", operation="tangent", dtype="float32", **mask)


@on_cpu
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_heads_and_scales_mean_the_same(simulator, name, mask, dtype):
    needs(name)
    agrees(simulator, name, dtype=dtype, **mask)


@pytest.mark.parametrize("name", ["math", "fa2"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_mean_the_same(simulator, name, mask):
    needs(name)
    peer = agrees(simulator, name, operation="backward", dtype="float32", **mask)
    assert list(peer.outputs) == ["dQ", "dK", "dV"]
    again = peer.call()
    np.testing.assert_array_equal(again[0].numpy(), peer.outputs["dQ"])


@on_cpu
@pytest.mark.parametrize("layout", ["bshd", "packed", "gaps", "unaligned"])
def test_peers_take_every_layout(simulator, name, layout):
    needs(name)
    agrees(simulator, name, layout=layout, N=24)


@pytest.mark.parametrize("name", ["math", "fa2"])
def test_nothing_is_copied_for_torch(simulator, name):
    needs(name)
    torch = pytest.importorskip("torch")

    problem = Problem.of_sizes(**SIZES)
    arrays = Case("forward", problem).inputs()
    assert peers._tensor(torch, arrays["Q"]).data_ptr() == arrays["Q"].ctypes.data
    peer = peers.peer(name, simulator, problem, arrays)
    arrays["V"][...] = 1
    np.testing.assert_allclose(peer.call().numpy(), 1, rtol=1e-5)


SEQUENCES = {"lengths": "5,4", "d": 8, "batch": None, "M": None, "N": None}


@pytest.mark.parametrize(
    "name, how, reason",
    [
        ("fa2", {"operation": "tangent"}, "no directional derivatives"),
        ("math", {"operation": "tangent", "tangents": "qk"}, "does not support tangents=qk"),
        ("cudnn-frontend", {"operation": "backward"}, "bench does not time the gradients of this"),
        ("math", SEQUENCES, "not support ragged batches"),
        ("flex", SEQUENCES, "not support ragged batches"),
        ("cudnn-frontend", SEQUENCES, "not support ragged batches"),
        ("fa2", SEQUENCES | {"lengths": "3/5"}, "not support seqused_q, seqused_k"),
        ("fa2", SEQUENCES | {"lengths": "_1,5"}, "not support rows outside sequences"),
        ("fa2", SEQUENCES | {"softcap": 3.0}, "not support softcap"),
        ("efficient", SEQUENCES | {"window": (3, 0)}, "not support window"),
        ("fa2", SEQUENCES | {"sink": "h"}, "not support sink"),
        ("math", {"softcap": 2.0}, "support softcap=2|not installed"),
        ("math", {"alibi_slopes": "h"}, "support alibi|not installed"),
        ("cudnn-frontend", {"softcap": 2.0}, "support softcap=2|not installed"),
        ("cudnn-frontend", {"alibi_slopes": "h"}, "support alibi|not installed"),
        ("cudnn", {}, "torch cudnn cannot compute batch=2 heads=4 M=24 .*: .|not installed"),
        ("cudnn", {"causal": True}, "only causal masks aligned to the top left|not installed"),
        ("fa2", {"causal": True, "M": 50}, "NaN for rows that see no keys|not installed"),
        ("cudnn-frontend", {}, "cannot compute .*: this .* requires a GPU|not installed"),
    ],
)
def test_what_peers_cannot_compute_is_refused(simulator, name, how, reason):
    with pytest.raises(Unsupported, match=reason):
        asked(simulator, name, **how)


@pytest.mark.parametrize("name, module", [("math", "torch"), ("cudnn-frontend", "cudnn")])
def test_a_peer_that_is_not_installed(simulator, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unsupported, match=f"{name} is not installed"):
        asked(simulator, name)


def test_versions_are_those_of_the_packages():
    found = peers.versions(["math", "fa2"])
    assert set(found) == {name for name in ("torch",) if installed(name)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in peers.NAMES if name != peers.FLEX])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", [{}, {"causal": True, "M": 256}, {"kv_heads": 2}], ids=str)
def test_peers_agree_on_the_gpu(cuda, name, dtype, mask):
    needs(name)
    sizes = {"M": 128, "N": 256, "d": 64, **mask}
    if name == "efficient" and "kv_heads" in mask:
        with pytest.raises(Unsupported, match="same num_heads"):
            agrees(cuda, name, dtype=dtype, **sizes)
        return
    peer = agrees(cuda, name, dtype=dtype, **sizes)
    with cuda.working_on(None):
        assert 0 < cuda.time(peer.call, cold=True) < 100


def gradients_agree(cuda, name, **sizes):
    problem = Problem.of_sizes(**(sizes if "lengths" in sizes else {**SIZES, **sizes}))
    arrays = Case("backward", problem, seed=5).inputs()
    with cuda.working_on(None):
        peer = peers.peer(name, cuda, problem, placed(cuda, arrays, {}), "backward")
        assert 0 < cuda.time(peer.call, cold=True) < 100
    are_near(peer, arrays, problem)
    return peer


def are_near(peer, arrays, problem):
    """Compares gradients with fixed tolerances; bounds do not cover a delta from a peer's O."""
    expected = OPERATIONS["backward"].reference(arrays, problem, [None])[None]
    for grad, x in peer.outputs.items():
        np.testing.assert_allclose(x.astype(float), expected[grad].value, atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa2", "cudnn", "efficient"])
@pytest.mark.parametrize("mask", [{}, {"causal": True, "M": 256}], ids=str)
def test_gradients_agree_on_the_gpu(cuda, name, mask):
    needs(name)
    sizes = {"M": 128, "N": 256, "d": 64, "dtype": "bfloat16", **mask}
    gradients_agree(cuda, name, **sizes)


ADDED = {"bias": "1hmn", "mask": "b1mn", "causal": True}
EVERYTHING = {
    **(ADDED | {"softcap": 5.0, "alibi_slopes": "h"}),
    "score_mod": "score + slope[head] * min(position - key, 9) if key % 3 > 0 else score",
    "mask_mod": "not (doc[query] < doc[key]) or 0 <= key < 4",
    "captured": {"slope": "f32[heads]", "doc": "i32[N]"},
}


@pytest.mark.parametrize("sizes", [{"bias": "11mn"}, {"mask": "bh1n"}, {"window": (5, 3)}, ADDED])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_biases_and_masks_for_torch(simulator, operation, sizes):
    needs("math")
    agrees(simulator, "math", operation=operation, dtype="float32", M=40, **sizes)


def test_texts_become_functions_of_tensors():
    """NumPy stands in for torch, which has functions of the same names."""
    p = Problem.of_sizes(**{**SIZES, "M": 40, **EVERYTHING})
    names = {name: getattr(np, name, None) for name in FUNCTIONS}
    functional = SimpleNamespace(softplus=lambda x: np.logaddexp(0, x))
    library = SimpleNamespace(**names, nn=SimpleNamespace(functional=functional))
    arrays = Case("forward", p).inputs()
    made = {}

    def create_block_mask(mask_mod, batch, heads, M, N, device):
        made.update(mask_mod=mask_mod, sizes=(batch, heads, M, N))

    module = SimpleNamespace(create_block_mask=create_block_mask)
    given = torch_masks.flex(library, module, p, arrays, "cpu")
    assert made["sizes"] == (2, None, 40, 40)
    place = np.ix_(range(2), range(4), range(40), range(40))
    score = np.random.default_rng(0).standard_normal((2, 4, 40, 40))
    expected = modifications(arrays, p).applied_to(score, p.visible())
    seen = np.broadcast_to(made["mask_mod"](*place), score.shape)
    np.testing.assert_array_equal(seen, expected > -np.inf)
    modified = np.where(seen, given["score_mod"](score, *place), -np.inf)
    np.testing.assert_allclose(modified, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "sizes",
    [
        {"softcap": 5.0, "M": 40, "causal": True, "window": (9, 0)},
        {"sink": "h", "kv_heads": 2},
        {"sink": "bh", "M": 50, "causal": True},  # some rows see only the sink
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flex_takes_what_models_do_to_scores(simulator, dtype, sizes):
    needs("flex")
    agrees(simulator, "flex", dtype=dtype, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [*({"causal": True, "sink": "h", "window": x} for x in (None, (99, 0))), EVERYTHING],
    ids=["sink", "sink and window", "texts"],
)
def test_flex_takes_options_on_a_gpu(cuda, options):
    needs("flex")
    sizes = {"M": 256, "N": 256, "d": 64, "kv_heads": 2, "dtype": "float16", **options}
    agrees(cuda, "flex", **sizes)
    gradients_agree(cuda, "flex", **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("name", [x for x in peers.NAMES if x != peers.FLEX])
def test_peers_are_captured_as_graphs(cuda, name, operation):
    needs(name)
    sizes = {"dtype": "float16", "M": 512, "N": 512, "d": 64}
    if operation == "backward" and name not in ("fa2", "cudnn", "efficient", "math"):
        with pytest.raises(Unsupported, match="does not time the gradients"):
            asked(cuda, name, operation=operation, **sizes)
        return
    peer, _ = asked(cuda, name, operation=operation, **sizes)
    with cuda.working_on(None):
        replay = peer.capture()
        eager, replayed = (min(cuda.time(call) for _ in range(30)) for call in (peer.call, replay))
    assert 0.2 * eager < replayed < 2 * eager


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa2", "efficient"])
def test_gradients_of_packed_sequences(cuda, name):
    needs(name)
    sizes = {"dtype": "float16", "lengths": "100,0,29", "heads": 2, "d": 64}
    peer = gradients_agree(cuda, name, **sizes)
    assert (peer.capture is None) == (name == "efficient")


class Operators:
    """Replaces torch's operators for packed sequences with the reference and checks arguments."""

    def __init__(self, p):
        self.p = p

    def _flash_attention_forward(self, q, k, v, *rest, scale, **window):
        starts, ends, *longest, dropout, causal, debug = rest
        assert (dropout, debug) == (0.0, False) and window == {}
        return self.attend((q, k, v), (starts, ends), longest, scale, causal), None

    def _efficient_attention_forward(self, q, k, v, bias, *rest, scale):
        starts, ends, *longest, dropout, mask, keeps_lse = rest
        assert bias is None and dropout == 0.0 and keeps_lse
        arrays = [x[0] for x in (q, k, v)]
        causal = (None, "top-left", "bottom-right")[mask]
        return self.attend(arrays, (starts, ends), longest, scale, causal)[None], None

    def attend(self, arrays, starts, longest, scale, causal):
        assert list(longest) == [9, 7] and [list(x) for x in starts] == [
            [0, 5, 5, 14],
            [0, 7, 10, 14],
        ]
        p = self.p.with_options(scale=scale, causal=causal or None)
        inputs = {x: array.swapaxes(0, 1)[None] for x, array in zip("QKV", arrays, strict=True)}
        inputs |= {f"mods.{x}": y for x, y in zip(STARTS, starts, strict=True)}
        return exact_attention(inputs, p)[0][0].swapaxes(0, 1)


@pytest.mark.parametrize("name", ["fa2", "efficient"])
@pytest.mark.parametrize("causal", [None, "bottom-right"])
def test_sequences_are_handed_over_packed(name, causal):
    p = Problem.of_sizes(lengths="5,0,9:7,3,4", heads=2, d=8, causal=causal)
    inputs = Case("forward", p).inputs()
    torch = SimpleNamespace(ops=SimpleNamespace(aten=Operators(p)))
    attend = peers._packed(torch, name, p, inputs, None)
    wanted, _ = exact_attention(inputs, p)
    np.testing.assert_allclose(attend(*(inputs[x] for x in "QKV")), wanted)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("lengths", [(20, 20), (7, 20, 1)])
@pytest.mark.parametrize("M", [1, 3])
def test_peers_get_caches_as_dense_keys(page, lengths, M):
    p = problem_of_cache(lengths, page=page, M=M, heads=4, kv_heads=2, d=8)
    inputs = Case("forward", p).inputs()
    wanted = exact_attention(*(without_pages(inputs, p) if page else (inputs, p)))
    dense, theirs = peers.without_cache(p, inputs)
    names = [x.name for x in dense.operands]
    is_whole = len({*lengths}) == 1
    assert names == ([] if is_whole else ["mask"]) and (dense.N, dense.pages) == (20, 0)
    assert theirs.keys() == {"Q", "K", "V", *(f"mods.{x}" for x in names)}
    assert (dense.causal is None) == (M == 1 or not is_whole)
    for one, other in zip(exact_attention(theirs, dense), wanted):
        np.testing.assert_allclose(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa2", "efficient"])
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("causal", [None, "bottom-right"])
@pytest.mark.parametrize("lengths", ["64,64", "130,7,0,300", "130,7,1:150,200,9"])
def test_sequences_on_a_gpu(cuda, name, operation, causal, lengths):
    needs(name)
    p = Problem.of_sizes(lengths=lengths, heads=2, d=64, dtype="float16", causal=causal)
    inputs = Case(operation, p, seed=5).inputs()
    with cuda.working_on(None):
        peer = peers.peer(name, cuda, p, placed(cuda, inputs, {}), operation)
    if operation == "backward":
        return are_near(peer, inputs, p)
    expected = OPERATIONS[operation].reference(inputs, p, [None])[None]
    for verdict in tolerance.compare(peer.outputs, expected):
        assert verdict.passed, f"{peer.label}: {verdict}"
