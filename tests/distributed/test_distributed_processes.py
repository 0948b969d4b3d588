"""Ranks that are processes: how they are launched, find each other, and give up."""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ranks as program

import cupyfa.distributed as ranks
from cupyfa import DeviceError, Unsupported
from cupyfa.distributed import __main__ as launcher, joining, mpi, rendezvous
from cupyfa.distributed.__main__ import _free_port
from cupyfa.distributed.nccl_group import NcclGroup
from cupyfa.planner.source import ROOT

PROGRAM = Path(program.__file__)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def launched(count, *command, options=(), timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "cupyfa.distributed", "-n", str(count), *options, *command],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def script(folder, text):
    file = folder / "script.py"
    file.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{text}")
    return str(file)


def test_the_launcher_gives_each_process_a_rank(tmp_path):
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'"
    text = f"sys.stdout.write(' '.join([os.environ[x] for x in ({names})] + sys.argv[1:]) + '\\n')"
    done = launched(2, script(tmp_path, text), "--mine", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{x} {x} 2 localhost --mine -n 3" for x in range(2)
    ]


@pytest.mark.parametrize(
    "fault, status",
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)],
)
def test_the_launcher_ends_the_others_if_a_process_fails(tmp_path, fault, status):
    text = f"if rank == 1: {fault}\nelse: time.sleep(600)"
    done = launched(2, script(tmp_path, text), options=("--grace", "0"))
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("is_stubborn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_launcher_ends_all_if_it_is_terminated(tmp_path, is_stubborn):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" * is_stubborn
    text += "sys.stdout.write(f'{os.getpid()}\\n')\nsys.stdout.flush()\ntime.sleep(600)"
    command = [sys.executable, "-m", "cupyfa.distributed", "-n", "2", "--grace", "1"]
    with subprocess.Popen(
        [*command, script(tmp_path, text)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as running:
        processes = [int(running.stdout.readline()) for _ in range(2)]
        running.terminate()
        assert running.wait(20) == 128 + signal.SIGTERM
    for x in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(x, 0)


def test_a_process_that_cannot_be_started_ends_the_others(monkeypatch):
    ended, first = [], SimpleNamespace(poll=lambda: None, wait=lambda timeout: 0)
    first.terminate = lambda: ended.append(first)
    made = iter([first])

    def start(command, env):
        for x in made:
            return x
        raise OSError("no memory")

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)
    with pytest.raises(OSError, match="no memory"):
        launcher.main(["-n", "2", __file__], standalone_mode=False)
    assert ended == [first]


def test_the_launcher_refuses_what_it_cannot_start(tmp_path):
    assert "'nothing.py' does not exist" in launched(2, "nothing.py").stderr
    assert "0 is not in the range" in launched(0, str(PROGRAM)).stderr


# Rendezvous


def met(count, *, port, make=lambda: bytes(range(128)), asking=None, timeout=5.0):
    """What each rank gets, or its error."""
    found = {}

    def run(rank):
        try:
            found[rank] = rendezvous.shared_id(rank, count, make, "localhost", port, timeout)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(x,)) for x in asking or range(count)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    return found


def test_ranks_get_the_bytes_of_rank_0():
    port = _free_port()
    made = iter([bytes(range(128))])  # only once
    assert met(4, port=port, make=lambda: next(made)) == dict.fromkeys(range(4), bytes(range(128)))


def test_ranks_that_do_not_come():
    found = met(4, port=_free_port(), asking=(0, 2), timeout=0.3)
    assert isinstance(found[0], DeviceError)
    assert "2 of 4 ranks did not come" in str(found[0]) and "1, 3; is WORLD" in str(found[0])
    (found,) = met(4, port=_free_port(), asking=(3,), timeout=0.2).values()
    assert "rank 3 did not reach rank 0" in str(found)


@pytest.mark.parametrize("rank", [1, 2])
def test_ranks_that_count_others(rank):
    port, found = _free_port(), {}
    server = threading.Thread(target=lambda: found.update(met(2, port=port, asking=(0,))))
    server.start()
    found |= met(3, port=port, asking=(rank,))
    server.join()
    message = "rank {} is one of {} ranks, and rank {} one of {}; give the same WORLD_SIZE"
    for numbers in ((0, 2, rank, 3), (rank, 3, 0, 2)):
        assert isinstance(found[numbers[0]], DeviceError)
        assert message.format(*numbers) in str(found[numbers[0]])


def test_a_port_that_is_taken():
    with rendezvous._listening("localhost", 0) as other:
        port = other.getsockname()[1]
        found = met(2, port=port, asking=(0,))[0]
    assert isinstance(found, DeviceError) and f"port {port} of localhost is taken" in str(found)


def test_a_server_that_is_another_program():
    with rendezvous._listening("localhost", 0) as other:

        def answer():
            connection, _ = other.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        found = met(2, port=other.getsockname()[1], asking=(1,))[1]
        thread.join()
    assert isinstance(found, DeviceError) and "not as rank 0 does" in str(found)


def slowly(client):
    """A greeting byte by byte, each in time for a limit of each receive."""
    for byte in rendezvous._GREETING:
        client.sendall(bytes([byte]))
        time.sleep(0.8)


def silently(client):
    time.sleep(10)


def garbage(client):
    for _ in range(100):
        client.sendall(os.urandom(1 << 16))


def too_long(client):
    """Numbers of a rank and of ranks that there are not, and much behind them."""
    for _ in range(100):
        client.sendall(rendezvous._GREETING + b"\xff" * (1 << 16))


def half(client):
    client.sendall(rendezvous._GREETING[:5])
    client.shutdown(socket.SHUT_WR)
    time.sleep(0.1)


@contextmanager
def harassed(port, how, count):
    """So many clients at a time that ask rank 0 until the context ends."""
    ended = threading.Event()

    def harass():
        while not ended.is_set():
            # From another address: while nobody listens, TCP may connect a socket to itself.
            here = socket.gethostbyname("localhost")
            to, of = (here, port), (f"{here[:-1]}2", 0)
            with suppress(OSError), socket.create_connection(to, 1, of) as client:
                client.settimeout(1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with suppress(OSError):
                    how(client) if how is not silently else ended.wait(10)

    threads = [threading.Thread(target=harass) for _ in range(count)]
    for x in threads:
        x.start()
    try:
        yield
    finally:
        ended.set()
        for x in threads:
            x.join()


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("how", [slowly, silently, garbage, half])
def test_others_do_not_hold_up_the_meeting(how, count):
    """Neither the ranks, who come late, nor the end of the time that they have."""
    port, began = _free_port(), time.monotonic()
    with harassed(port, how, count):
        found = met(2, port=port, asking=(0,), timeout=1.0)
        assert "1 of 2 ranks did not come" in str(found[0])
        assert time.monotonic() - began < 8  # one slow greeting would take 17 s
        began, port = time.monotonic(), port
        late = threading.Timer(0.3, lambda: answers.append(met(2, port=port, asking=(1,))[1]))
        answers = []
        late.start()
        assert met(2, port=port, asking=(0,), timeout=20)[0] == bytes(range(128))
        late.join()
        assert answers == [bytes(range(128))] and time.monotonic() - began < 12


def test_more_guests_than_rank_0_waits_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "_MOST_GUESTS", 4)
    test_others_do_not_hold_up_the_meeting(silently, 8)


def test_a_number_that_is_none_ends_the_meeting():
    port = _free_port()
    with harassed(port, too_long, 1):
        found = met(2, port=port, asking=(0,), timeout=5)[0]
    assert isinstance(found, DeviceError) and "give the same WORLD_SIZE" in str(found)


def test_a_server_that_answers_slowly_is_left_at_the_deadline():
    with rendezvous._listening("localhost", 0) as other:
        ended = threading.Event()

        def answer():
            connection, _ = other.accept()
            with connection, suppress(OSError):
                while not ended.wait(0.1):
                    connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        began = time.monotonic()
        found = met(2, port=other.getsockname()[1], asking=(1,), timeout=0.5)[1]
        took = time.monotonic() - began
        ended.set()
        thread.join()
    assert isinstance(found, DeviceError) and "in time" in str(found) and took < 2


def test_others_who_ask_are_ignored():
    """They get nothing, and ranks get theirs."""
    port = _free_port()

    def curious():
        while True:
            try:
                with socket.create_connection(("localhost", port), 5) as server:
                    server.sendall(b"GET / HTTP/1.1\r\nHost: a host\r\n\r\n")
                    return rendezvous._read(server, 1)
            except ConnectionRefusedError:
                pass
            except ConnectionResetError:
                return b""

    answers = []
    thread = threading.Thread(target=lambda: answers.append(curious()))
    thread.start()
    server = threading.Thread(target=lambda: met(2, port=port, asking=(0,)))
    server.start()
    thread.join()
    assert met(2, port=port, asking=(1,))[1] == bytes(range(128))
    server.join()
    assert answers == [b""]


# The group of a process

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


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rank": 3, "ranks": 3}, "rank is 3 of 3; ranks count from 0"),
        ({"rank": 0}, "rank is 0 and ranks is None; give both"),
        ({"rank": 0, "ranks": 0}, "ranks is 0; give a whole number from 1"),
        ({"timeout": 0}, "timeout is 0; give seconds above 0"),
        ({"timeout": "3"}, "timeout is '3'; give seconds above 0"),
        ({"timeout": float("inf")}, "timeout is inf; give seconds above 0, at most"),
        ({"over": "mpi", "device": 0}, "device is 0, and with over='mpi' .*; leave it out"),
        ({"over": "tcp"}, "over is 'tcp'; use 'nccl' or 'mpi'"),
    ],
    ids=lambda x: None,
)
def test_wrong_groups(given, message):
    with pytest.raises(ValueError, match=message):
        ranks.group(**given)


