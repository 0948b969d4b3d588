"""cupyfa.distributed: results of ranks match one call on the whole arrays."""
# ruff: noqa: F401 (the calls of bad_calls.txt use one of the names that are imported here)

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers.cli import table
from helpers.ranks import expected, joined, ranges, sharded

import cupyfa
import cupyfa.distributed as ranks
from cupyfa import DeviceError, Limits, Problem, Simulator, SimulatorFault, Unsupported
from cupyfa.distributed import (
    agreed_arguments,
    agreement,
    communicator,
    in_threads,
    job,
    packing,
    ring,
)
from cupyfa.distributed.packing import copy_to, in_words
from cupyfa.distributed.shards import Shards
from cupyfa.numerics import tolerance
from cupyfa.planner.source import ROOT

SCHEDULES = ["gather", "ring"]
TILES = {"Br": 16, "Bc": 16}
FORWARD = {"kernel": "fa2", "tiles": TILES, "backend": "simulator"}
BACKWARD = {"kernel": "two_pass", "tiles": TILES, "backend": "simulator"}
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 64, "N": 96, "d": 8, "dv": 8}
# Number of ranks, overrides of SIZES, and options of the call.
CASES = {
    "causal": (2, {}, {"causal": True}),
    "ragged": (2, {"M": 37, "N": 51}, {"causal": True}),
    "more ranks than rows": (4, {"kv_heads": 4, "M": 3, "N": 5}, {"causal": True}),
    "contiguous": (2, {}, {"causal": True, "order": "contiguous"}),
    "plain": (2, {}, {}),
    "three ranks": (3, {"kv_heads": 3, "heads": 3}, {"causal": True}),
    "window": (2, {}, {"window": (20, 9)}),
    "no rows": (2, {"M": 0}, {"causal": True}),
    "no keys": (2, {"N": 0}, {"causal": True}),
    "bfloat16": (2, {"dtype": ml_dtypes.bfloat16}, {"causal": True}),
    "text": (2, {}, {"score_mod": "score - 0.1 * (position - key)"}),
    "one rank": (1, {}, {"causal": True}),
    "top-left": (2, {}, {"causal": "top-left"}),
    "rows that see no key": (2, {"M": 96, "N": 40, "dtype": "float64"}, {"causal": True}),
    "window on the left": (2, {}, {"window": (7, None), "causal": True}),
    "offset": (2, {}, {"causal": True, "offset": -21}),
    "as many key heads": (2, {"heads": 2}, {"causal": True}),
    "one key head": (1, {"kv_heads": 1}, {"causal": True}),
    "dv": (2, {"dv": 5}, {"causal": True}),
    "scale and softcap": (2, {}, {"scale": -0.3, "softcap": 2.0}),
    "float64": (2, {"dtype": "float64"}, {"causal": True}),
    "float16": (2, {"dtype": "float16"}, {"window": (50, 30)}),
    "no heads": (2, {"heads": 0, "kv_heads": 0}, {}),
    "no batch": (2, {"batch": 0}, {"causal": True}),
    "four ranks": (4, {"kv_heads": 4, "M": 77}, {"window": (30, 3)}),
}
# From the ninth case on, cases alternate between the two schedules to save time.
RUNS = [
    (name, schedule)
    for i, name in enumerate(CASES)
    for schedule in SCHEDULES
    if i < 8 or schedule != SCHEDULES[i % 2]
]


def arrays(batch, heads, kv_heads, M, N, d, dv, dtype="float32"):
    rng = np.random.default_rng(0)
    of_q = batch, heads, M
    shapes = ((*of_q, d), (batch, kv_heads, N, d), (batch, kv_heads, N, dv), (*of_q, dv), of_q)
    *drawn, dlse = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return *drawn, dlse.astype("float64" if dtype == "float64" else "float32")


