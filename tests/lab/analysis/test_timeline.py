"""Timelines: recorded entries, steps, clocks and traces; code without a timeline has no cost."""

import json
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import click
import numpy as np
import pytest
from helpers import own_kernel
from helpers.cli import SIMULATOR, cli, strict

import cupyfa
from cupyfa import Unsupported
from cupyfa.lab.analysis import timeline_recorder as timelines, timeline_trace as traces
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.analysis.timeline_plot import _block_figure, _legend, draw
from cupyfa.lab.analysis.timeline_recorder import Arrow, Entry, Kind, Span, Timeline, record
from cupyfa.lab.analysis.timeline_summary import facts, lines, shares
from cupyfa.lab.bench import sweeps
from cupyfa.lab.commands import timeline as commands
from cupyfa.lab.verify.case import Case
from cupyfa.ladder import LADDER
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import source as sources
from cupyfa.planner.choose_kernel import plan
from cupyfa.planner.plan import Recording
from cupyfa.runtime.simulator import Simulator

SIZES = {"batch": 1, "heads": 1, "M": 192, "N": 384, "d": 16, "dtype": "float16"}
ODD_WINDOWS = ("12", "0:inf", "5:2", "nan:3", "a:b")
ODD_MEMBERS = (
    *("int x : 3;", "int f() { return 1; }", "int (*x)(int);"),
    *("struct X;", "MORE", "#if 1"),
)
OPTIONS = ("-B", 1, "-H", 1, "-M", 192, "-N", 384, "-d", 16, "--dtype", "float16", *SIMULATOR)


def standard(kernel, sizes, *, small):
    (usual,) = sweeps.problems(kernel.operation, sizes, kernel, small=small)
    return Case(kernel.operation, usual)


def recorded(name, block=0, **sizes):
    kernel = record_named(name)
    return record(
        kernel, standard(kernel, {**SIZES, **sizes}, small=True), Simulator(), block=block
    )


@pytest.fixture(scope="module")
def overlap():
    """Records a block of wgmma_overlap: a producer warp and ping-pong consumer warpgroups."""
    return recorded("wgmma_overlap")


# Recording costs nothing when it is off


def without_marks(folder):
    """Copies the kernels without the lines that record; returns the folder."""
    copied = shutil.copytree(sources.KERNELS, folder / "kernels")
    for path in (x for x in copied.rglob("*.cu*") if "timeline" not in x.name):
        text = path.read_text()
        kept = re.sub(r"^ *(const )?timeline::[^;]*;\n", "", text, flags=re.MULTILINE)
        path.write_text(kept.replace("#include <timeline.cuh>\n", ""))
    return copied


WITHOUT_RECORDING = (
    *("wgmma_overlap", "fa2", "mma_split_kv", "wgmma_two_pass", "softmax_safe", "softmax_online"),
    *("minimal", "v1", "v2", "v3", "fa2_coalesced", "fa2_split_kv", "columns", "rows", "two_pass"),
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WITHOUT_RECORDING)
def test_without_a_recording_the_code_is_that_without_marks(name, tmp_path):
    compiler = pytest.importorskip("cupyfa.runtime.cuda.compiler")
    kernel, bare = record_named(name), without_marks(tmp_path)
    (problem,) = [standard(kernel, {}, small=False).problem]
    removed = 0
    for launch in plan(kernel, problem, limits_of("90")).programs:
        file = sources.file_of(launch)
        own = (bare / launch.path).read_text()
        text = sources.text(launch)
        folders = sources.include_folders(launch)
        there = [bare / x.relative_to(sources.KERNELS) for x in folders]
        assert file in text and all(x.is_dir() for x in there)
        arch = launch.target or "90"
        codes = [
            compiler.compile_text(x, "x.cu", arch, y, to_ptx=True, log=False)[0].decode()
            for x, y in ((text, folders), (text.replace(file, own), there))
        ]
        codes = [re.sub(r"_INTERNAL_\w+?_x_cu_[0-9a-f]{8}", "", x) for x in codes]
        assert codes[0] == codes[1]
        reached = sources.texts(launch)
        removed += sum(len(re.findall(r"timeline::(?:Phase|event)\b", x)) for x in reached)
    assert removed > 1, "there were marks to leave out"


