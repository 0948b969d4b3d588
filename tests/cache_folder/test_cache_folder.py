"""The cache folder: owner, permissions, and entries that are not regular files."""

import os
import stat
import subprocess
import sys
import warnings
from itertools import product

import pytest
from helpers.cli import SIMULATOR, SMALL, process
from helpers.private_cache import with_runtime

from cupyfa import cache_folder
from cupyfa.lab.analysis import diagnosis
from cupyfa.runtime.simulator import machine

NAME = f"fa2-{32 * '0'}.so"
OTHERS = 12345  # another user's id
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Selects a cache folder with CUPYFA_CACHE_DIR and checks that it is used."""
    path = tmp_path / "above" / "cache"
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(path))
    monkeypatch.setattr(cache_folder, "_elsewhere", {})
    cache_folder._warn_unkept.cache_clear()
    assert cache_folder.folder() == path
    return path


def writable(mode):
    def change(folder):
        folder.chmod(0o700 | mode)

    return change


def above(folder):
    folder.parent.chmod(0o777)


def given_away(folder):
    os.chown(folder, OTHERS, OTHERS)


def given_away_above(folder):
    os.chown(folder.parent, OTHERS, OTHERS)


def sticky(folder):
    folder.chmod(0o1777)


def linked_by_others(folder):
    folder.rename(folder.parent / "there")
    folder.symlink_to("there")
    os.lchown(folder, OTHERS, OTHERS)


EXPOSED = [
    pytest.param(writable(stat.S_IWOTH), id="others"),
    pytest.param(writable(stat.S_IWGRP), id="group"),
    above,
    sticky,
    pytest.param(given_away, marks=needs_root),
    pytest.param(given_away_above, marks=needs_root),
    pytest.param(linked_by_others, marks=needs_root),
]


@pytest.mark.parametrize("expose", EXPOSED)
def test_a_folder_that_others_can_change_is_not_used(folder, expose):
    cache_folder.keep_compiled(folder / NAME, b"trusted")
    expose(folder)
    used = cache_folder.folder()
    assert used != folder and used.stat().st_mode & 0o077 == 0
    assert not cache_folder.is_kept()
    # An earlier test may have left a file, because the process has a single fallback folder.
    (used / NAME).unlink(missing_ok=True)
    assert cache_folder.compiled(used / NAME) is None
    with pytest.warns(
        UserWarning, match="is not used: .* so nothing is stored; set CUPYFA_CACHE_D"
    ):
        cache_folder.keep_compiled(used / NAME, b"new")
    with warnings.catch_warnings(action="error"):  # warns once per process
        cache_folder.keep_compiled(used / NAME, b"newer")
    finding = diagnosis._own_folder(folder)
    assert finding.state == diagnosis.FAULT and "is not used" in finding.found


def test_a_sticky_folder_above_is_no_danger(folder):
    folder.parent.chmod(0o1777)
    assert cache_folder.folder() == folder


def test_a_link_of_this_user_is_followed_to_the_folder(folder):
    folder.rename(folder.parent / "there")
    folder.symlink_to("there")
    assert cache_folder.folder() == folder.parent / "there" and cache_folder.is_kept()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_made_is_for_this_user_alone(folder, umask):
    folder.rmdir()
    folder.parent.rmdir()
    before = os.umask(umask)
    try:
        cache_folder.keep_compiled(cache_folder.folder() / NAME, b"content")
        cache_folder.remember(cache_folder.facts_file("peaks", "x"), {"y": 1})
    finally:
        os.umask(before)
    for path in (folder.parent, *folder.parent.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert cache_folder.recall(cache_folder.facts_file("peaks", "x")) == {"y": 1}


def directory(path):
    path.mkdir()


def full_directory(path):
    path.mkdir()
    (path / "x").write_text("precious")


def pipe(path):
    os.mkfifo(path)


def socket(path):
    import socket

    here = os.getcwd()
    os.chdir(path.parent)  # a long path does not fit into a socket address
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def broken_link(path):
    path.symlink_to(path.parent / "nowhere")


def loop(path):
    path.symlink_to(path)


def link_to_a_whole_one(path):
    target = path.with_name("precious")
    target.write_bytes(cache_folder.sealed(b"content"))
    path.symlink_to(target)


def unreadable(path):
    path.write_bytes(cache_folder.sealed(b"content"))
    path.chmod(0)


def empty(path):
    path.touch()


def of_others(path):
    path.write_bytes(cache_folder.sealed(b"content"))
    os.chown(path, OTHERS, OTHERS)


def writable_by_others(path):
    path.write_bytes(cache_folder.sealed(b"content"))
    path.chmod(0o666)


FOUND = [
    *(directory, full_directory, pipe, socket, broken_link, loop, link_to_a_whole_one, empty),
    *(writable_by_others, pytest.param(of_others, marks=needs_root)),
    pytest.param(unreadable, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root reads all")),
]


@pytest.mark.parametrize("found", FOUND)
def test_what_is_no_file_of_this_user_is_a_missing_kernel(folder, found):
    path = folder / NAME
    found(path)
    assert cache_folder.compiled(path) is None
    is_directory = path.is_dir()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache_folder.keep_compiled(path, b"new")
    assert cache_folder.compiled(path) == b"new"
    assert bool(said) == is_directory
    if is_directory:
        assert "cannot be written, so it is not stored (Is a directory)" in str(said[0].message)
        assert cache_folder.place_of(path) != path and path.is_dir()
    else:
        assert path.is_file() and not path.is_symlink()
    if (precious := folder / "precious").exists():
        assert precious.read_bytes() == cache_folder.sealed(b"content")
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("found", [*FOUND[:6], *FOUND[8:]])
def test_what_is_no_file_of_this_user_is_a_missing_fact(folder, found):
    path = cache_folder.facts_file("peaks", "x")
    path.parent.mkdir()
    found(path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert cache_folder.recall(path) == {}
        cache_folder.remember(path, {"a": 1})
    assert said
    if not path.is_dir():
        with warnings.catch_warnings(action="error"):
            assert cache_folder.recall(path) == {"a": 1}


@pytest.mark.parametrize("found", [empty, pipe, broken_link, link_to_a_whole_one])
def test_what_is_no_folder_of_facts_has_none(folder, found):
    found(folder / "peaks")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert cache_folder.recall(cache_folder.facts_file("peaks", "x")) == {}
        cache_folder.remember(cache_folder.facts_file("peaks", "x"), {"a": 1})
    assert said


def test_a_linked_folder_of_facts_is_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "tuned").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="cannot be written"):
        cache_folder.remember(cache_folder.facts_file("tuned", "x"), {"a": 1})
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "found, objects",
    [
        *product([directory, pipe, broken_link, loop, empty, writable_by_others], ["fa2-*.so"]),
        (pipe, "cupyfa-runtime-*.so"),
    ],
)
def test_commands_run_whatever_lies_in_the_cache(tmp_path, found, objects):
    """The second run reads the entries that the first run stored, and neither run hangs."""
    folder = with_runtime(tmp_path / "cache")
    env = {"CUPYFA_CACHE_DIR": folder}
    run = ["run", "fa2", *SIMULATOR, *SMALL]
    assert process(run, env=env).returncode == 0
    spoiled = [*folder.glob(objects)]
    assert spoiled
    for path in spoiled:
        path.unlink()
        found(path)
    (folder / "tuned").mkdir()
    for _ in range(2):
        done = process(run, env=env)
        assert done.returncode == 0 and done.stdout.endswith("PASS\n"), done.stderr
        assert ("is not stored (Is a directory)" in done.stderr) == (found is directory)


PLANTED = r"""
#include <cstdio>
struct Planted { Planted() { std::fclose(std::fopen("MARK", "w")); } } planted;
"""


@pytest.mark.slow
def test_a_planted_library_does_not_run(tmp_path):
    """The library's seal is valid; only its permissions show that it is foreign."""
    folder = with_runtime(tmp_path / "cache")
    env = {"CUPYFA_CACHE_DIR": folder}
    run = ["run", "fa2", *SIMULATOR, *SMALL]
    assert process(run, env=env).returncode == 0
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED.replace("MARK", str(tmp_path / "ran")))
    built = tmp_path / "planted.so"
    command = [*machine.compiler(), "-shared", "-fPIC", source, "-o", built]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    objects = sorted(folder.glob("fa2-*.so"))
    assert objects
    for mode_of_folder, mode in ((0o700, 0o666), (0o777, 0o600)):
        folder.chmod(mode_of_folder)
        for path in objects:
            path.write_bytes(cache_folder.sealed(built.read_bytes()))
            path.chmod(mode)
        done = process(run, env=env)
        assert done.returncode == 0 and not (tmp_path / "ran").exists()
    assert "other users can write" in done.stderr
    load = f"import ctypes; ctypes.CDLL({str(built)!r})"  # checks that loading runs it
    subprocess.run([sys.executable, "-c", load], check=True)
    assert (tmp_path / "ran").exists()