def run(given, count, order="zigzag", schedule="gather", **options):
    """Returns out, lse, dq, dk and dv joined over all ranks, and the bytes that each rank sent."""
    M, N = given[0].shape[2], given[1].shape[2]
    dtype = {"out": options.pop("out")} if "out" in options else {}

    def of_rank(group):
        q, k, v, dout, dlse = (ranks.shard(x, group, order=order) for x in given)
        arrays = sharded(q, k, v, group, M, N, order, schedule)
        out, lse = cupyfa.attention(*arrays, return_lse=True, **dtype, **FORWARD, **options)
        sent = group.sent
        grads = cupyfa.backward(dout, *arrays, out, lse, dlse=dlse, **BACKWARD, **options)
        wanted = dtype.get("out", q.dtype)
        assert [x.dtype for x in (out, *grads)] == [wanted] * 4 and lse.dtype == dlse.dtype
        return (out, lse, *grads), (sent, group.sent - sent)

    results, sent = zip(*ranks.threads(count, of_rank, timeout=20))
    return [joined(x, order) for x in zip(*results)], sent


def whole(given, **options):
    q, k, v, dout, dlse = given
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **FORWARD, **options)
    backward = partial(cupyfa.backward, dlse=dlse, **BACKWARD, **options)
    return [out, lse, *backward(dout, q, k, v, out, lse)]


@pytest.fixture
def one_head_in_a_step(monkeypatch):
    for name in ("heads_of_rows", "heads_of_keys"):
        monkeypatch.setattr(job.Job, name, lambda its: 1)


@pytest.mark.few(6)
@pytest.mark.parametrize("name, schedule", RUNS)
def test_results_are_those_of_one_call(name, schedule, one_head_in_a_step):
    count, sizes, options = CASES[name]
    given = arrays(**{**SIZES, **sizes})
    found, _ = run(given, count, schedule=schedule, **options)
    order = options.get("order", "zigzag")
    plain = {x: y for x, y in options.items() if x != "order"}
    right = whole(given, **plain)
    exact = len(right) if count == 1 else 0
    if schedule == "gather":
        heights = {len(x) % TILES["Br"] for x in ranges(given[0].shape[2], count, order)}
        exact = 3 if heights <= {0} else 0
    for x, y in zip(found[:exact], right):
        np.testing.assert_array_equal(x, y)
    cuts = [ranges(x.shape[2], count, order) for x in given[:2]]
    wanted = expected(given, *cuts, found, **plain)
    tolerance.require(tolerance.compare(dict(zip(wanted, found)), wanted), f"{name}, {schedule}")


def formula(p, count, rank, schedule):
    """Returns how many bytes a rank with zigzag shards sends in a forward and a backward pass."""
    keys = Shards.of(p.N, count, "zigzag")
    size, sums, width = p.dtype.numpy.itemsize, p.dtype.sums.itemsize, p.d + p.dv
    digests = 64 * (count - 1)
    of_key = p.batch * p.kv_heads * width
    if schedule == "gather":
        forward = (count - 1) * keys.most * of_key * size
        return digests + forward, digests + forward + (count - 1) * keys.most * of_key * sums
    travelling = sum(keys.sizes[s] for s in range(count) if s != (rank + 1) % count) * of_key
    home = p.N * of_key
    return digests + travelling * size, digests + travelling * size + home * sums


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_are_those_of_the_formula(schedule, one_head_in_a_step):
    given = arrays(**{**SIZES, "M": 35, "N": 41, "dv": 5})
    _, sent = run(given, 3, schedule=schedule, causal=True)
    p = Problem.of(*given[:3])
    assert [*sent] == [formula(p, 3, rank, schedule) for rank in range(3)]


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_of_16_bits_without_their_last_rounding(schedule):
    given = arrays(**{**SIZES, "dtype": "float16"})
    narrow, _ = run(given, 2, schedule=schedule, causal=True)
    wide, _ = run(given, 2, schedule=schedule, causal=True, out="float32")
    assert {x.dtype.name for x in wide} == {"float32"}
    off = abs(wide[0].astype("float16") - narrow[0])
    # With "ring", partial outputs, their merged output and, here, `wide` are rounded, each by at
    # most half a float16 step at the magnitude of v's largest element.
    most = 1.5 * np.spacing(abs(given[2]).max()) if schedule == "ring" else 0
    assert off.max() <= most and (wide[0] != narrow[0]).any()


