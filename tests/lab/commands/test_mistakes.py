"""Mistakes in command lines, for every command and option: each ends in one line.

The line states the value, the rule and a suggestion; the exit code is 2.
"""

import itertools
import re

import click
import pytest
from helpers.cli import SIMULATOR, SMALL, cli, commands, line_of

import cupyfa
from cupyfa.lab.commands import command_options, variables
from cupyfa.lab.commands.mistakes import _ELSEWHERE
from cupyfa.runtime import choose_backend

SMALLEST = SMALL[:-2]  # without --seed


COMMANDS = dict(commands())


def shown_options(command):
    return [x for x in command.params if isinstance(x, click.Option) and not x.hidden]


FAST = {("run",), ("roofline",), ("cache", "clear"), ("new",)}  # tests of other commands are slow
OPTIONS = [
    pytest.param(names, x, marks=[] if names in FAST else pytest.mark.slow, id=f"{names} {x.opts}")
    for names, command in COMMANDS.items()
    for x in shown_options(command)
]


def words_of(names):
    """Returns values for the required arguments of a command."""
    found = []
    for x in COMMANDS[names].params:
        if isinstance(x, click.Argument) and x.required:
            is_kernel = x.name == "kernel"
            found.append("fa2" if is_kernel else "mine" if x.name == "name" else __file__)
            found += [__file__] * (x.nargs - 1)
    return found


def error_of(*args, code=2):
    done = cli(*args, code=code)
    assert done.stdout == "" and "Traceback" not in done.stderr
    return line_of(done.stderr)


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_commands_that_are_written_wrong(names):
    *group, name = names
    for wrong in (name.upper(), name + name[-1]):
        assert f"Did you mean '{name}'?" in error_of(*group, wrong)
    unknown = error_of(*group, "xyzzy")
    assert "No such command 'xyzzy'" in unknown and unknown.endswith("--help.")


@pytest.mark.parametrize("names, option", OPTIONS)
def test_options_that_are_written_wrong(names, option):
    known = {x for other in shown_options(COMMANDS[names]) for x in other.opts} | {"--help"}
    for right in option.opts:
        bare = right.lstrip("-")
        wrong = {right.swapcase(), f"--{bare}", f"--{bare.upper()}", f"--{bare.replace('-', '_')}"}
        if len(bare) > 1:
            wrong |= {f"-{bare}"}
        for word in sorted(wrong - known):
            if (names[-1], word) in _ELSEWHERE or word in ("-h", "-H"):
                continue
            message = error_of(*names, *words_of(names), word, "1")
            meant = re.search(r"Did you mean '(.*?)'\?", message)
            assert message.startswith(f"No such option '{word}'") and meant, message
            assert meant[1].lstrip("-").lower() == bare.lower().replace("_", "-"), message


LONG = [x for x in OPTIONS if len(x.values[1].opts[-1]) > 6]


@pytest.mark.parametrize("names, option", LONG)
def test_options_with_two_letters_exchanged(names, option):
    right = option.opts[-1]
    wrong = f"{right[:4]}{right[5]}{right[4]}{right[6:]}"
    if wrong != right:
        message = error_of(*names, *words_of(names), wrong, "1")
        meant = re.search(r"Did you mean '(.*?)'\?", message)
        assert meant, message
        known = [x for other in shown_options(COMMANDS[names]) for x in other.opts]
        assert meant[1] == right or meant[1] in known


VALUED = [x for x in OPTIONS if not x.values[1].is_flag and x.values[1].type.name != "text"]


@pytest.mark.parametrize("names, option", VALUED)
def test_values_that_an_option_does_not_take(names, option):
    """Passes words where numbers or choices are expected, and choices in the wrong case."""
    right = option.opts[-1]
    kind = option.type
    message = None
    if isinstance(kind, click.Choice):
        choice = max(kind.choices, key=len)
        for wrong in (choice.upper(), choice + "x"):
            message = error_of(*names, *words_of(names), f"{right}={wrong}")
            assert repr(wrong) in message and f"Did you mean '{choice}'?" in message, message
    elif isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        for wrong in ("many", "", "1e", "0x1"):
            message = error_of(*names, *words_of(names), right, wrong)
            assert "Invalid value for" in message and f"'{right}'" in message, message
        if isinstance(kind, click.IntRange | click.FloatRange) and kind.min is not None:
            message = error_of(*names, *words_of(names), right, kind.min - 1)
            assert f"{kind.min - 1}" in message and "range" in message
    elif isinstance(kind, command_options.KernelName):
        message = error_of(*names, *words_of(names), f"{right}=FA2")
    if message:
        assert message.endswith(("--help.", "?)"))