def test_a_recorded_launch_compiles_for_a_gpu_too():
    compiler = pytest.importorskip("cupyfa.runtime.cuda.compiler")
    kernel = record_named("mma_async")
    problem = standard(kernel, {}, small=False).problem
    (launch,) = plan(kernel, problem, limits_of("80")).programs
    for detailed in (True, False):
        made = replace(launch, recording=Recording(0, 2, 64, detailed))
        text, folders = sources.text(made), sources.include_folders(made)
        code, _ = compiler.compile_text(text, "x.cu", "80", folders, to_ptx=True, log=False)
        phases = len(re.findall(rb"%clock64", code))
        assert (phases > 12) == detailed and phases >= 2
        assert b"timeline_log" in code and b"%smid" in code
        barriers = re.findall(rb"\bbar(?:rier)?\.sync\b.*?%clock64", code, re.DOTALL)
        # A warp stalls not at the barrier but at its next memory access, so the clock that ends a
        # barrier wait must follow a memory access.
        assert barriers and (not detailed or all(b"@there" in x for x in barriers))


# Recorded entries


def test_the_kinds_are_those_of_the_header():
    text = (sources.INCLUDE / "tile" / "timeline_kinds.cuh").read_text()
    names = re.findall(r"^  (\w+),", text, re.MULTILINE)
    assert [x.upper() for x in names] == [x.name for x in Kind]
    assert f"ended = {timelines._ENDED:#x}" in text
    functions = (
        set(re.findall(r"^(?:struct|__device__)[^;{]*?(\w+)(?:\(| \{)", x, re.MULTILINE))
        for x in (
            (folder / "timeline.cuh").read_text() for folder in (sources.INCLUDE, sources.RECORDING)
        )
    )
    off, on = functions
    assert off <= on and {"event", "Phase", "mark"} <= off


def test_all_kernels_on_tensor_cores_have_marks():
    rungs = [x for own in LADDER.values() for x in own.values() if "mma" in x.name]
    for rung in rungs:
        found = plan(rung, standard(rung, {}, small=True).problem, limits_of("90"))
        text = "".join(sources.texts(timelines._chosen(found, None)))
        kinds = ("softmax", "epilogue", "issue" if "wgmma" in rung.name else "products")
        assert all(f"timeline::{x}" in text for x in kinds), rung.name
    assert len(rungs) > 20


def test_phases_of_a_warp_follow_each_other_without_gaps(overlap):
    for warp in range(overlap.warps):
        own = [x for x in overlap.phases if x.warp == warp]
        assert own[0].start < overlap.end and own[0].kind is Kind.IN_BLOCK
        assert all(a.end == b.start for a, b in pairwise(own))
    assert overlap.lost == 0 and overlap.in_steps and overlap.blocks == (0,)


def test_barriers_have_the_names_of_their_members(overlap):
    names = {x.name for x in overlap.phases}
    assert {"wait: K full", "wait: V full", "wait: Q full", "wait: K empty"} <= names
    assert {"softmax", "epilogue", "wait: wgmma", "wait: __syncthreads"} <= names
    assert "wait: dS_full" in {x.name for x in recorded("wgmma_columns", M=64, N=128).phases}


def test_copies_end_in_waits_and_arrows_join_them(overlap):
    tiles = 3
    assert sum(x.name == "K" for x in overlap.copies) == tiles
    assert {x.bytes for x in overlap.copies if x.name == "K"} == {128 * 64 * 2}
    ends = {(x.warp, x.end) for x in overlap.phases if x.kind is Kind.BARRIER_WAIT}
    assert {(x.end_warp, x.end) for x in overlap.arrows} <= ends
    assert all(x.start_warp == 0 for x in overlap.arrows if x.is_copy)
    assert any(x.end_warp == 0 for x in overlap.arrows if not x.is_copy)


