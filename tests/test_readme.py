"""The README says what is so: its code runs, its table comes from the records."""

import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cupyfa.sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def marked(name):
    """What stands between the markers of a name, without its code fence."""
    found = re.search(
        rf"<!-- {re.escape(name)} -->\n(.*?)\n?<!-- /{re.escape(name)} -->", README, re.S
    )
    assert found, f"README.md has no markers {name}"
    return re.sub(r"\A```\w+\n|\n```\Z", "", found[1]) + "\n"


def run(*command, cwd):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ladder_is_what_the_records_say():
    import runpy

    main = runpy.run_path(str(ROOT / "cli.py"))["main"]
    table = CliRunner().invoke(main, ["list", "--format", "md", "--backend", "simulator"]).stdout
    assert marked("ladder") == table, "paste the output of: cupyfa list --format md"


def test_the_numpy_example_runs(tmp_path):
    (tmp_path / "example.py").write_text(marked("example"))
    assert "(2, 8, 300, 64) (2, 8, 300)" in run("example.py", cwd=tmp_path)


def test_the_kernel_to_add_runs_as_a_script_and_on_the_command_line(tmp_path):
    for name in ("mine.cu", "mine.py"):
        (tmp_path / name).write_text(marked(name))
    assert "(2, 3, 70, 16)" in run("mine.py", cwd=tmp_path)
    command = [str(ROOT / "cli.py"), "run", "mine.py:mine", "--causal", "-M", "100", "-N", "70"]
    assert "PASS" in run(*command, cwd=tmp_path)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