def test_a_wrong_environment(monkeypatch):
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK is 'one' in the environment; it must be a number"):
        ranks.group()


def test_a_process_that_nobody_has_launched_is_alone(monkeypatch):
    for names in joining._NAMES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    x = np.ones((1, 1, 8, 8), "f4")
    with ranks.group() as group:
        assert ranks.attention(x, x, x, group=group, backend="simulator").shape == x.shape


def test_without_a_gpu(no_device):
    for given in ({"rank": 0, "ranks": 2}, {"rank": 0, "ranks": 1, "device": 5}):
        with pytest.raises(DeviceError, match="rank 0 needs a GPU for NCCL: no CUDA device"):
            ranks.group(**given)


def test_a_host_with_gpus_of_several_models(monkeypatch):
    """Each rank takes its own; those that differ are found when ranks agree on a call."""
    used = []
    cuda = SimpleNamespace(models=("one", "other"), devices=1, use=used.append)
    monkeypatch.setattr(joining, "backend_named", lambda name: cuda)
    assert joining._use_device(joining.Place(1, 2, 1)) is cuda and used == [1]
    with pytest.raises(DeviceError, match="rank 2 takes device 2 of this host, which has 2; start"):
        joining._use_device(joining.Place(2, 3, 2))


@pytest.mark.parametrize("count, made", [(1, b"by MPI"), (2, b"by TCP")])
def test_mpi_that_a_library_has_imported_does_not_count(monkeypatch, count, made):
    """Then its world has this process alone."""
    world = Communicator()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setattr(joining, "_mpi", lambda: SimpleNamespace(COMM_WORLD=world))
    monkeypatch.setattr(joining, "unique_id", lambda: b"by MPI")
    monkeypatch.setattr(joining, "shared_id", lambda *args: b"by TCP")
    assert joining._name(joining.Place(0, count, 0), 1) == made


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="pip install mpi4py"):
        ranks.group(over="mpi")


