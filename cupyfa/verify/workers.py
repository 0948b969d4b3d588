"""Where tasks run: in this process, or in processes that may hang or crash without harm.

A kernel that traps leaves its process without a device, one that hangs never gives an answer, and
one that crashes the simulator ends its process. So a worker process says what it is about to do,
and where it dies or is silent for too long, the outcome says so and another takes its place.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from cupyfa.errors import DeviceError
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.select import backend_named
from cupyfa.runtime.simulator import Simulator
from cupyfa.verify.failures import DEVICE_LOST, DIED, NO_ANSWER, UNSUPPORTED, Outcome
from cupyfa.verify.tasks import Doing, Task, name_of, perform

Item = TypeVar("Item")
Made = TypeVar("Made")

_START = """
import sys
sys.path[0] = sys.argv[1]
from cupyfa.verify import workers
workers.serve(int(sys.argv[2]))
"""
# There are as many workers as cores. NumPy reads this when it is imported.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PATIENCE = 1.0  # seconds for a process to end by itself


class Stopped(Exception):
    """A worker was stopped before its task was done."""


class Worker(Protocol):
    """What runs tasks, one at a time."""

    def run(self, task: Task) -> list[Outcome]:
        """The outcomes of a task's kernels."""

    def rest(self) -> None:
        """Gives back what it holds between tasks."""

    def stop(self) -> None:
        """Ends it, and what it runs; may be called from any thread."""


class Here:
    """Runs tasks in this process, which a kernel can bring down or keep waiting for ever."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine
        self._is_lost = False

    def run(self, task: Task) -> list[Outcome]:
        steps = () if self._is_lost else perform(self._engine, task)
        done = [step for step in steps if isinstance(step, Outcome)]
        self._is_lost |= any(outcome.kind == DEVICE_LOST for outcome in done)
        return done + [Outcome(x, UNSUPPORTED, "the device was lost") for x in _left(task, done)]

    def rest(self) -> None:
        """Holds nothing."""

    def stop(self) -> None:
        """Has nothing to end."""


class Process:
    """Runs tasks, whose kernels are given by name, in a process of its own.

    It works on a backend like the one given, with one thread. Where there are several GPUs,
    processes take them in turn by their number.
    """

    def __init__(self, engine: Backend, number: int = 0) -> None:
        self._variables = _ONE_THREAD | _one_of(engine.devices, number)
        simulated = isinstance(engine, Simulator)
        schedule = getattr(engine, "schedule", None)
        self._backend = Simulator(schedule=schedule, workers=1) if simulated else engine.name
        self._process: _Started | None = None
        self._is_stopped = False

    def run(self, task: Task) -> list[Outcome]:
        done: list[Outcome] = []
        while left := _left(task, done):
            done += self._begun(replace(task, kernels=left))
            if done[-1].kind == DEVICE_LOST:
                self.rest()
        return done

    def stop(self) -> None:
        self._is_stopped = True
        self.rest()

    def rest(self) -> None:
        process, self._process = self._process, None
        if process:
            process.end()

    def _begun(self, task: Task) -> list[Outcome]:
        """The outcomes up to that of the kernel that the process did not survive."""
        done: list[Outcome] = []
        doing: Doing | None = None
        process = self._started()
        try:
            process.pipe.send(task)
            while process.pipe.poll(task.timeout if doing and doing.runs else None):
                said = process.told()
                if said is None:
                    return done
                if isinstance(said, Outcome):
                    done.append(said)
                doing = said if isinstance(said, Doing) else None
            kind, message = NO_ANSWER, f"no answer within {task.timeout:g} s"
        except ConnectionError:
            kind, message = DIED, process.last_words()
        self.rest()
        self._check_stopped()
        if doing:
            return [*done, replace(doing.outcome, kind=kind, message=message)]
        return done + [Outcome(name, kind, message) for name in _left(task, done)]

    def _started(self) -> _Started:
        if self._process is None:
            self._process = _Started(self._backend, self._variables)
            self._check_stopped()
            try:
                self._process.told()
            except ConnectionError:
                self._check_stopped()
                words = self._process.last_words()
                raise DeviceError(f"a worker did not start; {words}; try --jobs 0") from None
        return self._process

    def _check_stopped(self) -> None:
        if self._is_stopped:
            self.rest()
            raise Stopped


def _one_of(devices: int, number: int) -> dict[str, str]:
    """A variable by which a process sees one of several GPUs alone."""
    if devices < 2:
        return {}
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name, ",".join(map(str, range(devices)))).split(",")
    return {name: visible[number % min(devices, len(visible))].strip()}


def _left(task: Task, done: Sequence[Outcome]) -> tuple[str, ...]:
    """The names of the kernels of a task without an outcome."""
    told = {outcome.kernel for outcome in done}
    return tuple(name for name in map(name_of, task.kernels) if name not in told)


class _Started:
    """A process that serves tasks, and what it writes."""

    def __init__(self, backend: Backend | str, variables: Mapping[str, str]) -> None:
        self.pipe, theirs = Pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        package = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(package), str(theirs.fileno())],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **variables},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for this process
        )
        theirs.close()
        with suppress(BrokenPipeError):  # if it is dead already, `told` says so
            self.pipe.send(backend)

    def told(self) -> Any:
        """What it says next. Raises ConnectionError if it is dead, and what it raised."""
        try:
            said = self.pipe.recv()
        except EOFError:
            raise ConnectionResetError from None
        if isinstance(said, Exception):
            raise said
        return said

    def end(self) -> None:
        """Ends it, and a compiler that it has begun; if that takes long, it alone and at once."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """How it died."""
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process died ({how}){': ' + lines[-1] if lines else ''}"


def serve(handle: int) -> None:
    """What a worker process does: runs the tasks it gets, and tells each step."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe: Connection[Any, Any] = Connection(handle)
    try:
        engine = backend_named(pipe.recv())
        pipe.send(None)
        while True:
            for step in perform(engine, pipe.recv()):
                pipe.send(step)
            pipe.send(None)
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not from sys.stdin, whose lock would be in the way of the end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    os._exit(1)


def in_parallel(
    workers: Sequence[Worker], job: Callable[[Worker, Item], Made], items: Sequence[Item]
) -> Iterator[tuple[Item, Made]]:
    """Each item with what a job makes of it on one of the workers, in the order they are done.

    All workers are stopped if the caller does not wait for the end.
    """
    if len(workers) == 1:
        yield from ((item, job(workers[0], item)) for item in items)
        return
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def on_a_free_one(item: Item) -> tuple[Item, Made]:
        worker = free.get()
        try:
            return item, job(worker, item)
        finally:
            free.put(worker)

    threads = ThreadPoolExecutor(len(workers))
    started = [threads.submit(on_a_free_one, item) for item in items]
    try:
        for done in as_completed(started):
            yield done.result()
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # at once, and without waiting: an interrupt must not take long
            threading.Thread(target=worker.stop).start()
        raise
    threads.shutdown()
