"""NumPy arrays divided among several devices, on simulated devices."""

import signal
import threading
import time
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from helpers.far_device import FarDevice, Gate
from hypothesis import given, settings, strategies as st

import cupyfa
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.plan import Limits
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.problem import Problem
from cupyfa.runtime import launcher, transfer
from cupyfa.runtime.transfer import devices, pieces, shares, streamed_call
from cupyfa.runtime.transfer.host import hosts
from cupyfa.runtime.transfer.shares import divided

LIMITS = Limits("a device", shared_bytes=232448)


class Captured(FarDevice):
    """A device that records which threads work on it, since capture mode is per thread."""

    compiles_in_parallel = True

    def __init__(self):
        super().__init__()
        self.prepared = []

    @contextmanager
    def working_on(self, array):
        self.thread.works = True
        yield
        self.thread.works = False

    def compile_launch(self, launch):
        works = getattr(self.thread, "works", False)
        self.prepared.append((threading.get_ident(), works))
        return super().compile_launch(launch)


@pytest.fixture
def far():
    return FarDevice()


@pytest.fixture(autouse=True)
def small():
    """Shrinks chunks and pieces so that even small arrays consist of several pieces."""
    before = transfer.configure()
    transfer.configure(threads=2, chunk_bytes=4096, buffers=4, piece_bytes=20_000, pieces=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_call, "_INLINE", 512)
        yield
    transfer.configure(**vars(before))


def arrays(batch, heads, M, kv_heads=None, N=None, dtype=np.float32):
    rng = np.random.default_rng(0)
    kv = (batch, kv_heads or heads, N or M, 16)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((batch, heads, M, 16), kv, kv)]


def compare(far, numbers, call, progress=None):
    """Checks that a call on several devices has the same bits as on the simulator.

    Returns the numbers of the devices that ran a part of the call.
    """
    there = [np.array(x) for x in call(cupyfa.Devices(numbers, progress, far))]
    for got, right in zip(there, call("simulator"), strict=True):
        np.testing.assert_array_equal(got, right)
    return set(hosts[far])


def same(far, q, k, v, numbers, progress=None, **options):
    """Compares attention like ``compare``; returns the numbers of the devices that worked."""
    options = {"kernel": "fa2", "tiles": {"Br": 16, "Bc": 16}, "return_lse": True} | options

    def attend(backend):
        return cupyfa.attention(q, k, v, backend=backend, **options)

    return compare(far, numbers, attend, progress)


def with_gradients(q, k, v):
    """Returns a function that computes the output and its gradients on a backend."""
    how = {"kernel": "fa2", "backward_kernel": "two_pass", "causal": True}

    def call(backend):
        out, pullback = cupyfa.vjp(q, k, v, **how, backend=backend)
        return out, *pullback(np.cos(out))

    return call