def test_rows_of_nobody_are_not_added_up(monkeypatch):
    """Padding rows of a rank's buffers may hold any value; here they hold the largest float."""

    def new(like, shape, dtype=None):
        made = packing.new(like, shape, dtype)
        if made.dtype.kind == "f":
            made[...] = np.finfo(made.dtype).max
        return made

    for module in (communicator, job):
        monkeypatch.setattr(module, "new", new)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run(arrays(**{**SIZES, "M": 37, "N": 51}), 2, causal=True)


def test_gradients_of_keys_are_added_up_in_the_order_of_ranks():
    """Gradients of parts are rounded to float16; their float32 sum is rounded once more."""
    given = arrays(**{**SIZES, "dtype": "float16"})
    q, k, v, dout, dlse = given
    (out, lse, _, *found), _ = run(given, 2, causal=True)
    total = 0
    for rank in range(2):
        of_rank = 0
        for part in Shards.of(q.shape[2], 2, "zigzag").parts(rank):
            x = part.rows
            at = np.s_[:, :, x.start : x.stop]
            of_rows = [y[at] for y in (dout, q)], [y[at] for y in (out, lse)]
            offset = k.shape[2] - q.shape[2] + x.start
            how = {**BACKWARD, "causal": True, "offset": offset, "wrt": "k,v"}
            made = cupyfa.backward(*of_rows[0], k, v, *of_rows[1], dlse=dlse[at], **how)
            of_rank = of_rank + np.array(made, "float32")
        total = total + of_rank
    for x, y in zip(found, total.astype("float16")):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_run_gives_the_same_bits(schedule):
    given = arrays(**SIZES)
    first, second = (run(given, 2, schedule=schedule, causal=True)[0] for _ in range(2))
    for x, y in zip(first, second):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_ring_of_many_ranks_merges_before_its_end(monkeypatch):
    """Some ranks have no rows.

    Results are float64, but are compared with float32 bounds. The rounding errors of many merges
    stay below these bounds, but a wrong position or weight exceeds them.
    """
    monkeypatch.setattr(ring, "MOST_HELD", 2)
    narrow = arrays(**{**SIZES, "batch": 1, "M": 9, "N": 30})
    found, _ = run([x.astype("f8") for x in narrow], 8, schedule="ring", causal=True)
    cuts = [ranges(x.shape[2], 8) for x in narrow[:2]]
    wanted = expected(narrow, *cuts, found, causal=True)
    tolerance.require(tolerance.compare(dict(zip(wanted, found)), wanted), "ring")


# Expressions that each schedule supports.
TEXTS = {
    "gather": {"score_mod": "score - 0.1 * position * key / keys + batch", "window": (20, 10)},
    "ring": {"score_mod": "score + batch - 0.125 * (position - key)"},
}


@pytest.mark.parametrize("schedule", ["gather", pytest.param("ring", marks=pytest.mark.slow)])
def test_texts_count_as_in_the_whole(schedule):
    """Expressions with positions match a call on the whole arrays, and so do their gradients.

    If no expression uses `key`, "gather" passes only visible keys to gradient kernels.
    """
    given, asked = arrays(**SIZES), TEXTS[schedule]
    how = {}
    if schedule == "ring":
        how = {
            "captured": {"slope": 0.125},
            "score_mod": asked["score_mod"].replace("0.125", "slope"),
        }
    found, _ = run(given, 2, schedule=schedule, **asked | how)
    right = whole(given, **asked | how)
    for x, y in zip(found[: {"gather": 3, "ring": 0}[schedule]], right):
        np.testing.assert_array_equal(x, y)
    keys = [range(SIZES["N"])] if schedule == "gather" else ranges(SIZES["N"], 2)
    wanted = expected(given, ranges(SIZES["M"], 2), keys, found, **asked)
    tolerance.require(tolerance.compare(dict(zip(wanted, found)), wanted), schedule)


