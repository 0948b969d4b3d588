"""Listing and clearing of the cache folders, even if they contain damaged files."""

import json
import os
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import helpers.cli
import pytest

from cupyfa import cache_folder
from cupyfa.lab.analysis import caches

HEX = "0123456789abcdef"
OBJECT = f"fa2-{HEX * 2}.so"
CUBIN = f"{HEX * 2}01234567.cubin"
OURS = [kind for kind in caches.KINDS if kind != "cupy"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Creates cache folders with files of each kind and some foreign files."""
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupys"))
    for name, text in {
        f"ours/{OBJECT}": "12345",
        f"ours/v2-{HEX * 2}.cubin": "1",
        "ours/peaks/NVIDIA-H100.json": "{}",
        "ours/tuned/the-simulator.json": "{}",
        "ours/tuning/v1-0123.json": "{}",
        "ours/zig/o/1/lib.a": "lib",
        "ours/build-abcdefgh/kernel.cpp": "half",
        "ours/tuned/.the-simulator.json-a_b1c2d3": "{",
        f"cupys/{CUBIN}": "1234567",
        f"cupys/{CUBIN}.cu": "source",
        "ours/mine.so": "no object of ours",
        "ours/notes/notes.json": "{}",
        "ours/peaks/README": "?",
        "ours/build-mine/x": "?",
        "cupys/thesis.tex": "?",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    age(tmp_path / "ours", hours=2)
    return tmp_path


def age(folder, hours):
    past = time.time() - 3600 * hours
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (past, past), follow_symlinks=False)


def files(folder):
    return {str(x.relative_to(folder)) for x in folder.rglob("*") if not x.is_dir()}


cli = partial(helpers.cli.cli, "cache")


# Number of cupyfa's files of each kind.
FILES = {"compiled": 2, "peaks": 1, "tuned": 1, "tuning": 1, "zig": 1, "leftovers": 2}


def rows(*args, code=0):
    return {x["kind"]: x for x in json.loads(cli(*args, "--format", "json", code=code).stdout)}


def test_every_kind_is_listed_with_its_files(home):
    listed = rows("list")
    assert list(listed) == list(caches.KINDS)
    assert {kind: row["files"] for kind, row in listed.items()} == FILES | {"cupy": 2}
    assert listed["compiled"]["bytes"] == 6 and listed["cupy"]["bytes"] == 13
    assert listed["tuned"]["path"] == str(home / "ours" / "tuned")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", listed["peaks"]["newest"])


def test_the_size_is_one_number_for_each_kind_and_for_all_of_ours(home):
    sizes = {kind: row["bytes"] for kind, row in rows("size").items()}
    assert sizes["compiled"] == 6 and sizes["cupy"] == 13
    assert sizes["all but cupy"] == sum(sizes[kind] for kind in OURS)


def test_an_empty_cache_has_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupys"))
    assert all(row["files"] == 0 for row in rows("list").values())
    assert all(row["files"] == 0 for row in rows("clear", "--cupy").values())
    assert not list(tmp_path.iterdir())


def test_clear_removes_only_files_of_the_cache(home):
    cleared = rows("clear")
    assert {kind: row["files"] for kind, row in cleared.items()} == FILES
    assert files(home) == {
        f"cupys/{CUBIN}",
        f"cupys/{CUBIN}.cu",
        "ours/mine.so",
        "ours/notes/notes.json",
        "ours/peaks/README",
        "ours/build-mine/x",
        "cupys/thesis.tex",
    }


def test_a_dry_run_shows_the_same_and_removes_nothing(home):
    before = files(home)
    told = rows("clear", "--dry-run", "--cupy")
    assert files(home) == before
    assert told == rows("clear", "--cupy")
    assert "note: nothing was removed" in cli("clear", "--dry-run").stderr


def test_named_kinds_are_cleared_and_leftovers_with_them(home):
    assert list(rows("clear", "tuned")) == ["tuned", "leftovers"]
    left = {kind for kind, row in rows("list").items() if row["files"]}
    assert left == {*caches.KINDS} - {"tuned", "leftovers"}
    assert "cupy" in rows("clear", "peaks", "--cupy")
    assert files(home / "cupys") == {"thesis.tex"}
    assert "'facts' is not one of" in cli("clear", "facts", code=2).stderr
    assert "add --cupy" in cli("clear", "cupy", code=2).stderr


def test_recent_leftovers_are_kept(home):
    age(home / "ours", hours=0.5)
    assert rows("list")["leftovers"]["files"] == 0
    rows("clear")
    assert (home / "ours/build-abcdefgh/kernel.cpp").is_file()
    assert (home / "ours/tuned/.the-simulator.json-a_b1c2d3").is_file()


def test_links_are_neither_followed_nor_removed(home):
    outside = home / "outside"
    outside.mkdir()
    for name in ("x.json", OBJECT, "kernel.cpp"):
        (outside / name).write_text("precious")
    ours = home / "ours"
    (ours / f"v1-{HEX * 2}.so").symlink_to(outside / OBJECT)
    (ours / "build-linkedxx").symlink_to(outside)
    (ours / "build-abcdefgh/more").symlink_to(outside)
    (ours / "tuning/y.json").symlink_to(outside / "x.json")
    for file in (ours / "peaks").iterdir():
        file.unlink()
    (ours / "peaks").rmdir()
    (ours / "peaks").symlink_to(outside)
    age(ours, hours=2)
    rows("clear")
    assert files(outside) == {"x.json", OBJECT, "kernel.cpp"}
    assert (ours / "peaks").is_symlink() and (ours / "build-linkedxx").is_symlink()
    assert not (ours / "build-abcdefgh").exists()


def test_the_folder_itself_may_be_a_link(home, monkeypatch):
    (home / "link").symlink_to(home / "ours")
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(home / "link"))
    assert rows("clear")["compiled"]["files"] == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("damaged", ["ours", "ours/tuned", "cupys"])
def test_a_file_instead_of_a_folder_is_one_line(tmp_path, damaged):
    (tmp_path / damaged).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / damaged).write_text("no folder")
    for command in (["list"], ["size"], ["clear", "--cupy"]):
        done = process("cache", *command, folder=tmp_path / "ours", cupy=tmp_path / "cupys")
        assert done.returncode == 0
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"note: {tmp_path / damaged} cannot be read")
    assert (tmp_path / damaged).read_text() == "no folder"


def test_files_that_cannot_be_removed_are_reported_once(home, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(caches.shutil, "rmtree", refuse)
    done = cli("clear", "compiled", "--format", "json", code=3)
    compiled = json.loads(done.stdout)[0]
    assert (compiled["files"], compiled["bytes"], compiled["left"]) == (0, 0, 2)
    notes = [x for x in done.stderr.splitlines() if "Read-only file system" in x]
    assert len(notes) == 2  # one note per kind
    assert cli("clear", "--dry-run").exit_code == 0


def test_files_removed_concurrently_are_ignored(home, monkeypatch):
    listed = caches._entries

    def vanishing(folder):
        entries = listed(folder)
        for entry in entries:
            if entry.name == OBJECT:
                os.unlink(entry.path)
        return entries

    monkeypatch.setattr(caches, "_entries", vanishing)
    assert caches.clear("compiled")["files"] == 1


def process(*args, folder, cupy=None, **options):
    """Runs a command with private cache folders."""
    env = {"CUPYFA_CACHE_DIR": folder, "CUPY_CACHE_DIR": cupy or folder / "cupy"}
    return helpers.cli.process(args, env=env, **options)


def compiled(folder, **hours):
    """Writes compiled kernels of 400,000 bytes, last used some hours ago."""
    for name, since in hours.items():
        path = folder / f"{name}-{HEX * 2}.so"
        cache_folder.write_whole(path, cache_folder.sealed(bytes(400_000 - 32)))
        os.utime(path, (time.time() - 3600 * since,) * 2)


def names(folder):
    return {path.name.partition("-")[0] for path in folder.iterdir()}


def test_the_least_recently_used_kernels_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_MB", "1")
    compiled(tmp_path, a=5, b=4, c=3, d=2, e=0)
    (tmp_path / "mine.so").write_bytes(bytes(10**6))
    assert cache_folder.compiled(tmp_path / f"b-{HEX * 2}.so") == bytes(400_000 - 32)  # loads b
    cache_folder.trim(tmp_path)
    assert names(tmp_path) == {"b", "e", "mine.so"}
    monkeypatch.setenv("CUPYFA_CACHE_MB", "0")
    # Files used within the last hour remain, since another process may be about to load them.
    cache_folder.trim(tmp_path)
    assert names(tmp_path) == {"b", "e", "mine.so"}


def test_new_kernels_displace_old_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_MB", "1")
    monkeypatch.setattr(cache_folder, "_written", count())
    compiled(tmp_path, a=5, b=4, c=3)
    cache_folder.keep_compiled(tmp_path / f"d-{HEX * 2}.cubin", b"new")
    assert names(tmp_path) == {"b", "c", "d"}
    compiled(tmp_path, a=5)
    cache_folder.keep_compiled(tmp_path / f"d-{HEX * 2}.cubin", b"new")
    assert "a" in names(tmp_path)  # trimming does not run for every file


def test_processes_trim_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFA_CACHE_MB", "0")
    compiled(tmp_path, **{f"k{i}": 2 for i in range(40)})
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(cache_folder.trim, tmp_path) for _ in range(4)]:
            done.result()
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_replaces_an_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cache_folder.chosen_folder() == tmp_path / "file" / "cache"
    assert cache_folder.folder().is_dir() and tmp_path not in cache_folder.folder().parents
    name = f"fa2-{32 * 'a'}.so"
    with pytest.warns(UserWarning, match="cannot be written, so nothing is stored; set CUPYFA_"):
        cache_folder.keep_compiled(cache_folder.folder() / name, b"first")
    with warnings.catch_warnings(action="error"):  # warns once per process
        cache_folder.keep_compiled(cache_folder.folder() / name, b"second")