def of_form(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


SHARED = {  # sizes and options, by the axis divided among devices
    "batch": ((6, 1, 30), {}),
    "heads": ((2, 4, 50, 2, 40), {"causal": True}),
    "rows": ((1, 1, 200, 1, 90), {"causal": True}),
    "rows of heads": ((1, 4, 150, 2), {"window": (30, 9), "offset": -5}),
    "rows of a bias": ((1, 2, 90, 2), {"bias": of_form(2, 90, 1), "sink": of_form(2)}),
    "other axes": ((50, 7, 3), {"layout": "bshd", "causal": "top-left"}),
}


@pytest.mark.parametrize("what", SHARED)
def test_results_have_the_bits_of_one_device(far, what):
    sizes, options = SHARED[what]
    assert same(far, *arrays(*sizes), "all", **options) == {0, 1, 2}
    assert far.device == 0


def test_padded_batches_have_the_bits_of_one_device(far):
    q, k, v = arrays(3, 2, 40)
    k, v = (cupyfa.Padded(x, [3, 40, 40]) for x in (k, v))
    assert same(far, cupyfa.Padded(q, [40, 0, 7]), k, v, "all") == {0, 1, 2}


def test_results_are_written_into_arrays_of_the_caller(far):
    memory = np.full((2, 3, 80, 16), 7, np.float32)
    out = memory[:, :, ::2]
    assert same(far, *arrays(2, 3, 40), [2, 0], out=out) == {2, 0}
    assert (out != 7).any() and (memory[:, :, 1::2] == 7).all()


def test_gradients_have_the_bits_of_one_device(far):
    assert compare(far, [1, 2], with_gradients(*arrays(1, 6, 40, 3))) == {1, 2}


@pytest.mark.parametrize(
    "options", [{"dropout": cupyfa.Dropout(0.5, 7)}, {"score_mod": "score - 0.1 * head"}], ids=str
)
def test_what_counts_heads_runs_on_the_first_device(far, options):
    assert same(far, *arrays(2, 2, 60), [2, 1], **options) == {2}


@pytest.mark.parametrize("heads, M, N", [(3, 40, 50), (1, 8, 50), (1, 8, 100), (1, 1, 100)])
def test_a_head_that_does_not_fit_is_merged_on_one_device(far, heads, M, N):
    transfer.configure(device_bytes=4000)
    q, k, v = arrays(1, heads, M, N=N)
    backends = far, cupyfa.Devices("all", backend=far)
    one, many = (cupyfa.attention(q, k, v, kernel="fa2", backend=x) for x in backends)
    np.testing.assert_array_equal(many, one)
    assert len(hosts[far]) == heads


def test_buffers_may_be_freed_while_a_call_begins(far, monkeypatch):
    held = devices.host_of

    def freed(backend):
        host = held(backend)
        transfer.release()
        return host

    monkeypatch.setattr(devices, "host_of", freed)
    same(far, *arrays(4, 2, 60), "all")


@pytest.mark.parametrize("device", [0, 1])
def test_one_device_goes_the_usual_way(far, monkeypatch, device):
    monkeypatch.setattr(devices, "_run_in_turns", None)
    assert same(far, *arrays(2, 2, 60), [device]) == {device} and far.device == 0


@pytest.mark.parametrize("numbers", ["all", [0]])
def test_the_simulator_is_one_device(numbers):
    q, k, v = arrays(1, 2, 20)
    on = cupyfa.Devices(numbers, backend="simulator")
    assert cupyfa.attention(q, k, v, kernel="fa2", backend=on).shape == q.shape


def test_all_devices_are_those_like_the_current_one(far):
    far.models = ("A", "B", "B")
    far.use(2)
    same(far, *arrays(2, 2, 60), "all")
    assert list(hosts[far]) == [2, 1]  # undivided work runs on the current device


OFFSETS = np.array([0, 30, 31, 65, 71, 120, 124], np.int32)


@pytest.mark.parametrize("heads, kv_heads", [(2, 1), (4, 4)])
def test_devices_share_sequences(far, heads, kv_heads):
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((124, n, 16), np.float32) for n in (heads, kv_heads, kv_heads))
    packed = [cupyfa.Packed(x, OFFSETS) for x in drawn]
    assert compare(far, "all", with_gradients(*packed)) == {0, 1, 2}


def test_devices_share_lists(far):
    q, k, v = ([x[0], x[0, :, :9]] for x in arrays(1, 4, 40))

    def attend(backend):
        return cupyfa.attention(q, k, v, kernel="fa2", backend=backend)

    assert compare(far, [1, 2], attend) == {1, 2}


def test_progress_is_that_of_all_devices(far):
    told, threads = [], set()

    def progress(*event):
        told.append(event)
        threads.add(threading.current_thread())

    same(far, *arrays(4, 3, 40), "all", progress=progress)
    total = told[0][1]
    assert total > 6 and [done for done, _, _ in told] == list(range(total + 1))
    assert threads == {threading.current_thread()}


def test_an_error_on_one_device_ends_the_work_of_all(far, monkeypatch):
    """The call waits for transfers to the other device."""
    gate = far.gates[0, "to"] = Gate()
    empty = far.empty

    def failing(shape, dtype):
        if far.device == 0:
            return empty(shape, dtype)
        assert gate.arrived.acquire(timeout=20)
        threading.Timer(0.1, gate.opened.set).start()
        raise cupyfa.OutOfMemory("no memory is left")

    q, k, v = arrays(4, 2, 60)
    with monkeypatch.context() as patch:
        patch.setattr(far, "empty", failing)
        with pytest.raises(cupyfa.OutOfMemory, match="device 1: no memory is left"):
            cupyfa.attention(q, k, v, kernel="fa2", backend=cupyfa.Devices([0, 1], backend=far))
    assert gate.opened.is_set()
    far.gates.clear()
    same(far, q, k, v, [0, 1])