def test_all_warps_wait_together_in_a_kernel_of_ones_own(tmp_path):
    names = "cycles", "nanoseconds", "multiprocessor", "record", "record_at", "record_place"
    own_names = "".join(f"__device__ void {x}(unsigned, unsigned);\n" for x in names)
    script = own_kernel.write(
        tmp_path, cu=('extern "C"', f'#include <timeline.cuh>\n{own_names}\nextern "C"')
    )
    cu = tmp_path / "mine.cu"
    text = cu.read_text()
    assert "__syncthreads" not in text
    place = text.index("{", text.index("mine("))
    cu.write_text(
        f'{text[: place + 1]}\n  {{ const auto phase = mark("own \\"a\\""); __syncthreads(); }}\n'
        f'  constexpr char name[] = "x";\n  mark(name);\n{text[place + 1 :]}'
    )
    kernel = record_named(f"{script}:mine")
    case = standard(kernel, {"batch": 1, "heads": 1, "M": 9, "N": 7, "d": 8}, small=True)
    found = record(kernel, case, Simulator(), block=0)
    names = {'own "a"', "wait: __syncthreads", f"mark {timelines._hash('x'):#x}"}
    assert {x.name for x in found.phases} == {"other", *names}


@pytest.mark.parametrize(
    "body, names",
    [
        ("  unsigned char flags[4];\n  const float *x, **y;\n", "flags x y"),
        ("\n    alignas(sizeof(int)) int tile[(a + b)];\n\tBarrier go, stop;", "tile go stop"),
        ("  // <;>\n  Tile<max(a, b)> K[2][a < b ? 1 : 2];\n  int first = 4;\n", "K first"),
        ("  static constexpr int x = 4;\n  using T = int;\n  Pipeline<1> Q;", "Q"),
        *((f"  Barrier ready;\n  {odd}\n  Barrier gone;\n", "") for odd in ODD_MEMBERS),
    ],
)
def test_members_of_shared_memory_have_names_if_all_are_understood(body, names):
    for head in ("struct Shared {", "#include <x>\nstruct Shared {  // of a block\n"):
        assert sources.members(f"{head}{body}}};\n") == names.split()
    for head in ("struct Shared : Base {", "template <int n>\nstruct Shared {"):
        assert sources.members(f"{head}{body}}};\n") == []


def test_a_recording_is_in_the_body_of_the_entry_point():
    declared = "void mine(int);  // mine(1) {\nint f() { return 1; }\n"
    found = sources._recorded(f"{declared}void mine(int x) /* y */\n{{\n}}", "mine", "x.cu")
    assert found.startswith(f"{declared}void mine(int x) /* y */\n{{ timeline::Block")
    with pytest.raises(ValueError, match=r"move the body of mine into this file"):
        sources._recorded('#include "body.cuh"\nvoid mine(int);\n', "mine", "x.cu")


def test_blocks_and_launches_that_are_not_there():
    with pytest.raises(ValueError, match=r"wgmma_overlap has no block 7; use 0, or 'all'"):
        recorded("wgmma_overlap", block=7)
    kernel = record_named("wgmma_two_pass")
    case = standard(kernel, SIZES, small=True)
    with pytest.raises(ValueError, match="its launches are 0: .*, 2: wgmma_two_pass_rows; choose"):
        record(kernel, case, Simulator(), block=0, launch="wgmma")
    huge = standard(record_named("fa2"), {"M": 2**24}, small=True)
    with pytest.raises(Unsupported, match="choose smaller sizes, or record a single block"):
        record(record_named("fa2"), huge, Simulator(), block=None)


def test_launches_with_the_same_name_have_numbers_and_rounds_are_recorded_one_at_a_time():
    most = record_named("baseline_backward")  # no launch has the kernel's name
    found = plan(most, standard(most, {}, small=True).problem, Simulator().limits)
    assert timelines._chosen(found, None).entry == "score_gradients"
    kernel, tiles = record_named("mma_slices_backward"), {"room": 1}
    case = standard(kernel, {**SIZES, "M": 32, "N": 512}, small=True)
    name = "mma_slices_backward_scores"
    whole, part = (
        record(kernel, case, Simulator(), block=0, tiles=x, launch=name) for x in ({}, tiles)
    )
    assert whole.entry == name and part.entry == f"{name} (launch 1)"
    assert len(whole.phases) == len(part.phases)
    found = plan(kernel, case.problem, Simulator().limits, **tiles)
    assert {"mma_delta", "mma_slices_backward_rows"} <= {*whole.other_launches}
    second = timelines._chosen(found, "4")
    assert timelines._title(found, second) == f"{name} (launch 4)"


