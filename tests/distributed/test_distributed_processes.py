"""Ranks as processes: rendezvous, time-outs and failures."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ranks as program

import cupyfa
import cupyfa.distributed as ranks
from cupyfa import DeviceError, Unsupported
from cupyfa.distributed import joining, mpi
from cupyfa.distributed.nccl_group import NcclGroup
from cupyfa.planner.source import ROOT

PROGRAM = Path(program.__file__)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def launched(count, *command, timeout=60):
    """Runs one process per rank; returns their output and the first nonzero exit status."""
    common = {**ENVIRONMENT, "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            [sys.executable, *command], env={**common, "RANK": str(x), "LOCAL_RANK": str(x)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for x in range(count)
    ]  # fmt: skip
    try:
        shown = "".join(x.communicate(timeout=timeout)[0] for x in started)
    finally:
        for x in started:
            x.kill()
    status = next((x.returncode for x in started if x.returncode), 0)
    return SimpleNamespace(stdout=shown, stderr="", returncode=status)


# Rendezvous through a file that rank 0 writes


@pytest.fixture
def connected(monkeypatch):
    """Replaces NCCL; maps each rank to the unique id with which it connects."""
    found, others = {}, threading.Event()

    def connect(rank, count, name):
        found[rank] = name
        if len(found) == count:
            others.set()
        assert rank or others.wait(20)

    made = SimpleNamespace(unique_id=lambda: bytes(range(128)), library=lambda: None, Nccl=connect)
    monkeypatch.setattr(importlib.import_module("cupyfa.runtime.cuda"), "nccl", made, raising=False)
    monkeypatch.setitem(sys.modules, "cupyfa.runtime.cuda.nccl", made)
    cuda = SimpleNamespace(use=lambda device: None)
    monkeypatch.setattr(joining, "_use_device", lambda place: cuda)
    monkeypatch.setattr("cupyfa.distributed.nccl_group.NcclGroup", lambda *_: None)
    return found


def test_ranks_find_each_other_by_a_file(tmp_path, connected):
    file = tmp_path / "id"
    asked = [
        threading.Thread(target=ranks.group, args=(x, 4), kwargs={"file": file}) for x in (3, 1)
    ]
    for x in asked:
        x.start()
    last = threading.Thread(target=ranks.group, args=(2, 4), kwargs={"file": str(file)})
    last.start()
    ranks.group(0, 4, file=file)
    for x in (*asked, last):
        x.join()
    assert connected == dict.fromkeys(range(4), bytes(range(128)))
    assert not file.exists()


def test_a_rank_0_that_does_not_come(tmp_path, connected):
    with pytest.raises(
        DeviceError, match=r"rank 3 found no unique id in .*id within 0.1 s; check that"
    ):
        ranks.group(3, 4, file=tmp_path / "id", timeout=0.1)
    (tmp_path / "id").write_bytes(b"half")  # an incomplete unique id
    with pytest.raises(DeviceError, match="found no unique id"):
        ranks.group(3, 4, file=tmp_path / "id", timeout=0.1)


def test_a_file_of_another_run(tmp_path, connected):
    (tmp_path / "id").write_bytes(bytes(128))
    with pytest.raises(
        ValueError, match=r"id exists, .*; remove it, or use a new name for each run"
    ):
        ranks.group(0, 2, file=tmp_path / "id")
    assert (tmp_path / "id").exists() and not connected


def test_ranks_that_do_not_know_the_unique_id(connected):
    with pytest.raises(ValueError, match="rank 1 does not know the unique id .*; pass file="):
        ranks.group(1, 2)
    with pytest.raises(ValueError, match="unique_id is of type bytes; pass the bytes that"):
        ranks.group(1, 2, b"short")


# Rank and device of a process

LAUNCHERS = [
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (1, 4, 0)),
    ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3)),
    ({"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}, (9, 16, 1)),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2, 0)),
    ({"PMI_RANK": "9", "PMI_SIZE": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, (9, 16, 1)),
    ({}, (0, 1, 0)),
]


@pytest.mark.parametrize("environment, place", LAUNCHERS)
def test_places_of_launchers(environment, place):
    assert joining._place(None, None, None, environment) == place


def test_places_that_are_given():
    of_other = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    assert joining._place(2, 3, None, {}) == (2, 3, 2)
    assert joining._place(2, 3, 7, of_other) == (2, 3, 7)


def test_a_process_that_nobody_has_launched_is_alone(monkeypatch):
    for names in joining._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    x = np.ones((1, 1, 8, 8), "f4")
    with ranks.group() as group:
        assert (
            cupyfa.attention(*program.sharded(x, x, x, group), backend="simulator").shape == x.shape
        )


def test_without_a_gpu(no_device):
    for given in ({"rank": 0, "ranks": 2}, {"rank": 0, "ranks": 1, "device": 5}):
        with pytest.raises(DeviceError, match=r"rank 0 needs a GPU for NCCL \(no CUDA device"):
            ranks.group(**given)


def test_a_host_with_gpus_of_several_models(monkeypatch):
    """Each rank selects its own GPU; different models are detected when ranks agree on a call."""
    used = []
    cuda = SimpleNamespace(models=("one", "other"), devices=1, use=used.append)
    monkeypatch.setattr(joining, "backend_named", lambda name: cuda)
    assert joining._use_device(joining.Place(1, 2, 1)) is cuda and used == [1]
    with pytest.raises(DeviceError, match="rank 2 is assigned device 2, but this host has only 2"):
        joining._use_device(joining.Place(2, 3, 2))


def test_mpi_that_a_library_has_imported_does_not_count(monkeypatch):
    """Without mpiexec, the MPI world consists of this process alone."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setattr(joining, "_mpi", lambda: SimpleNamespace(COMM_WORLD=Communicator()))
    monkeypatch.setattr(joining, "unique_id", lambda: b"by MPI")
    assert joining._id_by_mpi(joining.Place(0, 1, 0), 1) == b"by MPI"
    with pytest.raises(ValueError, match="does not know the unique id"):
        joining._id_by_mpi(joining.Place(0, 2, 0), 1)


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py"):
        ranks.group(over="mpi")


