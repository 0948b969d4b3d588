"""Untrusted files: each is read or rejected in bounded time and memory."""

import json
import random
import re
import struct
import warnings
import zipfile
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from helpers.cli import SIMULATOR, cli

import cupyfa
from cupyfa import Problem, cache_folder
from cupyfa.cache_folder import records
from cupyfa.lab.bench import results
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.bench.tuning import _sound
from cupyfa.lab.verify import failures
from cupyfa.lab.verify.case import Case
from cupyfa.lab.verify.failures import Outcome, Stored
from cupyfa.lab.verify.tasks import Task, perform
from cupyfa.planner import tuned
from cupyfa.planner.choose_kernel import plan
from cupyfa.planner.plan import Tuned
from cupyfa.runtime.choose_backend import backend_named

REFUSALS = (ValueError, TypeError, cupyfa.Unsupported, OSError)
ODD = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 1e999, float("nan")),
    *("", "x", "\x1b[2J", "\u202e", "a" * 10**5, "/etc/passwd", "../x.py:mine", "1,2,3", "O", "V9"),
    *([], [[]], {}, {"": {}}, [None] * 3, {"__class__": 1}),
]


def problem(**options):
    return Problem.of_sizes(heads=2, kv_heads=1, M=5, N=7, d=3, **options)


@cache
def of_failures():
    texts = {"score_mod": "score + x[head] * y", "captured": {"x": "f32[heads]", "y": 0.5}}
    return tuple(
        Case("forward", p, seed=1)
        for p in (
            problem(dtype="bfloat16", causal=True, window=(3, None), **texts),
            Problem.of_sizes(heads=1, lengths="3,0:5,2", d=3, sink=True),
            problem(page_size=16),
        )
    )


def write_failure(folder, case=None):
    case = case or of_failures()[0]
    arrays = {**case.inputs(), "actual_O": np.zeros((1, 2, 5, 3), case.problem.dtype.numpy)}
    verdict = failures.Verdict("O", float("inf"), 1e-6, 3.0, (0, 1, 2, 0), float("nan"), 1.0, 0)
    outcome = Outcome(
        "fa2", failures.WRONG_RESULT, "wrong", (verdict,), {"Br": 32, "Bc": 8}, arrays
    )
    made_with = {"device": "the simulator", "cupyfa": "0"}
    return failures.write(folder, Stored(case, outcome, 1, made_with=made_with), "cupyfa run fa2")


def write_results(folder):
    p = problem(causal=True, score_mod="score * 2", bias="1hmn")
    about = {"constants": {"Br": 32}, "milliseconds": [1.0, 2.0], "factors": {"baseline": 2.0}}
    rows = [Measurement("fa2", "forward", p, passed=True, checked=0.5, registers=40, **about)]
    path = folder / "results.json"
    Results({"device": "an H100", "backend": "cuda"}, rows).save(path)
    return path


def write_tuned(folder):
    entry = Tuned("fa2", None, "float32", 3, 3, (("Br", 32), ("Bc", 8)), 1.5)
    path = folder / "tuned.json"
    cache_folder.remember(path, {"x": {**vars(entry), "constants": dict(entry.constants)}})
    return path


def write_tuning(folder):
    path = folder / "tuning.json"
    fact = {"state": "right", "note": "", "look": [1.0], "rounds": [1.0, None], "registers": 4}
    cache_folder.remember(path, {"key": {**fact, "constants": {"Br": 32}}})
    return path


def read_tuned(path):
    limits = backend_named("simulator").limits
    found = tuple(x for x in map(tuned._parsed, cache_folder.recall(path).values()) if x)
    plan(cupyfa.kernel("fa2"), problem(), replace(limits, tuned=found))


IN_THE_CACHE = ("tuned", "tuning")  # where damaged files count as missing
KINDS = {
    "failure": (write_failure, failures.read),
    "results": (write_results, Results.load),
    "tuned": (write_tuned, read_tuned),
    "tuning": (write_tuning, lambda path: _sound(cache_folder.recall(path), ["key"])),
}


