"""Runs tasks in this process, or in worker processes that can be killed and replaced.

A kernel that traps makes its process lose the device, a kernel that hangs never returns, and a
kernel that crashes the simulator kills its process. A worker process therefore reports each step
before starting it. If the worker dies or takes too long, the reported step becomes the outcome, and
a new process takes over.
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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, TypeVar

from cupyfa import cache_folder
from cupyfa.errors import DeviceError
from cupyfa.lab.verify import failures as kinds
from cupyfa.lab.verify.failures import Outcome
from cupyfa.lab.verify.tasks import KernelOrName, Task, name_of, perform
from cupyfa.planner import source
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.simulator import Simulator, machine

Item = TypeVar("Item")
Made = TypeVar("Made")

_START = """
import sys
sys.path[0] = sys.argv[1]
from cupyfa.lab.verify import workers
workers.serve(int(sys.argv[2]))
"""
# Workers run one per core, so each uses a single thread. NumPy reads these variables on import.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PATIENCE = 1.0  # seconds between SIGTERM and SIGKILL


class Stopped(Exception):
    """Raised if a worker is stopped before its task is complete."""


class Here:
    """Runs tasks in this process; a kernel may crash or block it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_lost = False

    def run(self, task: Task) -> list[Outcome]:
        """Runs a task and returns its kernels' outcomes."""
        steps = () if self._is_lost else perform(self._backend, task)
        done = [step for step in steps if step.kind not in kinds.STEPS]
        self._is_lost |= any(outcome.kind == kinds.DEVICE_LOST for outcome in done)
        lost = (kinds.UNSUPPORTED, "the device was lost")
        return done + [Outcome(name_of(x), *lost) for x in _left(task, done)]

    def rest(self) -> None:
        """Does nothing: no resources are held between tasks."""

    stop = rest


class Process:
    """Runs tasks in a separate process with one thread, on a backend of the same kind.

    Processes are assigned to the visible GPUs round-robin, by ``number``.
    """

    def __init__(self, backend: Backend, number: int = 0) -> None:
        self._variables = _ONE_THREAD | _one_of(backend.devices, number)
        cache_folder.warn_unless_kept()  # called here, because workers' output is not shown
        if isinstance(backend, Simulator):
            machine.compiler()  # called here, so that its warnings and errors are shown
        self._backend = backend.like(workers=1) if isinstance(backend, Simulator) else backend.name
        self._copies: dict[Path, Path] = {}
        self._process: _Started | None = None
        self._is_stopped = False

    def run(self, task: Task) -> list[Outcome]:
        done: list[Outcome] = []
        while left := _left(task, done):
            done += self._begun(replace(task, kernels=left))
            if done[-1].kind == kinds.DEVICE_LOST:
                self.rest()
        return done

    def stop(self) -> None:
        """Ends the process for good, even during a task; any thread may call this."""
        self._is_stopped = True
        self.rest()

    def read(self, copies: Mapping[Path, Path]) -> None:
        """Lets a new process read kernel files from copies of folders, as ``source.reading``."""
        self.rest()
        self._copies = dict(copies)

    def rest(self) -> None:
        """Ends the process; the next task starts a new one."""
        process, self._process = self._process, None
        if process:
            process.end()

    def _begun(self, task: Task) -> list[Outcome]:
        """Runs kernels until one of them kills or blocks the process, and returns all outcomes."""
        done: list[Outcome] = []
        doing: Outcome | None = None
        seconds: float | None = None
        process = self._started()
        try:
            process.pipe.send(task)
            while process.pipe.poll(seconds):
                step = process.next_step()
                if step is None:
                    return done
                doing = step if step.kind in kinds.STEPS else None
                done += [] if doing else [step]
                seconds = task.timeout if step.kind == kinds.RUNNING else None
            kind, message = kinds.NO_ANSWER, f"no answer within {task.timeout:g} s"
        except ConnectionError:
            kind, message = kinds.DIED, process.cause_of_death()
        self.rest()
        self._check_stopped()
        if doing:
            return [*done, replace(doing, kind=kind, message=message)]
        return done + [Outcome(name_of(x), kind, message) for x in _left(task, done)]

    def _started(self) -> _Started:
        if self._process is None:
            self._process = _Started(self._backend, self._variables, self._copies)
            self._check_stopped()
            try:
                self._process.next_step()
            except ConnectionError:
                self._check_stopped()
                cause = self._process.cause_of_death()
                raise DeviceError(
                    f"a worker process did not start ({cause}); use --jobs 0"
                ) from None
        return self._process

    def _check_stopped(self) -> None:
        if self._is_stopped:
            self.rest()
            raise Stopped


Worker = Here | Process


def _one_of(devices: int, number: int) -> dict[str, str]:
    """Returns the environment variable that restricts a process to one of several GPUs."""
    if devices < 2:
        return {}
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name, ",".join(map(str, range(devices)))).split(",")
    return {name: visible[number % min(devices, len(visible))].strip()}


def _left(task: Task, done: Sequence[Outcome]) -> tuple[KernelOrName, ...]:
    have = {outcome.kernel for outcome in done}
    return tuple(kernel for kernel in task.kernels if name_of(kernel) not in have)


class _Started:
    """A running worker process, with its pipe and its output."""

    def __init__(
        self, backend: Backend | str, variables: Mapping[str, str], copies: Mapping[Path, Path]
    ) -> None:
        self.pipe, theirs = Pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._log.close)  # not in `end`: another thread may still read it
        package = Path(__file__).resolve().parents[3]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(package), str(theirs.fileno())],
            stdin=subprocess.PIPE,  # closes when the parent ends, for whatever reason
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **variables},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C interrupts only the parent
        )
        theirs.close()
        with suppress(BrokenPipeError):  # the worker is already dead; `next_step` raises
            self.pipe.send((backend, copies))

    def next_step(self) -> Any:
        """Returns the worker's next message. Raises the error that the worker sent instead.

        Raises ConnectionError if the worker died.
        """
        try:
            step = self.pipe.recv()
        except EOFError:
            raise ConnectionResetError from None
        if isinstance(step, Exception):
            raise step
        return step

    def end(self) -> None:
        """Terminates the process and any compiler it started; kills it if it does not exit soon."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    def cause_of_death(self) -> str:
        """Describes the signal or exit code of the process, and the last line of its output."""
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process died ({how}){': ' + lines[-1] if lines else ''}"


def serve(handle: int) -> None:
    """Runs a worker process's main loop: receives tasks from a pipe, sends each step back."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe: Connection[Any, Any] = Connection(handle)
    try:
        name, copies = pipe.recv()
        backend = backend_named(name)
        pipe.send(None)
        with source.reading(copies):
            while True:
                for step in perform(backend, pipe.recv()):
                    pipe.send(step)
                pipe.send(None)
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


def _end_with_parent() -> None:
    while os.read(0, 1):  # sys.stdin.read would hold a lock that blocks the exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    os._exit(1)


def in_parallel(
    workers: Sequence[Worker], job: Callable[[Any, Item], Made], items: Sequence[Item]
) -> Iterator[tuple[Item, Made]]:
    """Yields (item, job(worker, item)) as jobs finish; an error stops all workers."""
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
    left = {threads.submit(on_a_free_one, item) for item in items}
    try:
        while left:  # a signal may reach another thread; Python heeds it when this one awakes
            done, left = wait(left, _PATIENCE, FIRST_COMPLETED)
            yield from (x.result() for x in done)
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # in threads, so that an interrupt returns quickly
            threading.Thread(target=worker.stop).start()
        raise
    threads.shutdown()