@pytest.mark.parametrize("given", [None, "1"])
def test_nvlink_multicast_is_off_unless_the_user_wants_it(monkeypatch, given):
    """Without NCCL, the error names the package to install."""
    import cupy

    from cupyfa.runtime.cuda import nccl

    monkeypatch.setattr(cupy.cuda, "nccl", SimpleNamespace(available=False), raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_NVLS_ENABLE")
    nccl.library.cache_clear()
    monkeypatch.setattr(joining, "_use_device", lambda place: None)
    for without in (ranks.unique_id, lambda: ranks.group(1, 2)):
        with pytest.raises(ImportError, match='pip install "nvidia-nccl-cu12>=.* 13 nvidia-nccl-c'):
            without()
    assert os.environ["NCCL_NVLS_ENABLE"] == (given or "0")


def test_connections_that_are_not_made():
    never = threading.Event()
    with pytest.raises(DeviceError, match=r"they took more than 0.1 s; check that all ranks"):
        joining._within(0.1, never.wait, "they")
    never.set()


# Watchdog


class Event:
    def __init__(self, done):
        self.done = done


class Engine:
    """An NCCL engine with a single rank. With a fault, no message arrives before an abort."""

    failures = (ZeroDivisionError,)
    is_capturing = False

    def __init__(self, fault=None):
        self.fault, self.error = fault, ""
        self.aborted = threading.Event()
        self.events = []

    def exchange(self, sends, recvs):
        if self.fault == "blocks":  # as NCCL does for the first message to a dead rank
            assert self.aborted.wait(20)
            raise ZeroDivisionError("aborted")
        if self.fault == "raises":
            raise ZeroDivisionError("remote process exited")
        return self._event()

    def gather(self, array, into):
        into[...] = array
        return self._event()

    def agree(self, message):
        return self._event(), lambda: [message]

    def follow(self, event):
        pass

    def use(self):
        pass

    def failure(self):
        return self.error

    def abort(self):
        for x in self.events:
            x.done = True
        self.aborted.set()

    def _event(self):
        self.events.append(Event(done=self.fault is None))
        return self.events[-1]


X = np.ones(4, "f4")


@contextmanager
def ending(engine, timeout, message):
    """Yields a group that must fail with this error soon after the time-out and in later calls."""
    group = NcclGroup(0, 2, timeout, engine)
    begin = time.monotonic()
    with pytest.raises(
        DeviceError, match=f"the group of rank 0 has ended: .*{message}.*make a new"
    ):
        yield group
    assert time.monotonic() - begin < timeout + 5
    assert engine.aborted.is_set()
    with pytest.raises(DeviceError, match=message):
        group.agree(b"")


def test_a_message_that_does_not_come_ends_the_group():
    with ending(Engine("silent"), 0.2, "rank 0 waited 0.2 s for messages") as group:
        group.agree(b"digest")
    with ending(Engine("silent"), 0.2, "rank 0 waited 0.2 s") as group, group.calling():
        group.exchange([(X, 1)], [(X.copy(), 1)])()  # returns without waiting


@pytest.mark.parametrize("close", [NcclGroup.close, lambda x: x.__exit__(OSError, OSError(), None)])
def test_the_end_of_a_group_waits_until_nccl_has_aborted(close):
    """A program that exits while the watchdog aborts NCCL would crash."""
    engine = Engine("silent")
    begun, abort = threading.Event(), engine.abort

    def abort_slowly():
        begun.set()
        time.sleep(0.3)
        abort()

    engine.abort = abort_slowly
    group = NcclGroup(0, 2, 0.1, engine)
    with pytest.raises(DeviceError):
        group.agree(b"digest")
    assert begun.is_set()
    close(group)
    assert engine.aborted.is_set()


def test_a_process_that_waits_in_another_call_of_cuda_ends_the_group():
    engine = Engine("silent")
    with ending(engine, 0.2, "rank 0 waited 0.2 s for messages") as group, group.calling():
        group.exchange([(X, 1)], [(X.copy(), 1)])()
        assert engine.aborted.wait(20)


@pytest.mark.slow
def test_each_message_has_the_time_out():
    engine = Engine("silent")
    with ending(engine, 2, "rank 0 waited 2 s for messages") as group, group.calling():
        for _ in range(4):
            group.exchange([(X, 1)], [(X.copy(), 1)])()
        for event in engine.events[:3]:
            assert not engine.aborted.wait(1)
            event.done = True
        assert engine.aborted.wait(20)


def test_a_call_of_nccl_that_blocks_ends_the_group():
    with ending(Engine("blocks"), 0.2, "rank 0 waited 0.2 s") as group:
        group.exchange([(X, 1)], [(X.copy(), 1)])


def test_an_error_of_nccl_ends_the_group():
    with ending(Engine("raises"), 30, "NCCL of rank 0 failed: remote process exited") as group:
        group.exchange([(X, 1)], [])
    engine = Engine("silent")
    engine.error = "a network error"
    with ending(engine, 30, "NCCL of rank 0 failed: a network error") as group:
        group.agree(b"digest")


def test_a_gpu_that_fails_ends_the_group():
    """Event queries, including the watchdog's, and aborting the group raise the GPU's error."""

    class Failed:
        @property
        def done(self):
            raise ZeroDivisionError("an illegal address")  # a type that nothing else raises

    def abort():
        engine.aborted.set()
        raise ZeroDivisionError("an illegal address")

    engine = Engine()
    engine._event, engine.abort = Failed, abort
    message = "the GPU of rank 0 failed: an illegal address"
    with ending(engine, 0.1, message) as group, group.calling():
        group.exchange([], [])()
        assert engine.aborted.wait(20)


def test_another_error_in_a_call_ends_the_group():
    engine = Engine()
    group = NcclGroup(0, 2, 30, engine)
    with pytest.raises(KeyError), group.calling():
        raise KeyError("mine")
    with pytest.raises(DeviceError, match="rank 0 raised KeyError: 'mine'"):
        group.gather(X)
    assert engine.aborted.is_set()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_a_failure_while_ranks_agree_ends_the_group(monkeypatch, failure):
    """Otherwise the calls of this rank would stay one ahead of the other ranks' calls."""
    engine = Engine()
    group = NcclGroup(0, 2, 30, engine)

    def failing(message):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(engine, "agree", failing)
        with pytest.raises(failure):
            cupyfa.attention(*program.sharded(X, X, X, group), backend="simulator")
    with pytest.raises(DeviceError, match=f"rank 0 raised {failure.__name__}"):
        cupyfa.attention(*program.sharded(X, X, X, group), backend="simulator")
    assert engine.aborted.is_set()


def test_a_group_that_is_closed_has_no_watchdog():
    with NcclGroup(0, 2, 30, Engine()) as group:
        watchdog = next(x for x in threading.enumerate() if x.name == "cupyfa watchdog")
    watchdog.join(5)
    assert not watchdog.is_alive()
    with pytest.raises(DeviceError, match="it was closed"):
        group.agree(b"")


def test_arrays_are_kept_until_computation_waits_for_their_messages():
    engine = Engine("silent")
    with NcclGroup(0, 2, 30, engine) as group:
        array = X.copy()
        alive = weakref.ref(array)
        pending = group.gather(array)
        del array
        assert alive() is not None and group.sent == X.nbytes
        np.testing.assert_array_equal(pending(), [X, X])
        assert alive() is None
        engine.fault, engine.events[0].done = None, True
        group.settle()
        assert not group._queued


def test_a_group_that_has_ended_keeps_no_arrays():
    group, array = NcclGroup(0, 2, 30, Engine("silent")), X.copy()
    alive, pending = weakref.ref(array), group.exchange([(array, 1)], [])
    del array, pending
    assert alive() is not None
    group.abort("a test")
    assert alive() is None
    with pytest.raises(DeviceError, match="a test"):
        group.settle()  # the queued message has not arrived


def test_calls_are_not_captured():
    engine = Engine()
    with NcclGroup(0, 2, 30, engine) as group:
        engine.is_capturing = True
        with pytest.raises(Unsupported, match="rank 0: .* is being captured as a CUDA graph"):
            cupyfa.attention(*program.sharded(X, X, X, group), backend="simulator")
        engine.is_capturing = False


def test_nccl_takes_arrays_in_gpu_memory():
    with (
        NcclGroup(0, 2, 30, Engine()) as group,
        pytest.raises(TypeError, match=r"NCCL sends arrays in GPU memory; convert"),
    ):
        group.require_place(in_gpu=False)


# MPI messages


class Communicator:
    """An MPI communicator of a single rank; messages never arrive."""

    freed = False
    is_late = False  # whether another rank has not called Idup yet

    def Idup(self):
        return self, SimpleNamespace(Test=lambda: not self.is_late)

    def Free(self):
        self.freed = True

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    def Irecv(self, array, source):
        return SimpleNamespace(Test=lambda: False)


def test_arrays_of_mpi_are_kept_as_long_as_it_may_write_there(monkeypatch):
    monkeypatch.setattr(mpi, "_unfinished", {})
    group = mpi.MpiGroup(Communicator(), 0.05)
    group.agree(b"done")
    assert not mpi._unfinished
    array = X.copy()
    alive, wait = weakref.ref(array), group.exchange([], [(array, 0)])
    del array
    with pytest.raises(DeviceError, match=r"rank 0 waited 0.05 s for messages"):
        wait()
    del group, wait
    assert alive() is not None
    mpi._unfinished.clear()
    assert alive() is None


def test_a_rank_of_mpi_that_does_not_come():
    communicator = Communicator()
    communicator.is_late = True
    with pytest.raises(DeviceError, match=r"rank 0 waited 0.02 s for messages"):
        mpi.MpiGroup(communicator, 0.02)


def test_a_communicator_of_mpi_is_freed_when_all_have_closed():
    communicator = Communicator()
    group = mpi.MpiGroup(communicator, 30)
    group.close()
    group.close()
    assert communicator.freed
    failed = Communicator()
    with pytest.raises(KeyError), mpi.MpiGroup(failed, 30):
        raise KeyError("mine")
    assert not failed.freed  # Free would wait for the other ranks


# Programs of several processes


def require_right(done, count):
    assert done.returncode == 0, done.stdout + done.stderr
    right = [f"rank {x} of {count} is right" for x in range(count)]
    assert sorted(x for x in done.stdout.splitlines() if x.startswith("rank")) == right


def launched_by_mpi(count, *command):
    pytest.importorskip("mpi4py")
    if not (mpiexec := shutil.which("mpiexec")):
        pytest.skip("there is no mpiexec")
    return subprocess.run(
        [mpiexec, "-n", str(count), sys.executable, "-m", "mpi4py", *command],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compare", "wrong"])
def test_ranks_of_mpi(what):
    require_right(launched_by_mpi(2, str(PROGRAM), "mpi", what, "30"), 2)


EXAMPLE = ROOT / "examples" / "distributed_attention.py"


def require_examples_lines(done, count):
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(x for x in done.stdout.splitlines() if x.startswith("rank"))
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} of {count}: gradients (1, 4, {64 // count}, 8), ")
    assert len(lines) == count


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gather", "ring"])
def test_the_example_by_itself(schedule):
    options = ["--tokens", "64", "-d", "8", "--schedule", schedule]
    require_examples_lines(launched(1, str(EXAMPLE), *options), 1)


@pytest.mark.slow
def test_the_example_on_two_processes_of_mpi():
    done = launched_by_mpi(2, str(EXAMPLE), "--over", "mpi", "--tokens", "64", "-d", "8")
    require_examples_lines(done, 2)


@pytest.mark.slow
def test_mpi_gives_all_ranks_the_unique_id_of_rank_0(tmp_path):
    """NCCL requires the same unique id on all ranks."""
    text = """import sys
import mpi4py.MPI
from cupyfa.distributed import joining
joining.unique_id = lambda: bytes(range(128))
place = joining._place(None, None, None, joining.os.environ)
found = joining._id_by_mpi(place, 30)
sys.stdout.write(f"rank {place.rank} of {place.ranks} is right\\n" * (found == bytes(range(128))))
"""
    (tmp_path / "script.py").write_text(text)
    require_right(launched_by_mpi(2, str(tmp_path / "script.py")), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["gather", "ring"])
def test_the_example_on_two_gpus(nccl_of_two, tmp_path, schedule):
    options = ["--tokens", "64", "-d", "8", "--schedule", schedule]
    require_examples_lines(
        launched(2, str(EXAMPLE), *options, "--file", str(tmp_path / "id"), timeout=300), 2
    )


@pytest.fixture
def nccl_of_two(two_gpus):
    from cupyfa.runtime.cuda import nccl

    try:
        nccl.library()
    except ImportError as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["compare", "wrong"])
def test_ranks_of_nccl(nccl_of_two, tmp_path, what):
    file = str(tmp_path / "id")
    require_right(launched(2, str(PROGRAM), "nccl", what, "60", file, timeout=300), 2)


@pytest.mark.gpu
def test_a_rank_that_is_killed(nccl_of_two, tmp_path):
    """The surviving rank raises within the time-out plus 5 s."""
    done = launched(2, str(PROGRAM), "nccl", "killed", "60", str(tmp_path / "id"), timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert "rank 0 of 2 is right" in done.stdout