def test_all_blocks_of_a_persistent_kernel_go_from_task_to_task():
    found = recorded("wgmma_persistent", block=None, heads=8)
    assert found.blocks == (0, 1, 2, 3) and sorted(found.places.values()) == [0, 1, 2, 3]
    ends = [x for x in found.phases if x.block == 0 and x.warp == 4 and x.kind is Kind.EPILOGUE]
    assert len(ends) == 2  # four persistent blocks process eight tiles
    assert facts(found) == {"time": found.end}
    rows = [x.row() for x in shares(found)]
    assert {"work", "epilogue"} <= {x["phase"] for x in rows}
    assert {x["longest_block"] for x in rows} <= {0, 1, 2, 3}


def test_each_timed_run_begins_with_an_empty_log():
    log, calls = np.ones(2), []

    class Clock:
        def time(self, call):
            calls.append(log.any())
            log[...] = 1
            return len(calls)

    assert timelines._shortest(Clock(), log, None) == 1
    assert len(calls) == timelines._TIMES and not any(calls)


def test_what_a_recording_costs_is_told_of_the_call_and_of_the_block(monkeypatch):
    monkeypatch.setattr(timelines, "_TIMES", 1)
    gpu = Simulator()
    gpu.name = "cuda"
    kernel = record_named("v1")
    sizes = {"batch": 1, "heads": 1, "M": 8, "N": 8, "d": 8}
    found = record(kernel, standard(kernel, sizes, small=True), gpu, block=0)
    assert 0 < found.undisturbed < found.end and found.milliseconds > 0
    said = f"the recorded block took {found.end:.0f} cycles, and {found.undisturbed:.0f} without"
    assert said in lines(found)[-1]


# Clocks and steps


def entry(time, warp, kind, ended=False, argument=0, amount=0, block=0):
    return Entry(time, block, warp, kind, ended, amount, argument)


def test_clocks_of_multiprocessors_are_joined_by_that_of_the_device():
    entries, rate = [], 1.5
    for block, (begin, end, clock) in enumerate([(1000, 3000, 70_000), (1500, 3500, 5_000_000)]):
        at = [clock, clock + rate * (end - begin)]
        entries += [
            entry(begin, 0, Kind.PLACED, argument=9 + block, block=block),
            entry(at[0], 0, Kind.IN_BLOCK, block=block),
            entry(at[1], 0, Kind.IN_BLOCK, ended=True, block=block),
            entry(end, 0, Kind.PLACED, argument=9 + block, block=block),
        ]
    found, places = timelines._on_one_clock(entries, None)
    assert places == {0: 9, 1: 10}
    assert [x.time for x in found] == pytest.approx([1.0, 3.0, 1.5, 3.5])
    begun = [x for x in entries if not x.ended][:2]  # without ends, the device's clock rate is used
    (found,), _ = timelines._on_one_clock(begun, 2.0)
    assert found.time == pytest.approx(1.0)


def test_all_warps_end_where_the_first_entries_were_lost():
    entries = [
        entry(0, 0, Kind.IN_BLOCK),
        entry(2, 0, Kind.SOFTMAX),
        entry(7, 0, Kind.SOFTMAX, ended=True),
        entry(0, 1, Kind.IN_BLOCK),
        entry(4, 1, Kind.BLOCK_WAIT),
    ]
    blank = small(phases=(), lost=9)
    found = timelines._of_block(blank, entries, timelines._Barriers(), {}, {(0, 1): 9}, 1.0)
    assert [(x.warp, x.name, x.start, x.end) for x in found.phases] == [
        (0, "other", 0, 2),
        (0, "softmax", 2, 4),
        (1, "other", 0, 4),
    ]
    assert lines(found)[0].startswith("the log was full; the timeline ends at the first of 9 lost")


def test_a_block_that_lost_entries_cuts_no_other_and_keeps_what_it_has():
    """The last entry that fits may be of a kind that timelines of all blocks do not show."""
    whole = [entry(0, 0, Kind.IN_BLOCK), entry(9, 0, Kind.IN_BLOCK, ended=True)]
    cut = [entry(2, 0, Kind.IN_BLOCK, block=1), entry(6, 0, Kind.BLOCK_WAIT, block=1)]
    blank = small(phases=(), lost=9, grid=2, is_detailed=False, in_steps=True)
    found = timelines._of_all_blocks(blank, [*whole, *cut], {}, {(1, 0): 9}, None)
    assert [(x.block, x.length > 0) for x in found.phases] == [(0, True), (1, True)]