def test_an_error_ends_the_work_of_all_devices_also_if_others_fail(far, monkeypatch):
    """The first error is raised once all devices have finished their work."""
    waited, launch, wait = [], pieces.Layout.launch, streamed_call.Call.wait_for_all

    def failing(self, backend, slot):
        if far.device == 0:
            raise cupyfa.DeviceError("launch failed")
        launch(self, backend, slot)

    def failing_too(self):
        wait(self)
        waited.append(far.device)
        if far.device == 1:
            raise cupyfa.DeviceError("the kernel trapped")

    q, k, v = arrays(6, 2, 60)
    with monkeypatch.context() as patch:
        patch.setattr(pieces.Layout, "launch", failing)
        patch.setattr(streamed_call.Call, "wait_for_all", failing_too)
        with pytest.raises(cupyfa.DeviceError, match="device 0: launch failed"):
            cupyfa.attention(q, k, v, kernel="fa2", backend=cupyfa.Devices([0, 1, 2], backend=far))
    assert sorted(waited) == [0, 1, 2]


def test_ctrl_c_ends_the_work_of_all_devices(far):
    """A second Ctrl-C arrives while the call waits for its devices."""
    gate = far.gates[0, "to"] = Gate()
    main, pressed = threading.current_thread(), []

    def press_again():
        time.sleep(0.1)
        pressed.append(gate.opened.is_set())
        signal.pthread_kill(main.ident, signal.SIGINT)
        time.sleep(0.1)
        gate.opened.set()

    def press(*_):
        assert gate.arrived.acquire(timeout=20)
        threading.Thread(target=press_again).start()
        signal.raise_signal(signal.SIGINT)

    q, k, v = arrays(4, 2, 60)
    with pytest.raises(KeyboardInterrupt):
        cupyfa.attention(q, k, v, kernel="fa2", backend=cupyfa.Devices([0, 1], press, far))
    assert pressed == [False] and gate.opened.is_set()
    far.gates.clear()
    same(far, q, k, v, [0, 1])


EQUAL = {  # number of devices, and problem sizes
    "rows of heads": (3, {"heads": 32, "kv_heads": 4, "M": 32768, "N": 32768, "causal": True}),
    "one head": (8, {"heads": 8, "kv_heads": 1, "M": 32768, "N": 32768, "causal": True}),
    "more keys": (3, {"batch": 2, "heads": 4, "M": 4096, "N": 65536, "causal": True}),
    "window": (3, {"heads": 1, "M": 65536, "N": 65536, "window": (3000, 0)}),
    "copies": (3, {"batch": 5, "heads": 7, "M": 1024, "N": 1024}),
    "many heads": (7, {"batch": 8, "heads": 100, "M": 512, "N": 512, "causal": True}),
}


def planned(kernel, **sizes):
    record = LADDER["forward"].get(kernel) or LADDER["backward"].get(kernel)
    plan = planning.plan(record, Problem.of_sizes(d=128, dtype="float16", **sizes), LIMITS)
    return plan, lambda p: planning.plan(record, p, LIMITS, **plan.constants)


def shared(plan, plan_of, count, wanted=33 << 20):
    """Returns the devices' shares; checks that they are complete and cut at tile boundaries."""
    p, seen = plan.problem, {}
    made = divided(plan, pieces.cut(plan, plan_of, wanted, 10**12), count)
    for piece in (x for share in made for x in share):
        assert piece.rows.start % plan.constants["Br"] == 0 and len(piece.keys) == p.N
        for head in product(piece.batch, piece.kv_heads):
            assert piece.rows.start == seen.get(head, 0) < piece.rows.stop
            seen[head] = piece.rows.stop
    assert seen == dict.fromkeys(product(range(p.batch), range(p.kv_heads)), p.M)
    return made


@pytest.mark.parametrize("what", EQUAL)
def test_shares_have_equal_work(what):
    count, sizes = EQUAL[what]
    plan, plan_of = planned("wgmma_persistent", **sizes)
    made = shared(plan, plan_of, count)
    flops = [sum(plan.operation.flops(x.problem(plan.problem)) for x in y) for y in made]
    assert len(made) == count and max(flops) * count <= 1.05 * sum(flops)
    cuts = sum(share[0].rows.start > 0 for share in made)
    assert cuts < count  # heads that are divided between two devices, both of which read the keys