def test_the_pullback_gives_the_gradients():
    given = arrays(**SIZES)
    right, _ = run(given, 2, causal=True)

    def of_rank(group):
        q, k, v, dout, dlse = (ranks.shard(x, group) for x in given)
        (out, lse), pullback = cupyfa.vjp(
            *sharded(q, k, v, group), return_lse=True, causal=True, **FORWARD,
            backward_kernel="two_pass", backward_tiles=TILES,
        )  # fmt: skip
        return out, lse, *pullback(dout, dlse)

    for x, y in zip(zip(*ranks.threads(2, of_rank)), right):
        np.testing.assert_array_equal(joined(x, "zigzag"), y)


def test_the_plan_is_that_of_the_whole():
    """If parts were planned separately, tiles would differ, and with them the results' bits."""
    q, k, v = arrays(**{**SIZES, "batch": 1, "M": 256, "N": 40, "d": 16})[:3]
    right = cupyfa.attention(q, k, v, backend="simulator")

    def of_rank(group):
        own = (ranks.shard(x, group) for x in (q, k, v))
        return cupyfa.attention(*sharded(*own, group), backend="simulator", check=True)

    np.testing.assert_array_equal(joined(ranks.threads(2, of_rank), "zigzag"), right)


@pytest.mark.parametrize(
    "schedule, kernel", [("gather", "wgmma_persistent"), ("ring", "wgmma_overlap")]
)
def test_a_ring_takes_no_persistent_blocks(monkeypatch, schedule, kernel):
    """Persistent blocks would start late while messages occupy multiprocessors."""
    monkeypatch.setattr(OTHER, "read_limits", lambda device: H100)
    made = []
    monkeypatch.setattr(job, "find_prepared", lambda call, *_: made.append(call.kernel) or 1 / 0)
    x = np.zeros((1, 8, 4096, 64), "f2")
    with pytest.raises(ZeroDivisionError), in_threads.groups_of_threads(1, 20)[0] as group:
        arrays = sharded(x, x, x, group, schedule=schedule)
        cupyfa.attention(*arrays, causal=True, backend=OTHER)
    assert made == [kernel]


@pytest.mark.parametrize(
    "multiprocessors, of_rows, of_keys", [(132, 17, 33), (66, 9, 17), (16, 8, 16)]
)
def test_heads_of_a_step_fill_the_device(multiprocessors, of_rows, of_keys):
    """A part has 512 rows of each query head, which make 16 blocks of 128 rows per key head.

    K and V of a key head take 4 MiB. On the smallest device, the byte limit of a step (32 or
    64 MiB) determines the number of heads.
    """
    x = np.broadcast_to(np.zeros((), "f2"), (1, 32, 8192, 128))
    p, shards = Problem.of(x, x[:, :8], x[:, :8]), Shards.of(8192, 8, "zigzag")
    backend = SimpleNamespace(limits=Limits("a GPU", 232448, multiprocessors=multiprocessors))
    made = job.Job(None, p, shards, shards, None, False, backend, in_host=False)
    assert (made.heads_of_rows(), made.heads_of_keys()) == (of_rows, of_keys)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("n, count", [(0, 3), (1, 2), (5, 4), (48, 3), (49, 1), (50, 7)])
def test_every_row_is_of_one_rank(order, n, count):
    shards = Shards.of(n, count, order)
    lengths = [len(x) for own in shards.ranges for x in own]
    assert max(lengths) - min(lengths) <= 1
    padded = np.full(count * shards.most, -1)
    padded[shards.padded_places] = np.arange(n)
    for rank in range(count):
        own = [row for x in shards.parts(rank) for row in x.rows]
        assert padded.reshape(count, -1)[rank].tolist()[: len(own)] == own


