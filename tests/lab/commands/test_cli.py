"""The command line: output, streams and exit codes."""

import csv
import json
import os
import pty
import re
import subprocess
import time

import click
import pytest
from click.testing import CliRunner
from helpers import own_kernel
from helpers.cli import (
    CLI,
    MAIN,
    MODULE,
    SIMULATOR,
    SIZES,
    cli,
    commands,
    process,
    refused,
    strict,
    table,
)
from helpers.problems import DTYPES, PAIRED

import cupyfa
from cupyfa.errors import CompilerNotFound
from cupyfa.lab.bench import sweeps, trial
from cupyfa.lab.commands import command_options as options
from cupyfa.lab.report import tables as report
from cupyfa.lab.report.tables import table_of
from cupyfa.lab.verify import sampling
from cupyfa.ladder import LADDER
from cupyfa.planner import source as sources
from cupyfa.problem.options import OPTIONS
from cupyfa.problem.problem import SIZES as SIZE_NAMES

KERNELS = [name for kernels in LADDER.values() for name in kernels]
# Kernels that round float32.
ROUNDING = ("v3", "mma_pipelined", "mma_split_kv", "mma_slices", "mma_tf32", "wgmma_fp8")
SOFTMAX_SIZES = ("-M", "9", "-N", "7", "--seed", "3")
LAST_LINE = own_kernel.MINE.count("\n") - 1  # the last line before the brace, which writes O
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7])m")


def run(kernel, *args, code=0):
    """Runs a kernel by ``cupyfa run`` in the simulator; returns the row of data."""
    sizes = SOFTMAX_SIZES if kernel in LADDER["softmax"] else SIZES
    done = cli("run", kernel, *SIMULATOR, *sizes, "--format", "json", *args, code=code)
    (row,) = strict(done.stdout)
    return row


def test_list_as_json_holds_every_record():
    rows = strict(cli("list", *SIMULATOR, "--format", "json").stdout)
    assert [(row["operation"], row["kernel"]) for row in rows] == [
        (operation, name) for operation in LADDER for name in LADDER[operation]
    ]
    for row in rows:
        kernel = LADDER[row["operation"]][row["kernel"]]
        assert row["adds"] == kernel.adds
        assert row["dtypes"] == list(kernel.dtypes)
        assert row["tile"] == kernel.choice.first
        is_rounded = kernel.name in ROUNDING
        assert row["float32_as"] == (list(kernel.float32_as) if is_rounded else None)
        assert (row["largest_d"] is None) == (row["operation"] == "softmax")


COLUMNS = ["operation", "kernel", "adds", "dtypes", "tile", "float32_as", "largest_d"]


def test_list_as_csv():
    rows = list(csv.DictReader(cli("list", *SIMULATOR, "--format", "csv").stdout.splitlines()))
    assert list(rows[0]) == COLUMNS
    assert [row["kernel"] for row in rows] == KERNELS
    fa2 = next(row for row in rows if row["kernel"] == "fa2")
    assert json.loads(fa2["tile"]) == LADDER["forward"]["fa2"].choice.first
    assert json.loads(fa2["dtypes"]) == list(DTYPES)


def test_markdown_cells_are_escaped_and_empty_columns_left_out():
    rows = {"message": "mine.cu:3: error\n  a | b\n", "empty": "", "line": None}, {"line": 3}
    given = [{**rows[0], **x} for x in rows]
    lines = report.markdown(given).splitlines()
    assert lines[0] == "| message | line |"
    assert lines[2] == "| mine.cu:3: error<br>  a \\| b |  |"


def test_the_largest_d_depends_on_the_dtype():
    largest = {
        dtype: {
            row["kernel"]: row["largest_d"]
            for row in strict(cli("list", *SIMULATOR, "--dtype", dtype, "--format", "json").stdout)
        }
        for dtype in ("float32", "float64")
    }
    assert largest["float32"]["fa2"] > largest["float64"]["fa2"] > 0
    assert (largest["float32"]["v3"], largest["float64"]["v3"]) == ("any", None)
    assert "v3" in cli("list", *SIMULATOR, "--dtype", "float64").stdout