def test_steps_number_the_entries_of_each_block_in_the_order_of_the_simulator():
    kinds = (Kind.IN_BLOCK, Kind.SOFTMAX)
    entries = [
        entry(9 * block + 2 * step + warp, warp, kind, block=block)
        for block in range(2)
        for warp in range(2)
        for step, kind in enumerate(kinds)
    ]
    found = timelines._in_steps(entries)
    assert [(x.block, x.warp, x.time) for x in found] == [
        *((0, 0, 0), (0, 0, 2), (0, 1, 1), (0, 1, 3)),
        *((1, 0, 0), (1, 0, 2), (1, 1, 1), (1, 1, 3)),
    ]
    assert [x.kind for x in found] == 4 * [*kinds]


OF_ATTENTION, OF_GRADIENTS = "loads products softmax epilogue", "loads products epilogue"
SCALAR = {
    "softmax_safe": "softmax epilogue",
    "softmax_online": "softmax epilogue",
    "minimal": "loads products softmax",
    "v1": "loads products softmax",
    "v2": "loads products softmax",
    "v3": "loads mma softmax epilogue",
    "fa2": OF_ATTENTION,
    "fa2_coalesced": OF_ATTENTION,
    "fa2_split_kv": OF_ATTENTION,
    "columns": OF_GRADIENTS,
    "rows": OF_GRADIENTS,
    "two_pass": OF_GRADIENTS,
}


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_rungs_show_what_they_do(name):
    kernel = record_named(name)
    sizes = {"M": 8, "N": 640} if kernel.operation == "softmax" else {"M": 64, "N": 64, "d": 32}
    attention = {} if kernel.operation == "softmax" else {"batch": 1, "heads": 1}
    case = standard(kernel, {**sizes, **attention}, small=True)
    found = record(kernel, case, Simulator(), block=0)
    assert {*SCALAR[name].split()} <= {x.phase for x in shares(found)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [x.name for x in cupyfa.kernels() if x.launches and "baseline" not in x.name]
)
def test_every_rung_has_phases_with_names(name):
    kernel = record_named(name)
    found = record(kernel, standard(kernel, {}, small=True), Simulator(), block=0)
    assert len({x.phase for x in shares(found)} - {"other", "idle"}) > 1


@pytest.mark.parametrize("name, count", [("baseline", 2), ("baseline_backward", 5)])
def test_products_that_cannot_be_recorded_are_named(name, count):
    sizes = {"batch": 1, "heads": 1, "M": 16, "N": 16, "d": 8}
    found = record(record_named(name), standard(record_named(name), sizes, small=True), Simulator())
    assert found.library_products == count
    assert any(f"not recorded: {count} products of the call" in x for x in lines(found))


def test_a_picture_marks_what_it_leaves_out_and_names_its_arrows(overlap):
    whole = texts_of(_block_figure(overlap, None))
    assert "from a copy to the wait for it" in whole
    assert "from the last reader of a buffer to the wait for it" in whole
    assert not any("left out" in x for x in whole)
    long = texts_of(_block_figure(recorded("wgmma_overlap", N=4096), None))
    assert sum(bool(re.fullmatch(r"[\d,]+ steps are left out →", x)) for x in long) == 1


def texts_of(figure):
    legends = [x.get_text() for legend in figure.legends for x in legend.get_texts()]
    return [*legends, *(x.get_text() for axes in figure.axes for x in axes.texts)]


def test_an_epilogue_inside_another_is_one_with_it():
    (launch,) = plan(
        record_named("fa2"), standard(record_named("fa2"), {}, small=True).problem, limits_of("90")
    ).programs
    log = np.zeros((1, launch.warps, 9, 4), np.uint32)
    kinds = [Kind.IN_BLOCK, Kind.EPILOGUE, Kind.EPILOGUE]
    log[0, 0, 1:7, 2] = [*kinds, *(x | timelines._ENDED for x in reversed(kinds))]
    log[0, 0, 0, 0] = 6
    found, full = timelines._entries(log, launch, Recording(0, 1, 8))
    assert [x.kind for x in found] == [Kind.IN_BLOCK, Kind.EPILOGUE, Kind.EPILOGUE, Kind.IN_BLOCK]
    assert not full