def test_zigzag_balances_a_causal_mask():
    shards = Shards.of(64, 4, "zigzag")
    assert {sum(row + 1 for x in own for row in x) for own in shards.ranges} == {64 * 65 // 8}


@pytest.mark.parametrize(
    "columns, first, word",
    [(8, 0, 16), (8, 8, 16), (4, 4, 8), (6, 2, 4), (3, 0, 2), (8, 1, 2)],
)
def test_words_are_as_large_as_places_allow(columns, first, word):
    whole = np.arange(2 * 3 * 16, dtype=np.float16).reshape(2, 3, 16)
    part, made = whole[..., first : first + columns], np.zeros((2, 3, columns), np.float16)
    assert whole.ctypes.data % 16 == 0
    assert {x.itemsize for x in in_words(part)} == {word}
    copy_to(made, part)
    np.testing.assert_array_equal(made, part)
    assert in_words(whole.T)[0].dtype == np.float16


def test_shard_takes_any_axis():
    x = np.arange(2 * 12).reshape(2, 12)

    def of_rank(group):
        return ranks.rows(12, group), ranks.shard(x, group, axis=-1)

    (first, own), (second, other) = ranks.threads(2, of_rank)
    assert first == [range(0, 3), range(9, 12)] and second == [range(3, 6), range(6, 9)]
    assert own[0].tolist() == [0, 1, 2, 9, 10, 11] and other[1].tolist() == [*range(15, 21)]


# Errors

H100 = Limits("an H100", 232448, arch="90")
OTHER = Simulator()  # poses as a GPU of another model
OTHER.read_limits = lambda device: Limits("another", 232448, multiprocessors=7)
X = np.ones((1, 2, 8, 4), np.float32)


class NoText:
    def __repr__(self):
        raise TypeError("has no text")


def attention(*, q=X, k=X, v=X, group, M=None, N=None, order="zigzag", schedule="gather", **how):
    """Calls attention on a rank's shards; all arguments are keywords."""
    return cupyfa.attention(*sharded(q, k, v, group, M, N, order, schedule), **{**FORWARD, **how})


def called(count, of_rank, *, timeout=20.0):
    """Returns each rank's result or error; no rank may be left waiting."""
    found = [None] * count

    def run(group):
        try:
            found[group.rank] = of_rank(group)
        except Exception as error:
            found[group.rank] = error

    ranks.threads(count, run, timeout=timeout)
    return found


@pytest.mark.parametrize("given, error, words", table("distributed/bad_calls.txt"))
def test_a_wrong_argument_of_one_rank_is_the_error_of_all(given, error, words):
    """The group stays usable: the next call succeeds."""
    wrong = eval(f"dict({given})")

    def of_rank(group):
        with pytest.raises(eval(error), match=".*".join(["rank 1: ", *words])) as caught:
            attention(group=group, **(wrong if group.rank == 1 else {}))
        assert np.isfinite(attention(group=group)).all()
        return str(caught.value)

    assert len({*ranks.threads(2, of_rank, timeout=20)}) == 1


TWICE = np.ones((2, 2, 8, 4), "f4")


@pytest.mark.parametrize("given, words", table("distributed/differing_calls.txt", 1))
def test_calls_that_differ_are_the_same_error_on_all_ranks(given, words):
    others = eval(f"dict({given})")

    def of_rank(group):
        with pytest.raises(ValueError, match=".*".join(words)) as caught:
            attention(group=group, **(others if group.rank == 1 else {}))
        assert str(caught.value).endswith(" on all ranks")
        assert group.sent == 2 * (64 + 8 * 401)
        return str(caught.value)

    assert len({*ranks.threads(3, of_rank, timeout=20)}) == 1


def test_numbers_for_texts_do_not_hide_options():
    """Captured numbers may be passed in any order."""

    def of_rank(group):
        numbers = {"scale": 2.0, "shift": 1.0}
        if group.rank == 1:
            numbers = {**dict(reversed(numbers.items()))}
        how = {"score_mod": "score * scale + shift", "captured": numbers, "group": group}
        attention(scale=0.5, **how)
        with pytest.raises(ValueError, match="options must be equal on all ranks"):
            attention(scale=0.5 + group.rank, **how)

    ranks.threads(2, of_rank)


def test_every_field_has_to_be_equal():
    """Covers all fields on which ranks have to agree, including versions."""

    def of_rank(group):
        for name, what in agreement.FIELDS.items():
            found = agreement.difference(group, {name: f"{group.rank}"} if name != "error" else {})
            assert (name == "error") == (found is None)
            if found is not None:
                assert f"{what} must be equal on all ranks: 0 on rank 0; 1 on rank 1" in str(found)

    ranks.threads(2, of_rank)


def test_gradients_without_lse_are_the_error_of_all_ranks():
    def of_rank(group):
        with pytest.raises(TypeError, match="rank 0: lse is None; pass a NumPy or CuPy array"):
            cupyfa.backward(X, *sharded(X, X, X, group), X, None, **BACKWARD)
        assert np.isfinite(attention(group=group)).all()

    ranks.threads(2, of_rank)


def test_a_failure_of_one_rank_ends_the_call_of_all(monkeypatch):
    """All ranks raise, since each needs key gradients from all others; later calls raise too."""
    find_prepared, lse = job.find_prepared, X[..., 0]
    fault = SimulatorFault("fa2", (0, 0, 0), (0, 0, 0), "reads nothing", "")

    def failing(*args):
        if threading.current_thread().name == "rank 1":
            raise fault
        return find_prepared(*args)

    monkeypatch.setattr(job, "find_prepared", failing)

    def of_rank(group):
        threading.current_thread().name = f"rank {group.rank}"
        errors = []
        for _ in range(2):
            with pytest.raises((DeviceError, SimulatorFault)) as caught:
                cupyfa.backward(X, *sharded(X, X, X, group), X, lse, **BACKWARD)
            errors.append(caught.value)
        return errors

    for rank, errors in enumerate(called(2, of_rank)):
        assert errors[0] is fault if rank == 1 else isinstance(errors[0], DeviceError)
        for error in errors[rank == 1 :]:
            assert "rank 1 raised SimulatorFault: fa2, block (0, 0, 0)" in str(error)


def test_a_rank_that_does_not_call_is_waited_for_until_the_time_out():
    def of_rank(group):
        if group.rank != 1:
            attention(group=group)

    first, second, third = called(3, of_rank, timeout=0.2)
    assert second is None
    for error in (first, third):
        assert isinstance(error, DeviceError)
        assert "waited 0.2 s for a message of rank 1" in str(error)


def test_the_first_error_of_threads_is_raised():
    def of_rank(group):
        if group.rank == 1:
            raise KeyError("mine")
        group.agree(b"")

    with pytest.raises(KeyError, match="mine"):
        ranks.threads(2, of_rank)


def test_a_rank_that_closes_waits_for_the_others(monkeypatch):
    """Other ranks may read its messages late; a closed group rejects calls."""
    put = in_threads._ThreadGroup.put

    def slow(group, source, message):
        put(group, source, message)
        if source == 1:
            time.sleep(0.05)

    monkeypatch.setattr(in_threads._ThreadGroup, "put", slow)

    def of_rank(group):
        with group:
            attention(group=group, schedule="ring")
        with pytest.raises(DeviceError, match="has ended: it was closed"):
            attention(group=group)

    for count in (1, 3):
        ranks.threads(count, of_rank)


def test_a_rank_that_closes_while_another_one_calls():
    def of_rank(group):
        if group.rank == 0:
            group.close()
        else:
            attention(group=group)

    for error in called(2, of_rank):
        assert isinstance(error, ValueError)
        assert r"the call must be equal on all ranks: close() on rank 0; forward" in str(error)


def test_ranks_take_the_device_of_their_caller(monkeypatch):
    """New threads start on device 0, so ranks have to select the caller's device."""
    local = threading.local()
    cuda = SimpleNamespace(device=3, use=lambda device: setattr(local, "device", device))
    monkeypatch.setattr(in_threads, "backend_named", lambda name: cuda)
    assert ranks.threads(2, lambda group: local.device) == [3, 3]


@pytest.mark.parametrize("interrupts", [True, False])
def test_ctrl_c_ends_all_ranks(interrupts):
    """No rank's thread is running when KeyboardInterrupt is raised, even after a second signal.

    interrupts: whether signals interrupt system calls; asyncio restarts them.
    """
    before, errors = threading.active_count(), []

    def of_rank(group):
        if group.rank == 0:
            for _ in range(2):
                time.sleep(0.1)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)
            return
        try:
            group.agree(b"")
        except DeviceError as error:
            errors.append(str(error))

    signal.siginterrupt(signal.SIGINT, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.threads(2, of_rank, timeout=20)
    finally:
        signal.siginterrupt(signal.SIGINT, True)
    assert threading.active_count() == before
    assert "has ended: threads() raised KeyboardInterrupt" in errors[0]


def test_equal_calls_are_checked_and_planned_once(monkeypatch):
    """Arguments of other types, or objects that may have changed, are planned again."""
    planned, calls = agreed_arguments.planned, []

    def counted(*args, **options):
        calls.append(args[0])
        return planned(*args, **options)

    monkeypatch.setattr(agreed_arguments, "planned", counted)

    def of_rank(group):
        for scale in (1.0, 1.0, 2.0, 1.0):
            attention(group=group, scale=scale)
        assert len(calls) == 2
        for text in (lambda score: score, lambda score: score + 1):
            attention(group=group, score_mod=text)
        assert len(calls) == 4
        with pytest.raises(ValueError, match="causal is 1"):
            attention(group=group, causal=True)
            attention(group=group, causal=1)

    ranks.threads(1, of_rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_repeated_call_takes_arrays_of_other_strides(schedule):
    given = arrays(**SIZES)[:3]

    def of_rank(group):
        own = [ranks.shard(x, group) for x in given]
        others = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in own]
        how = {"group": group, "schedule": schedule, "causal": True}
        for _ in range(2):
            first, second = (attention(**dict(zip("qkv", x)), **how) for x in (own, others))
            np.testing.assert_array_equal(first, second)

    ranks.threads(2, of_rank)


def test_what_is_no_group():
    with pytest.raises(TypeError, match="group is 3; it must be the result of cupyfa.dis"):
        cupyfa.attention(*sharded(X, X, X, 3))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda group: X, TypeError, "v is of type ndarray, but q is Sharded; pass q, k and v"),
        (
            lambda group: ranks.Sharded(X, group, order="contiguous"),
            ValueError,
            "q, k and v have different order; pass the same order for all three",
        ),
        (
            lambda group: ranks.Sharded(X, group, 8),
            ValueError,
            "k has rows=None, but v has rows=8; rows must be equal",
        ),
    ],
    ids=["array", "order", "rows"],
)
def test_arrays_of_one_rank_that_do_not_belong_together(change, error, message):
    def of_rank(group):
        q, k, v = sharded(X, X, X, group)
        with pytest.raises(error, match=f"rank 1: {message}"):
            cupyfa.attention(q, k, change(group) if group.rank == 1 else v, **FORWARD)
        assert np.isfinite(cupyfa.attention(q, k, v, **FORWARD)).all()

    ranks.threads(2, of_rank, timeout=20)


def test_cupyfa_imports_nothing_of_it():
    code = "import sys, cupyfa; print([x for x in sys.modules if 'cupyfa.distributed' in x])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