def about(path):
    """Returns a file's JSON value and a function that writes another value."""
    if path.suffix == ".json":
        return json.loads(path.read_text()), lambda text: path.write_text(text)
    with np.load(path) as members:
        arrays = dict(members)

    def write(text):
        np.savez(path, **{**arrays, "about": np.array(text)})

    return json.loads(str(arrays["about"])), write


def places(value, path=()):
    """Yields the path of every field in a JSON value."""
    yield path
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, x in value.items() if isinstance(value, dict) else inner:
        yield from places(x, (*path, key))


def changed(value, path, to):
    if not path:
        return to
    first, *rest = path
    copy = value.copy()
    copy[first] = changed(value[first], rest, to)
    return copy


def without(value, path):
    copy = value.copy()
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


def mutate_field(path, rng):
    """Replaces a field with an odd value, removes it, or duplicates it."""
    value, write = about(path)
    place = rng.choice([x for x in places(value) if x])
    how = rng.random()
    if how < 0.8:
        write(json.dumps(changed(value, place, rng.choice(ODD))))
    elif how < 0.9:
        write(json.dumps(without(value, place)))
    else:
        name = rng.choice([x for x in place if isinstance(x, str)])
        write(json.dumps(value).replace(f'"{name}":', f'"{name}": 1, "{name}":', 1))


def mutate_bytes(path, rng):
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 3, 30])):
        at = rng.randrange(len(content))
        how = rng.random()
        if how < 0.6:
            content[at] = rng.randrange(256)
        elif how < 0.8:
            del content[at : at + rng.randrange(1, 40)]
        else:
            content[at:at] = bytes(content[at : at + rng.randrange(1, 40)])
        if not content:
            break
    path.write_bytes(bytes(content))