def test_phases_count_where_they_begin():
    entries = [
        entry(0, 0, Kind.IN_BLOCK),
        entry(2, 0, Kind.MARKED),
        entry(3, 0, Kind.BLOCK_WAIT),
        entry(5, 0, Kind.BLOCK_WAIT, ended=True),
        entry(6, 0, Kind.MARKED, ended=True),
        entry(7, 0, Kind.IN_BLOCK, ended=True),
    ]
    phases = tuple(timelines._phases(entries, timelines._Barriers(), {}))
    times = {
        x.phase: x.times for x in shares(small(phases=phases)) if "longest_block" not in x.row()
    }
    assert times == {"mark 0x0": 1, "wait: __syncthreads": 1, "other": 2}


def test_a_warp_ends_with_the_last_of_its_lanes():
    entries = [
        entry(0, 0, Kind.IN_BLOCK),
        entry(4, 0, Kind.IN_BLOCK, ended=True),  # end of the lanes that do not copy
        entry(6, 0, Kind.BARRIER_WAIT),
        entry(9, 0, Kind.BARRIER_WAIT, ended=True),
        entry(12, 0, Kind.IN_BLOCK, ended=True),
    ]
    found = list(timelines._phases(entries, timelines._Barriers(), {}))
    assert [(x.kind, x.start, x.end) for x in found] == [
        (Kind.IN_BLOCK, 0, 6),
        (Kind.BARRIER_WAIT, 6, 9),
        (Kind.IN_BLOCK, 9, 12),
    ]


# Pictures, traces and the command


def small(**changed):
    phases = (
        Span(0, 0, Kind.IN_BLOCK, "other", 0, 10),
        Span(0, 0, Kind.SOFTMAX, "softmax", 10, 40),
        Span(0, 1, Kind.BARRIER_WAIT, "wait: K full", 0, 90),
        Span(0, 1, Kind.IN_BLOCK, "other", 90, 100),
    )
    made = Timeline(
        kernel="k",
        entry="k",
        problem="p",
        device="x",
        in_steps=False,
        grid=1,
        warps=2,
        blocks=(0,),
        phases=phases,
        products=(Span(0, 0, Kind.ISSUE, "wgmma", 0, 25),),
    )
    return replace(made, **changed)


def test_shares_are_of_the_time_of_warps_that_work():
    rows = {x.phase: x.share for x in shares(small())}
    assert rows == {"wait: K full": 45, "idle": 30, "softmax": 15, "other": 10}
    assert facts(small())["softmax_overlap_%"] == 50
    text = "\n".join(lines(small(milliseconds=2.0, recorded_milliseconds=2.5)))
    assert "25.0 % longer" in text and "longest wait" not in text, "the warp that waits only copies"
    assert "wgmma in flight for 25 % of the time, 50 % of the softmax overlaps with wgmma" in text
    both = (*small().phases, Span(0, 1, Kind.ISSUE, "issue: wgmma", 95, 100))
    said = "longest wait of a computing warp: 90 µs for K full, warp 1 from 0 on"
    assert said in lines(small(phases=both, unit="µs"))


def test_a_trace_has_the_format_of_trace_events(overlap):
    """Phases in a row do not overlap, flows begin and end in phases, async events are paired."""
    odd = replace(overlap, nanoseconds=58.1)  # a fractional step, which traces round
    found = defaultdict(list)
    for x in json.loads(json.dumps(traces.trace(odd)))["traceEvents"]:
        found[x["ph"]].append(x)
        assert {"ph", "name", "pid"} <= x.keys() and (x["ph"] == "M" or {"ts", "tid"} <= x.keys())
    assert found.keys() == {*"MXbesf"}
    rows, ends = defaultdict(list), {}
    for x in found["X"]:
        rows[x["pid"], x["tid"]].append(x)
    assert len(found["X"]) == len(overlap.phases)
    named = {(x["pid"], x["tid"]) for x in found["M"] if x["name"] == "thread_name"}
    assert rows.keys() == named
    for row, own in rows.items():
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"], abs=1e-6) for a, b in pairwise(own))
        ends[row] = [(x["ts"], x["ts"] + x["dur"] + 1e-6, x["name"]) for x in own]
    for first, last, own in (("s", "f", overlap.arrows), ("b", "e", overlap.copies)):
        pairs = [
            {(x["cat"], str(x.get("id", x.get("id2")))): x for x in found[ph]}
            for ph in (first, last)
        ]
        count = len(own) + (len(overlap.products) if first == "b" else 0)
        assert pairs[0].keys() == pairs[1].keys() and len(pairs[0]) == count == len(found[first])
        assert all(pairs[0][key]["ts"] <= pairs[1][key]["ts"] for key in pairs[0])
    for x in (*found["s"], *found["f"]):
        around = [name for a, b, name in ends[x["pid"], x["tid"]] if a <= x["ts"] <= b]
        assert around and (x["ph"] == "s" or "wait" in around[0])


