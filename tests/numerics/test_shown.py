"""Reprs of public objects are one short line, and results are tables in a notebook."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from helpers.cli import PACKAGE

import cupyfa
from cupyfa.numerics.shown import Rows, html_table
from cupyfa.problem.options import AttentionOptions

SMALL = {"M": 16, "d": 8, "batch": 1, "heads": 1}
HERE = {"backend": "simulator"}
MOST = 400  # maximum length of a repr
X = np.ones((1, 1, 4, 8), np.float32)


def make_cache():
    room = np.zeros((2, 16, 1, 8), np.float32)
    return cupyfa.KVCache(room, room.copy(), np.zeros(2, np.int32), layout="bshd")


@cache
def checked():
    return cupyfa.check("fa2", samples=1, jobs=0, **HERE)


OBJECTS = {
    "plan": lambda: cupyfa.plan(kernel="wgmma_persistent", dtype="float16", M=512, d=128, **HERE),
    "planned launch": lambda: cupyfa.plan(kernel="fa2", bias="1hmn", **SMALL, **HERE).launches[0],
    "problem": lambda: cupyfa.Problem.of_sizes(bias="1hmn", score_mod="score", **SMALL),
    "case": lambda: cupyfa.lab.Case("forward", cupyfa.Problem.of_sizes(**SMALL)),
    "kernel": lambda: cupyfa.kernel("wgmma"),
    "launch": lambda: cupyfa.kernel("wgmma").launches[0],
    "tiles": lambda: cupyfa.kernel("wgmma").choice,
    "options": AttentionOptions,
    "limits": lambda: cupyfa.Simulator().limits,
    "simulator": cupyfa.Simulator,
    "transfer": cupyfa.transfer.Transfer,
    "prepared": lambda: cupyfa.compile(X, X, X, **HERE),
    "cache": make_cache,
    "block mask": lambda: cupyfa.block_mask(np.ones((16, 16), bool)),
    "expected": lambda: cupyfa.lab.Expected(np.ones((99, 99)), np.ones((99, 99))),
    "checked": checked,
}
RESULTS = {
    "bench": lambda: cupyfa.bench("fa2", alone=True, budget=0, **SMALL, **HERE),
    "tune": lambda: cupyfa.lab.tune("v1", budget=0.01, **SMALL, **HERE),
    "roofline": lambda: cupyfa.lab.roofline(["fa2", "tiled"], device="h100", **SMALL),
    "accuracy": lambda: cupyfa.lab.accuracy("fa2", **SMALL, **HERE),
    "compare": lambda: cupyfa.lab.compare(*[RESULTS["bench"]()] * 2),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_reprs_are_one_short_line(name):
    shown = repr(OBJECTS[name]())
    assert "\n" not in shown and " at 0x" not in shown
    assert len(shown) <= MOST


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_short_reprs_and_are_tables_in_a_notebook(name):
    rows = RESULTS[name]()
    assert rows and isinstance(rows, list)
    for row in rows:
        shown = repr(row)
        assert "\n" not in shown and len(shown) <= MOST
        assert row._repr_html_().startswith("<table>")
    assert repr(rows).count("\n") == len(rows) - 1
    table = rows._repr_html_()
    assert table.count("<tr>") == 1 + len(rows)
    kernels = {x.row().get("kernel") or x.row().get("computation") for x in rows}
    assert all(f"<td>{x}</td>" in table for x in kernels)


@pytest.mark.parametrize("name", ["plan", "checked"])
def test_plans_and_checks_are_tables_too(name):
    table = OBJECTS[name]()._repr_html_()
    assert table.startswith("<table>") and "<td>" in table


def test_a_table_escapes_its_cells_and_shows_the_first_of_many_rows():
    table = html_table([{"a": "<script>", "b": 1 / 3, "c": None}] * 1000)
    assert "<script>" not in table and "&lt;script&gt;" in table
    assert "0.3333" in table and "<th>c</th>" not in table
    assert table.count("<tr>") == 51 and "950 more rows" in table
    many = repr(Rows(cupyfa.Problem.of_sizes(**SMALL) for _ in range(1000)))
    assert many.count("\n") == 50 and "950 more" in many


def test_dir_has_public_names_alone():
    alone = "import cupyfa; print([x for x in dir(cupyfa) if not x.startswith('__')])"
    done = subprocess.run(
        [sys.executable, "-c", alone], cwd=PACKAGE, capture_output=True, text=True, check=True
    )
    assert eval(done.stdout) == sorted([*cupyfa.__all__, "lab", "transfer"])


WRONG_CALLS = """\
cupyfa.attention(x, x, x, casual=True)
cupyfa.attention(x, x, x, return_lse=True, casual=True)
cupyfa.vjp(x, x, x, casual=True)
cupyfa.backward(x, x, x, x, x, x, casual=True)
cupyfa.compile(x, x, x, casual=True)
cupyfa.check('fa2', casual=True)
"""


@pytest.mark.slow
def test_a_type_checker_is_brief_about_wrong_keywords(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "mistake.py"
    file.write_text(f"import cupyfa, numpy as np; x = np.ones((4, 8))\n{WRONG_CALLS}")
    mypy = [sys.executable, "-m", "mypy", "--no-error-summary", file]
    done = subprocess.run(mypy, cwd=PACKAGE, capture_output=True, text=True, check=False)
    for line in range(2, 2 + WRONG_CALLS.count("\n")):
        said = "\n".join(x for x in done.stdout.splitlines() if f"mistake.py:{line}:" in x)
        assert 'Unexpected keyword argument "casual"' in said
        assert 'did you mean "causal"' in said and len(said) < 600