def read_or_refused(kind, path):
    """Returns whether a file is read; a rejection must be a one-line error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damaged files in the cache
        try:
            KINDS[kind][1](path)
            return True
        except REFUSALS as error:
            assert len(str(error).splitlines()) == 1, error
            return False


@pytest.mark.parametrize("kind", KINDS)
def test_files_as_written_are_read(tmp_path, kind):
    assert read_or_refused(kind, KINDS[kind][0](tmp_path))


@pytest.mark.parametrize("number", range(3))
def test_failures_of_every_form_are_read_as_written(tmp_path, number):
    case = of_failures()[number]
    assert failures.read(write_failure(tmp_path, case)).case == case


@pytest.mark.parametrize("mutate", [mutate_field, mutate_bytes])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused(tmp_path, kind, mutate):
    """Tries 200 mutations per kind of file and mutation method, 2,000 in all."""
    whole = KINDS[kind][0](tmp_path)
    content, read = whole.read_bytes(), 0
    for seed in range(200):
        whole.write_bytes(content)
        rng = random.Random(f"{kind} {seed}")
        mutate(whole, rng)
        read += read_or_refused(kind, whole)
    if kind not in IN_THE_CACHE:
        assert read < 200  # some mutations were rejected


def about_changed(path, place, to):
    value, write = about(path)
    write(json.dumps(changed(value, place, to)))


@pytest.mark.parametrize(
    "place, to",
    [
        (("reruns",), 10**9),
        (("reruns",), -1),
        (("kernel",), 3),
        (("kind",), "another"),
        (("case", "seed"), -1),
        ((), [1]),
        (("format",), "cupyfa failure 99"),
        (("case", "layout"), "sideways"),
        (("case", "problem", "M"), 6),
        (("case", "problem", "M"), 10**12),
        (("case", "problem", "N"), float("nan")),
        (("case", "problem", "operands", 0, 0), "x;system"),
        (("case", "problem", "operands", 0, 0), "return"),
        (("case", "problem", "operands", 0, 1), "object"),
        (("dtypes", "Q"), "O"),
        (("dtypes", "Q"), "V1000000"),
        (("constants", "Br"), 10**20),
        (("verdicts", 0, "index"), "a"),
        (("made_with",), None),
        (("made_with", "device"), 4),
        (("schedule",), "x"),
        (("has_name",), "x"),
    ],
    ids=str,
)
def test_a_field_out_of_its_range_is_named(tmp_path, place, to):
    path = write_failure(tmp_path)
    about_changed(path, place, to)
    with pytest.raises(ValueError, match="is damaged, or not a file of `cupyfa check`"):
        failures.read(path)


def deep(path):
    path.write_text("[" * 10**6 + "]" * 10**6)


def twice(path):
    text = path.read_text()
    path.write_text(text.replace("{", '{"rows": [], "cupyfa": {}, "x": 1, "x": 2, ', 1))


def long_number(path):
    path.write_text(re.sub(r"(?<=[: ])\d", "9" * 10**4, path.read_text(), count=1))


def in_utf16(path):
    path.write_bytes(b"\xff\xfe" + path.read_text()[:-1].encode("utf-16-le"))


@pytest.mark.parametrize("spoil", [deep, twice, long_number, in_utf16])
@pytest.mark.parametrize("kind", [x for x in KINDS if x != "failure"])
def test_odd_json_is_refused_or_ignored(tmp_path, kind, spoil):
    path = KINDS[kind][0](tmp_path)
    spoil(path)
    assert read_or_refused(kind, path) == (kind in IN_THE_CACHE)


def test_endless_files_are_refused(monkeypatch):
    monkeypatch.setattr(results, "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="larger than 1,000 bytes"):
        Results.load("/dev/zero")


def bomb(path):
    """Appends 64 MiB of zeros, compressed about a thousandfold."""
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as x,
    ):
        for _ in range(64):
            x.write(bytes(1 << 20))


def header(path, shape, dtype):
    """Appends an array whose header promises more data than the file holds."""
    with zipfile.ZipFile(path, "a") as archive, archive.open("actual_x.npy", "w") as file:
        about = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, about)


def overlapping(path):
    """Lists the last member 50 more times in the archive's directory."""
    content = path.read_bytes()
    at = content.rindex(b"PK\x01\x02")
    end = content.rindex(b"PK\x05\x06")
    entry = content[at:end]
    more = entry * 50
    counts = struct.unpack("<4s4H2LH", content[end : end + 22])
    total, size = counts[4] + 50, counts[5] + len(more)
    tail = struct.pack("<4s4H2LH", *counts[:3], total, total, size, *counts[6:])
    path.write_bytes(content[:end] + more + tail)


def pickled(path):
    np.savez(path, about=np.array([{"a": 1}], object), allow_pickle=True)


def array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def without_an_input(path):
    with np.load(path) as members:
        np.savez(path, **{name: x for name, x in dict(members).items() if name != "K"})


def another_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing")


@pytest.mark.parametrize(
    "spoil",
    [
        bomb,
        lambda path: header(path, (10**6, 10**6), "<f4"),
        lambda path: header(path, (2**40, 2**40), "<f8"),
        lambda path: header(path, (0, 2**62), "<f8"),
        lambda path: header(path, (-1,), "<f8"),
        lambda path: header(path, (3,), "|O"),
        lambda path: header(path, (), [("a", "<f4", (2, 2))]),
        *(overlapping, pickled, array, without_an_input, another_archive),
    ],
    ids=[
        *("bomb", "large", "overflow", "empty", "negative", "objects", "structs"),
        *("overlapping", "pickled", "array", "without an input", "another archive"),
    ],
)
def test_other_archives_are_refused(tmp_path, spoil):
    path = write_failure(tmp_path)
    spoil(path)
    with pytest.raises(ValueError, match="is damaged, or not a file of `cupyfa check`"):
        failures.read(path)