def test_shares_begin_and_end_with_a_small_piece_where_kernels_take_longest():
    plan, plan_of = planned("wgmma_persistent", **EQUAL["rows of heads"][1])
    for share in shared(plan, plan_of, 2):
        first, second, *others, last = (len(x.rows) for x in share)
        assert 3 * first == second and 3 * last == others[-1] and min(others[:-1]) == 4 * first
    plan, plan_of = planned("wgmma_persistent", batch=6, heads=8, M=1024, N=1024)
    assert len({len(x.kv_heads) for share in shared(plan, plan_of, 3) for x in share}) == 1


def test_a_small_first_piece_has_the_bits_of_the_whole(far, monkeypatch):
    monkeypatch.setattr(pieces, "_LEAST_TILES", 8)
    monkeypatch.setattr(shares, "_FEWEST_TILES", 1)
    monkeypatch.setattr(shares, "BUS", 1e18)  # copies take no time
    cut = []
    original = shares._Work._cut_at
    monkeypatch.setattr(
        shares._Work, "_cut_at", lambda *args: cut.append(original(*args)) or cut[-1]
    )
    same(far, *arrays(1, 2, 600, N=40), [0, 1])
    assert [*map(len, cut)] == [2] * 4


def test_shares_of_sequences_have_equal_work():
    """Pieces have equal bytes, but pieces with longer sequences need more computation."""
    lengths = [80_000, *[500] * 400, 40_000, 300, *[18_000] * 8]
    starts = [np.cumsum([0, *lengths]).astype(np.int32)] * 2
    plan, plan_of = planned("wgmma_persistent", lengths=lengths, heads=8, kv_heads=2)
    made = divided(plan, pieces.cut(plan, plan_of, 16 << 20, 10**12, starts), 3, starts)
    work = [
        sum(lengths[i] ** 2 * len(x.kv_heads) for x in share for i in x.sequences) for share in made
    ]
    assert sum(work) == 2 * sum(n**2 for n in lengths)
    assert max(work) * 3 <= 1.25 * sum(work)


def test_shares_of_sequences_with_few_queries_have_equal_keys():
    keys = [*[16_000] * 64, *[1000] * 192]
    starts = [np.cumsum([0, *x]).astype(np.int32) for x in ([1] * 256, keys)]
    lengths = ",".join(map(str, keys))
    plan, plan_of = planned(
        "wgmma_persistent", lengths=f"{',1' * 256}"[1:] + f":{lengths}", heads=8
    )
    made = divided(plan, pieces.cut(plan, plan_of, 33 << 20, 10**12, starts), 2, starts)
    found = [sum(len(x.keys) * len(x.kv_heads) for x in share) for share in made]
    assert max(found) * 2 <= 1.05 * sum(found)


@pytest.mark.parametrize("heads, count, most", [(7, 3, 3), (2, 4, 1), (32, 3, 11)])
def test_gradients_are_shared_by_heads(heads, count, most):
    plan, plan_of = planned("wgmma_two_pass", heads=heads, M=4096, N=4096, causal=True)
    found = [sum(len(x.kv_heads) for x in share) for share in shared(plan, plan_of, count)]
    assert len(found) == min(heads, count) and max(found) == most


@given(
    sizes=st.fixed_dictionaries(
        {name: st.integers(1, 9) for name in ("batch", "kv_heads")}
        | {name: st.integers(0, 700) for name in "MN"}
    ),
    count=st.integers(2, 9),
    causal=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_shares_of_any_problem_are_complete(sizes, count, causal):
    plan, plan_of = planned("mma_async", heads=2 * sizes["kv_heads"], causal=causal, **sizes)
    if sizes["M"]:
        assert len(shared(plan, plan_of, count, 1 << 20)) <= count


def test_every_thread_that_compiles_works_on_the_device():
    # A kernel loaded outside working_on() would invalidate another thread's capture.
    device = Captured()
    problem = Problem(1, 2, 2, 40, 40, 16, 16, DTYPES["float32"])
    plan = planning.plan(LADDER["backward"]["two_pass"], problem, LIMITS)
    with device.working_on(None):  # all callers of compile_kernels do this
        launcher.compile_kernels(device, plan)
    threads = {thread for thread, _ in device.prepared}
    # A worker that finishes early compiles a second kernel, so the number of threads varies.
    assert len(device.prepared) == len(plan.programs) > 1
    assert threads - {threading.get_ident()} and all(works for _, works in device.prepared)