def test_the_command(tmp_path):
    picture, trace = tmp_path / "x.svg", tmp_path / "x.json"
    done = cli("timeline", "wgmma_overlap", *OPTIONS, "--plot", picture, "--save", trace)
    assert "a step is one recorded event, in the order of the simulator" in done.stdout
    copying = next(x for x in done.stdout.splitlines() if x.startswith("wait: K empty"))
    assert re.fullmatch(r"wait: K empty +[\d.]+ +\d+ +\d+ +\d+ +0 +\d+", copying)
    svg = picture.read_text()
    assert all(x in svg for x in ("warp 4", "waits for wgmma", "waits for a free buffer", "K full"))
    printed = cli("timeline", "wgmma_overlap", *OPTIONS, "--format", "perfetto").stdout
    assert strict(printed)["traceEvents"] == json.loads(trace.read_text())["traceEvents"]


def test_blocks_and_windows_that_are_refused(tmp_path, overlap):
    assert "4 (1 in the simulator)" in " ".join(cli("timeline", "--help").stdout.split())
    for kind, odd in ((commands._Block(), "²"), *((commands._Window(), x) for x in ODD_WINDOWS)):
        with pytest.raises(click.BadParameter, match="is n"):
            kind.convert(odd, None, None)
    with pytest.raises(ValueError, match="is empty; its start must precede its end"):
        draw(overlap, tmp_path / "x.png", (5, 5))
    with pytest.raises(ValueError, match=f"outside the timeline, .* 0 to {overlap.end:g} steps"):
        draw(overlap, tmp_path / "x.png", (overlap.end, overlap.end + 1))
    with pytest.raises(ValueError, match="nothing to plot"):
        draw(small(phases=()), tmp_path / "x.png")


def test_long_timelines_show_both_ends_and_all_blocks_a_row_for_each_multiprocessor(tmp_path):
    tile = [Span(0, 0, Kind.SOFTMAX, "softmax", i, i + 1) for i in range(9999)]
    draw(small(phases=tuple(tile)), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().count(">warp 0<") == 2
    arrows = [Arrow(0, 0, i, 1, i + 60, i % 2 == 0) for i in range(200)]
    draw(small(arrows=arrows), tmp_path / "x.svg", (50, 100))
    assert "50 of 100 arrows are shown" in (tmp_path / "x.svg").read_text()
    pytest.importorskip("matplotlib")
    figure = _block_figure(small(phases=tuple(tile)), (0, 9999))
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    row = pixels[pixels.shape[0] // 3, pixels.shape[1] // 2 :]
    assert (row == (0, 158, 115)).all(axis=1).mean() > 0.9, "edges hide narrow bars"
    own = tuple(Span(0, 0, Kind.MARKED, name, i, i + 1) for i, name in enumerate("aba"))
    (a, one), (b, other) = _legend(small(phases=own, products=()), [(0, 9)])
    assert (a, b) == ("a", "b") and one != other
    blocks = tuple(Span(i, 0, Kind.IN_BLOCK, "other", i % 2, 5) for i in range(8))
    places = {i: i // 2 for i in range(8)}
    draw(small(phases=blocks, places=places, is_detailed=False), tmp_path / "y.svg")
    svg = (tmp_path / "y.svg").read_text()
    assert "SM 3" in svg and "the next block or task" in svg and ">epilogue<" not in svg
    later = Span(0, 1, Kind.IN_BLOCK, "other", 0, 9)  # another warp of block 0, which ends later
    all_blocks = small(phases=(*blocks, later), places=places, is_detailed=False)
    ends = {
        x["tid"]: x["ts"] + x["dur"]
        for x in traces.trace(all_blocks)["traceEvents"]
        if "dur" in x and x["name"].startswith("block")
    }
    assert ends[0] == pytest.approx(0.009) and ends[1] == pytest.approx(0.005)