def test_no_script_of_a_file_is_run(tmp_path):
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = write_failure(tmp_path)
    for name in (f"{script}:mine", f"{script}", "evil.py:mine", "x:y", "auto"):
        about_changed(path, ("kernel",), name)
        with pytest.raises(ValueError, match="not executed; pass the kernel as kernel="):
            cupyfa.lab.replay(path, backend="simulator")
        assert "--kernel script.py:name" in cli("replay", path, *SIMULATOR, code=2).stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["table", "json", "csv", "md"])
def test_control_characters_of_files_reach_no_terminal(tmp_path, form):
    """Covers every string of a file and every command that reads it, including error messages."""
    made = {kind: KINDS[kind][0](tmp_path) for kind in ("failure", "results")}
    commands = {
        "failure": lambda path: ("replay", path, *SIMULATOR, "--kernel", "nope", "--format", form),
        "results": lambda path: ("compare", path, path, "--format", form),
    }
    for kind, path in made.items():
        content = path.read_bytes()
        value, _ = about(path)
        texts = [x for x in places(value) if x and isinstance(_at(value, x), str)]
        assert texts
        for place in texts:
            path.write_bytes(content)
            about_changed(path, place, "a\x1b]0;b\x07\x9b2J\x7f\r\u202ec")
            done = _said(commands[kind](path))
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", done), (kind, place, done)
        path.write_bytes(content)


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def _said(args):
    from click.testing import CliRunner
    from helpers.cli import MAIN

    done = CliRunner().invoke(MAIN, list(map(str, args)), prog_name="cupyfa")
    assert isinstance(done.exception, SystemExit | None), (args, done.exception)
    return done.output


@pytest.mark.slow
def test_a_replayed_file_with_odd_texts_is_printed_plainly(tmp_path):
    path = write_failure(tmp_path)
    for place in (("message",), ("made_with", "device"), ("made_with", "cupyfa"), ("kernel",)):
        about_changed(path, place, "a\x1b[31mb")
    for form in ("table", "json", "csv", "md"):
        args = ("replay", path, *SIMULATOR, "--kernel", "fa2", "--format", form)
        assert "\x1b" not in _said(args)
    about_changed(path, ("made_with",), {})
    assert "an unknown device" in _said(("replay", path, *SIMULATOR, "--kernel", "fa2"))


@pytest.mark.parametrize("name, to", [("lengths_k", 99), ("lengths_k", -1), ("page_table", 99)])
def test_lengths_and_pages_beside_the_arrays_are_refused(tmp_path, name, to):
    path = write_failure(tmp_path, of_failures()[2])
    with np.load(path) as members:
        arrays = dict(members)
    arrays[f"mods.{name}"][:] = to
    if name == "page_table":
        arrays["mods.lengths_k"][:] = 7
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=name):
        failures.read(path)


def test_a_file_asks_for_few_reruns(tmp_path):
    path = write_failure(tmp_path)
    stored = failures.read(path)
    many = replace(stored, reruns=10**6)
    assert failures.read(failures.write(tmp_path / "many", many, "x")).reruns == 1000


def test_inputs_of_a_kernels_own_must_fit_it(tmp_path):
    case = Case("softmax", Problem.of_row_sizes(5, 19, "float32"))
    *_, outcome = perform(backend_named("simulator"), Task(case, ("softmax_safe",), keep=True))
    path = failures.write(tmp_path, Stored(case, outcome), "x")
    with np.load(path) as members:
        arrays = dict(members)
    np.savez(path, **{**arrays, "S": arrays["S"][:, :, :3]})
    with pytest.raises(ValueError, match="S is float32"):
        cupyfa.lab.replay(path, backend="simulator")


def test_readers_name_the_field():
    read = records.record({"a": records.list_of(records.record({"b": records.whole(1, 3)}))})
    for value, message in (
        ({"a": [{"b": 4}]}, "a.0.b is 4, not a whole number from 1 to 3"),
        ({"a": [{}]}, "a.0.b is missing"),
        ({"a": 3}, "a is 3, not a list"),
        ([], "is [], not an object"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(value)