# Commands, and words of the tables that they print.
TABLES = {
    "list": [f"{x.name} {x.adds}" for kernels in LADDER.values() for x in kernels.values()],
    "run baseline -B 1 -H 2 -M 9 -N 7 -d 8 --seed 3 --causal": [
        *("seed=3", "causal=bottom-right", "layout=bhsd", "ms, the median of", "O error", "PASS")
    ],
    "bench fa2_coalesced -B 1 -H 2 -d 8 --budget 0 -p M=16,32": [
        *("device=the simulator", "seed=0", "baseline", "fa2", "fa2_coalesced")
    ],
    "run softmax_safe -M 4 -N 5": ["softmax_safe 4 blocks of"],
    "cache list": ["compiled", "tuned"],
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", TABLES)
def test_tables_fit_the_terminal(monkeypatch, tmp_path, columns, args):
    monkeypatch.setenv("COLUMNS", str(columns))
    if args == "cache list":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CUPYFA_CACHE_DIR", "ours")
        monkeypatch.setenv("CUPY_CACHE_DIR", "cupys")
    shown = cli(*args.split(), *SIMULATOR * (args != "cache list")).stdout
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
    words = " ".join(shown.split())
    assert not [part for part in TABLES[args] if part not in words]


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", ["auto", *sorted(KERNELS, key=lambda x: x not in PAIRED)])
def test_every_kernel_passes(kernel):
    row = run(kernel)
    assert row["passed"] is True
    assert kernel in ("auto", row["kernel"])
    assert row["milliseconds"] > 0
    assert row["seed"] == 3


def test_large_problems_are_checked_in_excerpts(monkeypatch):
    monkeypatch.setattr(sampling, "_WORK", 1)
    args = "run", "minimal", "-B", "1", "-H", "3", "-M", "200", "-d", "8", *SIMULATOR
    (row,) = json.loads(cli(*args, "--format", "json").stdout)
    assert row["passed"] and 0 < row["checked_%"] < 100
    assert f"checked    {row['checked_%']:.2f}% of the rows" in cli(*args).stdout


@pytest.mark.parametrize("args, expected", table("lab/commands/run_options.txt", 1))
def test_options_of_run(args, expected):
    row, expected = run(*args.split()), json.loads(*expected)
    assert row["passed"]
    assert {name: row[name] for name in expected} == expected


def test_kv_heads_sets_heads_too():
    options = ("--kv-heads", 2, "-M", 5, "-N", 5, "-d", 4, "--format", "json")
    (row,) = strict(cli("run", "fa2", *SIMULATOR, *options).stdout)
    assert (row["heads"], row["kv_heads"]) == (2, 2)


def test_sizes_that_are_left_out_are_those_of_bench():
    (row,) = strict(cli("run", "fa2", *SIMULATOR, "-M", 40, "--format", "json").stdout)
    (usual,) = sweeps.problems("forward", {"M": 40}, small=True)
    assert {name: row[name] for name in SIZE_NAMES} == {x: getattr(usual, x) for x in SIZE_NAMES}
    assert (row["N"], row["d"], row["seed"]) == (40, 64, 0)


def test_help_texts_are_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for names in ((), ("cache",)):
        assert "..." not in cli(*names, "--help").stdout.partition("Commands:")[2]
    assert "[default: float16]" in cli("ladder", "--help").stdout  # not ('float16',)


def test_paths_in_a_table_are_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = "/folder/of-a-user" * 6
    assert path in table_of([{"kind": "zig", "files": 0, "path": path}, {**_ZIG, "path": "/"}])


_ZIG = {"kind": "zig", "files": 1}


@pytest.mark.parametrize("name", ["run", "bench", "check", "tune"])
def test_an_interrupt_says_the_same_in_all_commands(monkeypatch, name):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for command in ("bench", "tune"):
        monkeypatch.setattr(f"cupyfa.lab.commands.{command}.backend_to_measure", interrupted)
    monkeypatch.setattr("cupyfa.lab.commands.command_options.backend_named", interrupted)
    assert cli(name, "fa2", *SIMULATOR, code=130).stderr.strip() == "note: interrupted"


@pytest.mark.slow
def test_a_terminal_gets_notes_in_whole_words():
    shown = in_a_terminal([*CLI, "list", *SIMULATOR], stderr=True)
    assert "supports, with\r\n  the smallest tile" in shown


def test_equal_columns_are_shared_above_the_table():
    rows = [{"": 1, "kernel": "fa2"}, {"": 2, "kernel": "fa2"}]
    assert table_of(rows, share=False).split() == ["kernel", "1", "fa2", "2", "fa2"]
    assert table_of(rows).split() == ["kernel=fa2", "1", "2"]


def test_the_schedule_reaches_the_simulator(monkeypatch):
    schedules = []
    honest = trial.trial

    def spy(engine, *args, **options):
        schedules.append(engine.schedule)
        return honest(engine, *args, **options)

    monkeypatch.setattr("cupyfa.lab.commands.run.trial", spy)
    in_turn, in_disorder = run("fa2"), run("fa2", "--schedule", "7")
    assert schedules == [None, 7]
    assert in_turn["O_error"] == in_disorder["O_error"]


def test_the_seed_reproduces_the_inputs():
    errors = [run("fa2", "--seed", seed)["O_error"] for seed in (3, 3, 4)]
    assert errors[0] == errors[1] != errors[2]


def test_long_steps_are_noted_where_stderr_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(options, "FIRST_NOTE", 0.01)
    with options.progress_bar("fa2") as progress:
        progress(1, 5, "running")
        time.sleep(0.3)
    shown = capsys.readouterr()
    assert shown.out == "" and "note: fa2: running; 1 of 5 done (0 s)\n" in shown.err
    monkeypatch.setattr(options, "FIRST_NOTE", 1e-4)
    assert "note: fa2: " in cli("run", "fa2", *SIMULATOR, *SIZES).stderr


def test_data_goes_to_stdout_and_notes_to_stderr():
    without_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = process(["run", "fa2", *SIZES, "--format", "json"], env=without_gpu)
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)[0]["passed"]
    assert re.fullmatch(r"note: no CUDA device .*: running in the simulator.*\n", done.stderr)
    done = process(["list", "--format", "json"], begin=MODULE, env=without_gpu)
    assert len(strict(done.stdout)) == len(KERNELS)
    assert re.fullmatch("note: largest d for .*\n", done.stderr)  # and no note on the backend