def takes_kernels(names):
    return any(isinstance(x.type, command_options.KernelName) for x in COMMANDS[names].params)


KERNELS = [names for names in COMMANDS if takes_kernels(names)]


@pytest.mark.parametrize("names", KERNELS, ids=" ".join)
@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("FA2", "did you mean 'fa2'?"),
        ("fa-2", "did you mean 'fa2'?"),
        ("WGMMA_overlap", "did you mean 'wgmma_overlap'?"),
        ("mine.cu", "pass its record as script.py:name"),
        ("mine.cu:mine", "pass its record as mine.py:mine"),
        ("xyzzy", "known kernels are softmax_safe"),
    ],
)
def test_kernels_that_are_written_wrong(names, wrong, meant, no_device):
    option = next(
        x for x in COMMANDS[names].params if isinstance(x.type, command_options.KernelName)
    )
    if isinstance(option, click.Option):
        given = [*words_of(names), f"{option.opts[-1]}={wrong}"]
    else:
        given = [wrong]
    message = error_of(*names, *given)
    assert meant in message


@pytest.mark.parametrize("command, option", _ELSEWHERE)
def test_options_of_other_commands_say_what_to_write(command, option):
    message = error_of(command, "fa2", option, "5") if command == "tune" else None
    message = message or error_of(command, option, "5")
    assert f"No such option '{option}'" in message and "write" in message


# Without a GPU


@pytest.mark.parametrize("measure", [cupyfa.bench, cupyfa.lab.tune])
def test_functions_measure_in_the_simulator_only_if_it_is_named(no_device, measure):
    with pytest.raises(cupyfa.DeviceError, match='pass backend="simulator"$'):
        measure("v1", M=8, d=8)
    assert measure("v1", M=8, d=8, batch=1, heads=1, budget=0, backend="simulator")


def test_a_variable_names_the_backend_and_leaves_the_note_out(no_device, monkeypatch):
    assert "note: no CUDA device" in cli("run", "v1", *SMALLEST).stderr
    choose_backend._automatic.cache_clear()
    monkeypatch.setenv("CUPYFA_BACKEND", "simulator")
    assert cli("run", "v1", *SMALLEST).stderr == ""
    assert cli("bench", "v1", "--alone", "--budget", 0, *SMALLEST).stderr == ""


@pytest.mark.parametrize(
    "name, wrong",
    [
        *itertools.product(["CUPYFA_CACHE_MB"], ["abc", "-1", "1.5", "1e3", "²"]),
        *itertools.product(["CUPYFA_BACKEND"], ["gpu", "Simulator", " "]),
        ("CUPYFA_COMPILER_FLAGS", "'-O0"),
    ],
)
@pytest.mark.parametrize("command", ["list", "run fa2 --backend simulator"])
def test_wrong_variables_are_refused(monkeypatch, command, name, wrong):
    monkeypatch.setenv(name, wrong)
    message = error_of(*command.split())
    assert name in message and repr(wrong) in message and "unset it" in message


def test_unknown_variables_are_noted(monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_DIRECTORY", "/tmp")
    note = "note: CUPYFA_CACHE_DIRECTORY is not a variable of cupyfa and is ignored; did you mean"
    assert f"{note} CUPYFA_CACHE_DIR?" in cli("list", *SIMULATOR).stderr
    assert {"CUPYFA_CACHE_DIR", "CUPYFA_COMPILER"} <= variables.KNOWN.keys()


# Runs that check nothing


@pytest.mark.parametrize(
    "hidden",
    [
        ("--causal", "--offset", "-1000"),
        ("--mask-mod", "query < 0"),
        ("--window", "0,0", "--offset", "99"),
    ],
)
@pytest.mark.parametrize("kernel", ["fa2", "two_pass"])
def test_a_run_in_which_everything_is_hidden_says_so(kernel, hidden):
    done = cli("run", kernel, *SMALLEST, *SIMULATOR, *hidden)
    assert "note: no query attends to any key" in done.stderr


@pytest.mark.parametrize("seed", range(3))
def test_a_random_mask_lets_something_be_seen(seed):
    done = cli("run", "fa2", *SMALLEST, *SIMULATOR, "--mask", "1111", "--seed", seed)
    assert "no query attends" not in done.stderr
