"""Profiling: the commands, the parsed output of the profilers, and refusals."""

import csv
import io
import json
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import helpers.cli
import pytest
from helpers import own_kernel
from helpers.cli import line_of

import cupyfa
from cupyfa import DeviceError, Problem, Unsupported
from cupyfa.lab.analysis import nsight as profiling, resources as compiling
from cupyfa.lab.report import tables as report
from cupyfa.lab.verify.case import Case
from cupyfa.planner import source as sources

SMALL = Case("forward", Problem.of_sizes(batch=1, heads=2, M=70, N=45, d=33, causal=True), seed=7)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

# What ncu counted of two launches, by metric: (unit, of the first, of the second).
COUNTED = {
    "gpu__time_duration.sum": ("nsecond", "7,712,345", "1,024"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("", "n/a", "n/a"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("%", "12.5", "0"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", "22.75", "1"),
    STALL.format("barrier"): ("inst", "0.25", "0"),
    STALL.format("long_scoreboard"): ("inst", "3.04", "9"),
    STALL.format("short_scoreboard"): ("inst", "12.96", "1"),
    STALL.format("wait"): ("inst", "1.5", "0"),
    "launch__occupancy_limit_blocks": ("block", "32", "32"),
    "launch__occupancy_limit_registers": ("block", "5", "8"),
    "launch__occupancy_limit_shared_mem": ("block", "2", "9"),
    "launch__occupancy_limit_warps": ("block", "16", "8"),
    "launch__waves_per_multiprocessor": ("", "3.88", "0.25"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "1,344,000", "0"),
    "smsp__inst_executed_op_shared_ld.sum": ("inst", "1,280,000", "0"),
    "dram__bytes.sum.per_second": ("byte/second", "17,400,000,000.5", "n/a"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "0.52", "71"),
}
BEFORE = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
BEFORE += ["Block Size", "Grid Size", "Device", "CC"]


def commands_in(printed):
    """The command lines in an output, each in one line, as a shell reads them."""
    lines = printed.rstrip("\n").replace("\\\n", "").split("\n\n")
    return [shlex.join(shlex.split(line)) for line in lines]


def ncu_prints(names=("fa2", "repair_rows(Tensor<float>, int)")):
    """The output of ``ncu --csv --page raw`` with its other messages."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*BEFORE, *COUNTED])
    writer.writerow([""] * len(BEFORE) + [unit for unit, *_ in COUNTED.values()])
    for i, name in enumerate(names):
        place = [i, "4711", "python3.12", "localhost", name, "1", "7"]
        place += ["(128, 1, 1)", "(1,024, 1, 1)", "0", "9.0"]
        writer.writerow([*place, *(values[1 + i] for values in COUNTED.values())])
    return (
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n"
        '==PROF== Profiling "fa2" - 0: 0%....50%....100% - 9 passes\n'
        f"==PROF== Disconnected from process 4711\n{out.getvalue()}"
    )


NSYS_PRINTS = Path(__file__).with_name("nsys_prints.txt").read_text()


cli = partial(helpers.cli.cli, "profile")


def refused(*args, code=3):
    """The error message: one line on stderr, besides notes."""
    return line_of(cli(*args, code=code).stderr)


@pytest.fixture
def without_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A function that puts a profiler on the PATH that prints a text; pretends to have a GPU.

    What was called with which arguments stands in the file that it returns, a line for each.
    """

    def put(name, text, program=""):
        log, printed, tool = (tmp_path / x for x in (f"{name}.log", f"{name}.txt", name))
        printed.write_text(text)
        cat = shutil.which("cat")
        tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{program}\n{cat} {printed}\n')
        tool.chmod(0o755)
        return log

    class Device:
        limits = compiling.limits_of("90")

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(profiling, "backend_named", lambda name: Device())
    return put


def test_ncu_counts_one_call_of_the_kernels_own_launches_after_a_warm_up():
    command = profiling.ncu_command("baseline", SMALL, {})
    at = command.index
    assert command[at("--kernel-name") + 1] == "regex:^(softmax_safe|repair_rows)$"
    assert command[at("--launch-skip") + 1] == command[at("--launch-count") + 1] == "2"
    assert command[at("--metrics") + 1].split(",") == list(profiling.METRICS)
    assert {"--csv", "raw", "base"} <= set(command)


def test_metrics_are_asked_for_once_and_are_whole_names():
    assert len(set(profiling.METRICS)) == len(profiling.METRICS)
    suffixes = (".sum", ".ratio", "_active", "_elapsed", ".per_second")
    for metric in profiling.METRICS:
        assert metric.startswith("launch__") or metric.endswith(suffixes), metric


@pytest.mark.parametrize("make", [profiling.ncu_command, profiling.nsys_command])
def test_the_program_is_this_one_with_every_size_fixed(make):
    command = make("fa2", SMALL, {"Br": 16})
    program = command[command.index(sys.executable) :]
    assert program[1:3] == [str(sources.ROOT / "cli.py"), "profile"]
    assert program[3:] == ["fa2", *SMALL.options(), "-t", "Br=16", "--once"]


def test_the_hidden_option_runs_what_the_command_names(monkeypatch):
    seen = []
    monkeypatch.setattr(profiling, "launch_twice", lambda *call: seen.append(call))
    command = profiling.ncu_command("fa2", SMALL, {"Br": 16})
    cli(*command[command.index("profile") + 1 :])
    assert seen == [("fa2", SMALL, {"Br": 16})]


def test_the_kernel_is_launched_twice_alike(monkeypatch):
    simulator = cupyfa.Simulator()
    runs = []
    monkeypatch.setattr(profiling, "backend_named", lambda name: simulator)
    run = profiling.run
    monkeypatch.setattr(profiling, "run", lambda *x: (runs.append(x[2]), run(*x)))
    profiling.launch_twice("fa2", SMALL, {"Br": 16, "Bc": 8})
    assert len(runs) == 2 and runs[0] is runs[1]


def test_print_gives_both_command_lines_without_any_tool(without_tools):
    done = cli("fa2", "--print", "-M", 100, "--causal", "--Br", 16)
    ncu, nsys = map(shlex.split, commands_in(done.stdout))
    assert (ncu[0], nsys[0], done.stderr) == ("ncu", "nsys", "")
    sizes = "-B 4 -H 16 -M 100 -N 100 -d 64 --causal=bottom-right --dtype float32 --seed 0"
    for command in (ncu, nsys):
        assert shlex.join(command[-18:]) == f"{sizes} -t Br=16 --once"
    (nsys,) = commands_in(cli("fa2", "--print", "--tool", "nsys").stdout)
    assert nsys.startswith("nsys profile --stats=true")


@pytest.mark.parametrize("form", ["json", "csv", "md"])
def test_commands_are_printed_for_programs_too(without_tools, form):
    """Each in one line."""
    lines = commands_in(cli("fa2", "--print").stdout)
    told = report.render(
        [{"tool": x, "command": line} for x, line in zip(("ncu", "nsys"), lines)], form
    )
    assert cli("fa2", "--print", "--format", form).stdout == f"{told}\n"
    assert cli("fa2", "--format", form, code=3).stdout == f"{told}\n"


def test_a_softmax_is_profiled_by_its_rows():
    for command in commands_in(cli("softmax_safe", "--print", "--dtype", "float16").stdout):
        assert "-M 16384 -N 4096 --dtype float16" in command


def test_a_users_kernel_keeps_its_name(tmp_path):
    script = f"{own_kernel.write(tmp_path)}:mine"
    ncu, nsys = map(shlex.split, commands_in(cli(script, "--print").stdout))
    assert "regex:^(mine)$" in ncu and script in ncu
    assert "--output=cupyfa-mine" in nsys


def test_ncu_rows_are_read_by_launch():
    (first, counted), (second, others) = profiling.read_ncu(ncu_prints())
    assert (first, second) == ("fa2", "repair_rows")
    assert counted["gpu__time_duration.sum"] == 7712345.0
    assert counted["dram__bytes.sum.per_second"] == 17400000000.5
    assert "dram__bytes.sum.per_second" not in others, "n/a is no number"


@pytest.mark.parametrize("said", ["", "==ERROR== nothing\n", '"ID","Kernel Name"\n"",""\n'])
def test_output_without_rows_gives_no_counters(said):
    assert profiling.read_ncu(said) == profiling.read_nsys(said) == []


def values():
    found = profiling.counters(profiling.read_ncu(ncu_prints()))
    return {(x.launch, x.counter): x for x in found}


def test_counters_are_computed_from_metrics():
    found = values()
    assert found["fa2", "duration"].value == pytest.approx(7.712345)
    assert found["fa2", "tensor cores"].value == 12.5, "the second name, where the first is n/a"
    assert found["fa2", "load conflicts"].value == pytest.approx(1.05)
    assert found["fa2", "DRAM traffic"].value == pytest.approx(17.4)
    assert found["fa2", "stalls"].value == ("short scoreboard 13.0, long scoreboard 3.0, wait 1.5")


def test_missing_metrics_are_shown_as_not_available():
    found = values()
    for counter in ("store sectors", "FMA pipe", "occupancy"):
        assert found["fa2", counter].row()["unit"] == "n/a"
        assert found["fa2", counter].row()["value"] is None
    assert found["repair_rows", "load conflicts"].value is None, "it has no shared memory"
    empty = profiling.counters([("fa2", {})])
    assert {x.value for x in empty} == {None} and len(empty) == len(profiling.COUNTERS)


def test_occupancy_is_limited_by_the_scarcest_resource_or_the_grid():
    found = values()
    assert found["fa2", "limited by"].value == "shared memory, 2 blocks"
    assert found["repair_rows", "limited by"].value == "grid, 0.25 waves"


def test_bound_by_the_busiest_unit_or_the_longest_stall():
    found = values()
    assert found["fa2", "bound by"].value == "latency: short scoreboard"
    assert found["repair_rows", "bound by"].value == "DRAM"


def test_nsys_kernels_are_read_without_the_other_tables():
    gemm, softmax = profiling.read_nsys(NSYS_PRINTS)
    assert gemm == profiling.KernelTime("void gemm<float, 4>(int)", 2, 1.4, 3.0)
    assert (softmax.kernel, softmax.median_ms, softmax.total_ms) == ("softmax_safe", 0.5, 1.0)


def test_an_older_nsys_knows_an_average_only():
    said = """\
 Time(%)  Total Time (ns)  Instances  Average    Minimum  Maximum  Name
 -------  ---------------  ---------  ---------  -------  -------  ----
   100.0          4000000          2  2000000.0  1900000  2100000  fa2
"""
    assert profiling.read_nsys(said) == [profiling.KernelTime("fa2", 2, 2.0, 4.0)]


def test_profile_runs_ncu_and_returns_counters(tools):
    log = tools("ncu", ncu_prints(["fa2"]))
    steps = []
    found = cupyfa.lab.profile(
        "fa2", SMALL, progress=lambda *step: steps.append(step), tiles={"Br": 16}
    )
    assert [x.counter for x in found] == list(profiling.COUNTERS)
    assert {x.launch for x in found} == {"fa2"}
    assert [step[:2] for step in steps] == [(0, 1), (1, 1)]
    assert log.read_text().endswith(f"{' '.join(SMALL.options())} -t Br=16 --once\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(tools, monkeypatch, columns):
    tools("ncu", ncu_prints(["fa2"]))
    monkeypatch.setenv("COLUMNS", str(columns))
    done = cli("fa2")
    assert max(map(len, done.stdout.splitlines())) <= columns
    head, *lines = done.stdout.splitlines()
    assert head == "launch=fa2"
    assert lines[0].split() == ["counter", "value", "unit"]
    shown = {line[:16].strip(): line[16:].split() for line in lines[1:]}
    assert shown["duration"] == ["7.712", "ms"]


def test_the_counters_as_data(tools):
    tools("ncu", ncu_prints(["fa2"]))
    rows = json.loads(cli("fa2", "-M", 100, "--format", "json").stdout)
    assert set(rows[0]) == {"launch", "counter", "value", "unit"}
    assert next(x["value"] for x in rows if x["counter"] == "store sectors") is None


def test_metrics_unknown_to_ncu_are_left_out(tools, tmp_path):
    refusal = tmp_path / "refusal"
    refusal.write_text("==ERROR== Failed to find metric regex:^launch__occupancy_limit_blocks$\n")
    known = f'case "$*" in *limit_blocks*) exec {shutil.which("cat")} {refusal};; esac'
    log = tools("ncu", ncu_prints(["fa2"]), known)
    found = cupyfa.lab.profile("fa2", SMALL)
    assert next(x.value for x in found if x.counter == "duration")
    first, second = log.read_text().splitlines()
    assert len(first) > len(second) and "limit_blocks" not in second


def test_nsys_gives_times(tools):
    tools("nsys", NSYS_PRINTS)
    rows = json.loads(cli("baseline", "--tool", "nsys", "--format", "json").stdout)
    assert rows[1] == {"kernel": "softmax_safe", "launches": 2, "median_ms": 0.5, "total_ms": 1.0}
    assert cli("baseline", "--tool", "nsys").stderr == ""


def test_without_ncu_the_commands_are_printed(without_tools):
    done = cli("fa2", code=3)
    assert [line.split()[0] for line in commands_in(done.stdout)] == ["ncu", "nsys"]
    assert refused("fa2").startswith("ncu is not on the PATH; it is part of Nsight Comp")
    with pytest.raises(Unsupported, match="nsys is not on the PATH; it is part of Nsight Systems"):
        profiling.timeline("fa2")


def test_without_a_gpu(tools, monkeypatch):
    def none(name):
        raise DeviceError("no CUDA device (no driver); use backend 'simulator', or 'auto'")

    tools("ncu", "")
    monkeypatch.setattr(profiling, "backend_named", none)
    remedy = "profile on another machine: --print prints the commands"
    assert refused("fa2") == f"no CUDA device (no driver); {remedy}"


def test_the_simulator_has_no_counters():
    message = refused("fa2", "--backend", "simulator")
    assert message == (
        "the simulator has no counters; profile on a GPU: --print prints the commands"
    )


@pytest.mark.parametrize(
    "said, message",
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
            "==WARNING== No kernels were profiled.\n",
            "only administrators may read the counters",
        ),
        (
            "==ERROR== Profiling is not supported on device 0. To find out supported GPUs …\n",
            "install the newest Nsight Compute",
        ),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute\n", "newer than the driver"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", "--tool nsys"),
        ("==PROF== x\ncupyfa: out of memory: 3\n", "saw no launch of fa2: out of memory: 3"),
        ("==ERROR== something new\n", "saw no launch of fa2: something new"),
        ("", "saw no launch of fa2: it gave no reason"),
    ],
)
def test_errors_of_a_profiler_are_one_line_with_the_remedy(tools, said, message):
    tools("ncu", said)
    assert message in refused("fa2")


def test_invalid_problems_are_refused_before_the_profiler_starts(tools):
    log = tools("ncu", "")
    assert "has no rows and launches nothing" in refused("fa2", "-M", 0, code=2)
    assert "bytes of shared memory a block" in refused("fa2", "-d", 100_000)
    assert "its dtypes are float16, bfloat16, float32" in refused("v3", "--dtype", "float64")
    assert "breaks its rule" in refused("fa2", "--Bc", 17, "--Br", 17, code=2)
    assert not log.exists()


@pytest.mark.gpu
def test_counters_of_this_gpu(cuda):
    if shutil.which("ncu") is None:
        pytest.skip("ncu is not on the PATH")
    try:
        found = {x.counter: x for x in cupyfa.lab.profile("fa2", SMALL)}
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert found["duration"].value > 0
    assert found["tensor cores"].value < 2
    assert found["load sectors"].value > 8