def in_a_terminal(command, *, stderr=False, **env):
    """Runs a command in a pseudo-terminal; returns its output, with or without stderr."""
    terminal, slave = pty.openpty()
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave if stderr else subprocess.DEVNULL,
        env={**plain, "TERM": "xterm-256color", "COLUMNS": "80", **env},
    ) as running:
        os.close(slave)
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # on Linux, all writers have closed the terminal
            pass
    os.close(terminal)
    assert running.returncode == 0
    return shown.decode()


def test_colours_appear_only_in_a_terminal():
    command = [*CLI, "run", "fa2", *SIMULATOR, *SIZES]
    shown = in_a_terminal(command)
    assert COLOUR.search(shown) and "PASS" in shown
    assert not COLOUR.search(in_a_terminal(command, NO_COLOR="1"))


@pytest.mark.parametrize("command", [CLI, MODULE], ids=["cli.py", "-m cupyfa"])
def test_as_a_process_from_another_folder(tmp_path, command):
    done = process(["run", "fa2", *SIMULATOR, *SIZES], begin=command, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS"), done.stderr
    assert "\x1b" not in done.stdout


def test_the_version():
    assert cli("--version").stdout == f"cupyfa, version {cupyfa.__version__}\n"


def test_without_a_command_there_is_help():
    assert cli().stdout == cli("--help").stdout
    assert "list" in cli("-h").stdout
    for option in ("--kv-heads", "--schedule", "NAME=VALUE", "script.py:name"):
        assert option in cli("run", "-h").stdout


def test_a_wrong_result_fails(tmp_path):
    script = own_kernel.write(tmp_path, cu=("score *= scale;", "score *= scale * real(1.01);"))
    row = run(f"{script}:mine", code=1)
    assert row["passed"] is False
    assert row["O_ratio"] > 1
    shown = cli("run", f"{script}:mine", *SIMULATOR, *SIZES, code=1).stdout
    assert shown.splitlines()[-1] == "FAIL"
    assert re.search(r"worst at \[\d+, \d+, \d+, \d+\]: .* instead\s+of", shown)


def test_nonfinite_numbers_are_null_in_json(tmp_path):
    script = own_kernel.write(tmp_path, cu=("i < dv; ++i) O.row", "i < dv - 1; ++i) O.row"))
    row = run(f"{script}:mine", code=1)
    assert row["O_error"] is None


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_fault_is_one_line_with_the_seed(tmp_path, form):
    script = own_kernel.write(tmp_path, cu=("row)[i] = scalar", "row)[i + 1] = scalar"))
    command = ("run", f"{script}:mine", *SIMULATOR, *SIZES, "--format", form)
    message = refused(*command, code=1)
    assert re.search(r"^mine, block .*past the end of O", message)
    assert f"mine.cu:{LAST_LINE}" in message
    problem = "batch=1 heads=2 M=9 N=7 d=8 float32 scale=0.353553 layout=bhsd seed=3"
    assert f"note: the problem was {problem}" in cli(*command, code=1).stderr.splitlines()


@pytest.mark.parametrize(
    "error, code",
    [
        (CompilerNotFound("there is none; install one"), 3),
        (MemoryError("Unable to allocate 7.45 PiB"), 3),
        (cupyfa.WrongResult("fa2: the kernel wrote 4 bytes outside O"), 1),
    ],
    ids=repr,
)
def test_an_error_of_a_run_is_one_line(monkeypatch, error, code):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("cupyfa.lab.commands.run.trial", fails)
    assert str(error) in refused("run", "fa2", *SIMULATOR, code=code)


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile_for_the_gpu(cuda, tmp_path):
    script = own_kernel.write(tmp_path, cu=("real score = 0;", "real score = nought;"))
    done = cli("run", f"{script}:mine", "--backend", "cuda", *SIZES, code=2)
    assert re.search(rf"{re.escape(str(tmp_path))}/mine\.cu\(\d+\): error: .*nought", done.stderr)


@pytest.mark.gpu
def test_schedule_is_refused_on_cuda(cuda):
    message = refused("run", "fa2", "--backend", "cuda", "--schedule", 1, code=2)
    assert "--schedule applies only to the simulator" in message


@pytest.mark.slow
def test_compile_shows_resources_by_architecture():
    options = ("--arch", "80,90", "--causal", "-d", "40", "--format", "json")
    done = cli("compile", "fa2", "mma_split_q", *options)
    rows = strict(done.stdout)
    found = {(row["kernel"], row["dtype"], row["arch"]) for row in rows}
    names = {"fa2": DTYPES, "mma_split_q": ("float16", "bfloat16")}
    assert found == {(k, dtype, arch) for k in names for dtype in names[k] for arch in ("80", "90")}
    assert all(row["registers"] > 0 and row["shared_bytes"] <= 227 * 1024 for row in rows)
    assert {(row["d"], row["causal"]) for row in rows} == {(40, "bottom-right")}


def test_compile_shows_common_columns_once():
    lines = cli(
        "compile", "softmax_safe", "--arch", "80,90", "--dtype", "float32"
    ).stdout.splitlines()
    assert lines[0].startswith("kernel=softmax_safe entry=softmax_safe dtype=float32")
    assert [line.split()[0] for line in lines[-2:]] == ["80", "90"]


def test_compile_takes_a_users_kernel(tmp_path):
    done = cli("compile", f"{own_kernel.write(tmp_path)}:mine", "--arch", "89", "--format", "csv")
    assert {row["kernel"] for row in csv.DictReader(done.stdout.splitlines())} == {"mine"}


# Arguments of ``cupyfa show``, and texts that it prints.
SHOWN = {
    "fa2 --source --dtype float16 -d 24 --Br 16": [
        "using scalar = __half;\n",
        "constexpr int Br = 16;\n",
        "constexpr int d = 24;\n",
        (sources.KERNELS / "forward" / "fa2.cu").read_text(),
    ],
    "fa2 --plan -M 70 -B 2 -H 3 --Br 32 --Bc 32": [
        "grid           18 x 1 x 1\n",
        "shared memory  36,864 bytes\n",
        f"inputs     {3 * 2 * 3 * 70 * 64 * 4:,} bytes\n",
        f"outputs    {2 * 3 * 70 * 64 * 4 + 2 * 3 * 70 * 4:,} bytes\n",
        "arguments      Q K V O lse sizes heads batch",
    ],
    "baseline --causal --arch 80": [
        *("entry          softmax_safe\n", "entry          repair_rows\n"),
        *("blocks per sm", "limited by"),
    ],
    "v2 --ptx --arch 86": [".target sm_86"],
}


@pytest.mark.parametrize("args", SHOWN)
def test_show_has_what_is_compiled_planned_and_used(args):
    shown = cli("show", *args.split()).stdout
    assert not [words for words in SHOWN[args] if words not in shown]


def test_show_inlined_has_each_launch_with_its_headers_in_order():
    shown = cli("show", "baseline", "--inlined", "--causal", "--dtype", "float16").stdout
    host = "// ---- types and constants from the host\n"
    before, *launches = shown.split(host)
    names = ["kernels/softmax/softmax_safe.cu", "kernels/forward/steps/repair_rows.cu"]
    assert not before and len(launches) == len(names)
    for launch, name in zip(launches, names):
        constants, first, *files = re.split(r"^// ---- (\S+)$", launch, flags=re.MULTILINE)
        assert "#include <cuda_fp16.h>\nusing scalar = __half;\n" in constants and first == name
        assert len(files[1::2]) == len({*files[1::2]}) > 3
        assert "kernels/include/attention/extent.cuh" in files
        assert not re.search(r"#pragma once|#include (?!<cuda_fp16.h>|<cuda_bf16.h>)|#line", launch)


def test_show_sass_needs_nvdisasm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install the CUDA toolkit" in refused("show", "v2", "--sass", code=3)
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\necho "$1 $2"\n')
    tool.chmod(0o755)
    assert re.match(r"-c .*\.cubin", cli("show", "v2", "--sass").stdout)


def test_commands_are_one_family():
    """A shared option is the same in all commands, and help lists options in the same order."""
    families = {}
    for names, command in commands():
        shown = [x for x in command.params if isinstance(x, click.Option) and not x.hidden]
        taken = [x.name for x in command.params if isinstance(x, click.Argument)]
        places = [_PLACES.index(x.name) for x in shown if x.name in _PLACES]
        assert places == sorted(places), names
        assert names[0] == "exercise" or shown[-1].name == "form", names
        if {"kernel", "kernels"} & {*taken}:
            assert _KERNEL in " ".join(command.help.split()) or names[0] in _OTHER_KERNELS, names
            assert "`auto`" in command.help or names == ("mutate",), names
        for option in shown:
            about = [option.opts, option.type.name, getattr(option.type, "choices", None)]
            if option.name not in _OTHER_TEXTS:
                about.append(option.help.partition("  [default")[0])
            families.setdefault(option.opts[0], {}).setdefault(str(about), []).append(names)
    differing = {name: found for name, found in families.items() if len(found) > 1}
    # `compile --arch` accepts a list, `new --from` a rung rather than a file, and `timeline
    # --format` one more choice.
    assert set(differing) == {"--arch", "--from", "--format"}


_KERNEL = "KERNEL is a name from `cupyfa list`, `auto`, or `script.py:name` for a record"
# Commands with another sentence; `mutate` changes the files of one kernel, and takes no `auto`.
_OTHER_KERNELS = ("roofline", "mutate")
# Options whose help texts differ between commands, because their meanings differ.
_OTHER_TEXTS = ("dtype", "dtypes", "seed", "budget", "dry_run", "plot", "save", "saved")
_PLACES = [
    *("batch", "heads", "kv_heads", "M", "N", "d", "dv", "dtype", *OPTIONS, "layout", "values"),
    *("Br", "Bc", "tiles", "swept", "budget", "save", "backend", "schedule", "form"),
]


def test_auto_is_a_kernel_of_every_command(tmp_path):
    chosen, of_few_rows = "mma_fp16x2", "fa2_coalesced"
    assert chosen in cli("show", "auto", "--plan").stdout
    assert chosen in cli("compile", "auto", "--arch", "80", "--dtype", "float32").stdout
    assert chosen in cli("roofline", "auto", "--device", "h100", "--dtype", "float32").stdout
    small = ("-M", 8, "-d", 8, "--budget", 0, "--format", "json")
    rows = strict(cli("tune", "auto", *SIMULATOR, *small).stdout)
    assert {row["kernel"] for row in rows} == {of_few_rows}


def test_show_as_data():
    (plan,) = strict(cli("show", "fa2", "--plan", "-M", 70, "--format", "json").stdout)
    assert (plan["launch"], plan["threads"], plan["grid"]) == ("fa2", 128, [64, 1, 1])
    (source,) = strict(cli("show", "fa2", "--source", "--format", "json").stdout)
    assert source["source"].startswith("using scalar = float;")
    (used,) = csv.DictReader(cli("show", "fa2", "--format", "csv").stdout.splitlines())
    assert int(used["registers"]) > 0


@pytest.mark.parametrize(
    "words, expected",
    [
        ("run fa2_c", ["fa2_coalesced"]),
        ("bench v1 aut", ["auto"]),
        ("roofline nai", ["naive"]),
        ("check fa2 --grid fu", ["fuzz"]),
        ("new mine --from two", ["two_pass"]),
        ("run fa2 --causal to", ["top-left"]),
    ],
)
def test_the_shell_completes_kernels_and_choices(words, expected):
    env = {
        "_CUPYFA_COMPLETE": "bash_complete",
        "COMP_WORDS": f"cupyfa {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    done = CliRunner().invoke(MAIN, [], env=env, prog_name="cupyfa")
    assert [line.partition(",")[2] for line in done.stdout.split()] == expected


def test_help_of_clear_names_the_kinds():
    assert "by default, of all kinds except cupy" in cli("cache", "clear", "--help").stdout
