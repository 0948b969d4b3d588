"""Workers: processes that run tasks, are replaced when they die, and can be stopped."""

import signal
import threading
import time
from dataclasses import replace

import pytest
from helpers import broken_kernels

from cupyfa import Problem, Simulator
from cupyfa.lab.verify import workers
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.failures import DEVICE_LOST, DIED, NO_ANSWER, RIGHT, UNSUPPORTED, Outcome
from cupyfa.lab.verify.tasks import Task
from cupyfa.lab.verify.workers import Here, Process, Stopped, in_parallel

FAULTY = Case("softmax", Problem.of_row_sizes(2, 7, "float32"))  # faults appear for N % 4 == 3
FINE = Case("softmax", Problem.of_row_sizes(2, 8, "float32"))


@pytest.fixture
def worker():
    made = Process(Simulator())
    yield made
    made.stop()


def kinds(outcomes):
    return [outcome.kind for outcome in outcomes]


def test_processes_take_several_devices_in_turn(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    of_two = [workers._one_of(2, number)["CUDA_VISIBLE_DEVICES"] for number in range(4)]
    assert of_two == ["0", "1", "0", "1"] and workers._one_of(1, 3) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-3a")
    assert workers._one_of(2, 3) == {"CUDA_VISIBLE_DEVICES": "GPU-3a"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # fewer devices than were counted
    assert workers._one_of(2, 3) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_process_gives_the_same_outcomes(worker):
    task = Task(FINE, ("softmax_safe", "softmax_online"), keep=True)
    here, there = Here(Simulator()).run(task), worker.run(task)
    assert here == there
    assert kinds(there) == [RIGHT, RIGHT]
    for a, b in zip(here, there):
        assert {x: y.tobytes() for x, y in a.arrays.items()} == {
            x: y.tobytes() for x, y in b.arrays.items()
        }


def test_a_kernel_that_crashes_is_named_and_the_process_is_replaced(tmp_path, worker):
    kernel = broken_kernels.write(tmp_path, broken_kernels.DIES)
    done = worker.run(Task(FAULTY, ("softmax_safe", kernel, "softmax_online"), keep=True))
    assert [(outcome.kernel, outcome.kind) for outcome in done] == [
        ("softmax_safe", RIGHT),
        (kernel, DIED),
        ("softmax_online", RIGHT),
    ]
    assert done[1].message == f"the process died (signal {signal.SIGILL.value})"
    assert {"S", "expected_P", "bound_P"} <= set(done[1].arrays)
    assert kinds(worker.run(Task(FINE, (kernel,)))) == [RIGHT]


def test_the_last_line_of_a_crashed_process_is_shown(tmp_path, worker):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('out of luck', file=sys.stderr)\nos._exit(3)\n")
    (outcome,) = worker.run(Task(FINE, (f"{script}:mine",)))
    assert outcome.kind == DIED
    assert outcome.message == "the process died (exit code 3): out of luck"


def test_a_kernel_that_hangs_is_killed_in_time(tmp_path, worker):
    kernel = broken_kernels.write(tmp_path, broken_kernels.HANGS)
    assert kinds(worker.run(Task(FINE, (kernel,)))) == [RIGHT]  # compiles the kernel
    start = time.monotonic()
    done = worker.run(Task(FAULTY, (kernel, "softmax_safe"), timeout=0.5))
    assert kinds(done) == [NO_ANSWER, RIGHT]
    assert 0.5 < time.monotonic() - start < 10


def test_compile_time_does_not_count(tmp_path, worker):
    kernel = broken_kernels.write(tmp_path)
    mine = tmp_path / "mine.cu"
    mine.write_text(mine.read_text() + f"// new to every cache: {tmp_path}\n")
    assert kinds(worker.run(Task(FINE, (kernel,), timeout=0.1))) == [RIGHT]


def test_a_lost_device_ends_its_process(monkeypatch, worker):
    """After a lost device, as when a kernel traps on a GPU, the process runs no other task."""
    started = []
    begun = worker._begun

    def lost(task):
        started.append(task.kernels)
        done = begun(task)
        return [replace(done[0], kind=DEVICE_LOST)] if len(started) == 1 else done

    monkeypatch.setattr(worker, "_begun", lost)
    rests, rest = [], worker.rest
    monkeypatch.setattr(worker, "rest", lambda: rests.append(len(started)) or rest())
    done = worker.run(Task(FINE, ("softmax_safe", "softmax_online")))
    assert kinds(done) == [DEVICE_LOST, RIGHT]
    assert started == [("softmax_safe", "softmax_online"), ("softmax_online",)]
    assert rests[0] == 1


def test_without_a_process_a_lost_device_stays_lost(monkeypatch):
    here = Here(Simulator())
    lost = Outcome("softmax_safe", DEVICE_LOST)
    monkeypatch.setattr(workers, "perform", lambda engine, task: iter([lost]))
    task = Task(FINE, ("softmax_safe", "softmax_online"))
    assert kinds(here.run(task)) == [DEVICE_LOST, UNSUPPORTED]
    assert kinds(here.run(task)) == [UNSUPPORTED, UNSUPPORTED]


def test_the_schedule_reaches_the_process(tmp_path):
    kernel = broken_kernels.write(tmp_path, broken_kernels.DEPENDS_ON_THE_ORDER)
    ratios = set()
    for schedule in (None, 1, 2):
        worker = Process(Simulator(schedule=schedule))
        (outcome,) = worker.run(Task(FINE, (kernel,)))
        worker.stop()
        ratios.add(outcome.worst.ratio)
    assert len(ratios) > 1


@pytest.mark.slow
def test_stopping_ends_running_tasks(tmp_path, worker):
    kernel = broken_kernels.write(tmp_path, broken_kernels.HANGS)
    ended = []

    def run():
        with pytest.raises(Stopped):
            worker.run(Task(FAULTY, (kernel,)))
        ended.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(3)
    start = time.monotonic()
    worker.stop()
    thread.join(10)
    assert ended and ended[0] - start < 5
    with pytest.raises(Stopped):
        worker.run(Task(FINE, ("softmax_safe",)))


def test_a_process_that_cannot_start_says_why(monkeypatch, worker):
    monkeypatch.setattr(workers, "_START", "raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match="did not start.*exit code 1.*no such thing"):
        worker.run(Task(FINE, ("softmax_safe",)))


class Slow:
    """A worker that does nothing and can be stopped."""

    def __init__(self):
        self.stopped = threading.Event()

    def stop(self):
        self.stopped.set()


def test_each_item_is_processed_once_and_each_worker_runs_one_at_a_time():
    busy = [threading.Lock() for _ in range(3)]

    def job(lock, item):
        assert lock.acquire(blocking=False)
        time.sleep(0.001)
        lock.release()
        return -item

    done = dict(in_parallel(busy, job, range(50)))
    assert done == {item: -item for item in range(50)}


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_is_raised_and_stops_the_others(count):
    crew = [Slow() for _ in range(count)]

    def job(worker, item):
        if item == 2:
            raise KeyError(item)
        worker.stopped.wait(0.1)

    with pytest.raises(KeyError):
        list(in_parallel(crew, job, range(20)))
    if count > 1:
        assert all(worker.stopped.wait(5) for worker in crew)