@pytest.mark.parametrize("given", [None, "1"])
def test_nvlink_multicast_is_off_unless_the_user_wants_it(monkeypatch, given):
    """And without NCCL one line says what to install."""
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
    with pytest.raises(DeviceError, match=r"they were not made in 0.1 s; do all ranks run"):
        joining._within(0.1, never.wait, "they")
    never.set()


# The watchdog


class Event:
    def __init__(self, done):
        self.done = done


class Engine:
    """NCCL of a rank alone. With a fault nothing arrives, until it is aborted."""

    failures = (ZeroDivisionError,)
    is_capturing = False

    def __init__(self, fault=None):
        self.fault, self.error = fault, ""
        self.aborted = threading.Event()
        self.events = []

    def exchange(self, sends, recvs):
        if self.fault == "blocks":  # as the first message to a rank that has died
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
    """A group, whose work has to end with this error, soon after the time-out, and for good."""
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
        group.exchange([(X, 1)], [(X.copy(), 1)])()  # does not wait


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
    """Who asks for an event gets the error, also the watchdog; and so does who ends the group."""

    class Failed:
        @property
        def done(self):
            raise ZeroDivisionError("an illegal address")

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
    """Else calls of this rank would be one ahead of those of the others for ever."""
    engine = Engine()
    group = NcclGroup(0, 2, 30, engine)

    def failing(message):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(engine, "agree", failing)
        with pytest.raises(failure):
            ranks.attention(X, X, X, group=group, backend="simulator")
    with pytest.raises(DeviceError, match=f"rank 0 raised {failure.__name__}"):
        ranks.attention(X, X, X, group=group, backend="simulator")
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
        group.settle()  # as what was queued has not arrived


def test_calls_are_not_captured():
    engine = Engine()
    with NcclGroup(0, 2, 30, engine) as group:
        engine.is_capturing = True
        with pytest.raises(Unsupported, match="rank 0: .* is captured as a CUDA graph"):
            ranks.attention(X, X, X, group=group, backend="simulator")
        engine.is_capturing = False


def test_nccl_takes_arrays_in_gpu_memory():
    with (
        NcclGroup(0, 2, 30, Engine()) as group,
        pytest.raises(TypeError, match=r"NCCL sends those in GPU memory: give cupy.asarray\(q\)"),
    ):
        group.require_place(in_gpu=False)


# Messages of MPI


class Communicator:
    """MPI of a rank alone, whose messages do not arrive."""

    freed = False
    is_late = False  # another rank, with Idup

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

    def Iallgather(self, message, whole):
        whole[:] = message
        return SimpleNamespace(Test=lambda: True)


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
    assert not failed.freed  # which would wait for the others


# Processes


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


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["gather", "ring"])
def test_the_example_on_two_gpus(nccl_of_two, schedule):
    options = ["--tokens", "64", "-d", "8", "--schedule", schedule]
    require_examples_lines(launched(2, str(EXAMPLE), *options, timeout=300), 2)


@pytest.fixture
def nccl_of_two(two_gpus):
    from cupyfa.runtime.cuda import nccl

    try:
        nccl.library()
    except ImportError as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["compare", "wrong"])
def test_ranks_of_nccl(nccl_of_two, what):
    require_right(launched(2, str(PROGRAM), "nccl", what, "60", timeout=300), 2)


@pytest.mark.gpu
def test_a_rank_that_is_killed(nccl_of_two):
    """The other one raises within the time-out and 5 s."""
    how = {"options": ("--grace", "60"), "timeout": 300}
    done = launched(2, str(PROGRAM), "nccl", "killed", "20", **how)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 of 2 is right" in done.stdout, done.stderr
