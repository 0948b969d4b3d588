"""Pages that play a simulated block: their data for every rung, and how a browser runs them."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.cli import SIMULATOR, cli

import cupyfa
from cupyfa.lab.analysis import timeline_page as pages
from cupyfa.lab.analysis.timeline_recorder import record
from cupyfa.lab.bench import sweeps
from cupyfa.lab.verify.case import Case
from cupyfa.ladder.lookup import record_named
from cupyfa.numerics import reference
from cupyfa.runtime.simulator import Simulator

SMALL = {"batch": 1, "heads": 1, "M": 64, "N": 64, "d": 32}
FIRST = ("fa2", "wgmma_overlap", "columns")  # their pages are also run in a browser
NAMES = sorted((x.name for x in cupyfa.kernels()), key=lambda name: name not in FIRST)
BYTES = 1_000_000  # maximum size of the page of a small problem
# Presses keys and moves the slider, and stores the displayed steps in the page's title.
SCRIPT = """
<script>
const shown = [], at = () => shown.push(Number(document.documentElement.dataset.step));
const press = (key) => { dispatchEvent(new KeyboardEvent("keydown", { key })); at(); };
at();
const keys = ["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"];
keys.forEach(press);
const slider = document.getElementById("slider");
slider.value = 4;
slider.dispatchEvent(new Event("input"));
at();
document.getElementById("next").click();
at();
press(" ");
setTimeout(() => { press(" "); document.title = JSON.stringify({ shown, errors }); }, 2500);
</script>
"""
CATCH = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
console.error = (...what) => errors.push(what.join(" "));
</script>
"""


@cache
def recorded(name, **options):
    kernel = record_named(name)
    sizes = {"M": 8, "N": 640} if kernel.operation == "softmax" else SMALL
    usual = {} if kernel.operation == "softmax" else {"dtype": None}
    given = {**sizes, **{x: y for x, y in {**usual, **options}.items() if y is not None}}
    (problem,) = sweeps.problems(kernel.operation, given, kernel, small=True)
    case = Case(kernel.operation, problem)
    return record(kernel, case, Simulator(), block=0), case


def overlap():
    return recorded("wgmma_overlap", M=192, N=384, d=16, dtype="float16")


class Scripts(HTMLParser):
    """Collects a page's data and the external files that the page would load."""

    def __init__(self, page):
        super().__init__()
        self.open, self.loads, self.data = [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append((tag, dict(attrs)))
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self.open and self.open[-1][1].get("id") == "data":
            self.data += data

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            continue


def written(name, folder, **options):
    timeline, case = recorded(name, **options)
    path = folder / f"{name}.html"
    pages.save(timeline, case, path)
    return path


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_pages_of_every_rung_are_whole_small_and_need_no_network(name, tmp_path):
    page = written(name, tmp_path).read_text()
    read = Scripts(page)
    data = json.loads(read.data)
    assert len(page.encode()) < BYTES
    assert read.loads == [] and not re.search(r"https?:|@import|url\(", page)
    timeline, _ = recorded(name)
    work = [x for x in timeline.phases if x.is_first and x.kind in pages._ACTIONS]
    joined = sum(b - a + 1 for step in data["steps"] for a, b in step[3])
    assert joined == len(work) + len(timeline.copies) > 0
    tiles = {(row, key) for _, row, key, *_ in data["steps"]}
    assert {(x.row, x.key) for x in timeline.visits} <= tiles
    warps = {x[1] for step in data["steps"] for x in step[4] or []}
    assert max(warps) == timeline.warps - 1
    assert data["state"]["entries"] and max(x[0] for x in data["state"]["entries"]) < len(
        data["steps"]
    )


def actions(data, *tile):
    found = [data["actions"][x[0]][0] for x in data["steps"] if tuple(x[1:3]) == tile]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", ["minimal", "fa2", "mma_async", "wgmma"])
def test_a_tile_has_scores_softmax_and_output_in_this_order(name):
    data = pages._data(*recorded(name))
    row = next(x[1] for x in data["steps"] if x[2] == 0)
    kinds = [x for x in actions(data, row, 0) if x not in ("load", "copy", "epilogue")]
    assert kinds == ["scores", "softmax", "output"]


def test_scores_of_the_next_tile_overlap_with_the_output_of_the_previous_one():
    data = pages._data(*overlap())
    of_warp = [
        (data["actions"][code][0], key)
        for code, _, key, active, _ in data["steps"]
        if any(a <= 4 <= b for a, b in active)
    ]
    order = [(kind, key) for kind, key in of_warp if kind in ("scores", "softmax", "output")]
    assert order.index(("scores", 128)) < order.index(("output", 0)) < order.index(("softmax", 128))
    assert order[-1] == ("output", 256)


def test_warps_that_run_together_share_a_step():
    data = pages._data(*recorded("fa2", M=128))
    softmax = [x for x in data["steps"] if data["actions"][x[0]][0] == "softmax"]
    assert len(softmax) == 2 and all(active == [[0, 3]] for *_, active, _ in softmax)


def test_buffers_are_filled_then_full_then_empty():
    timeline, _ = overlap()
    states = {}
    for x in timeline.buffers:
        states.setdefault((x.name, x.stage), []).append(x.state)
    assert {("K", 0), ("K", 1), ("V", 0), ("V", 1), ("Q", 2)} <= states.keys()
    order = ["in flight", "full", "empty"]
    assert all(own == (order * len(own))[: len(own)] for own in states.values())
    assert [x.time for x in timeline.buffers] == sorted(x.time for x in timeline.buffers)


def test_the_tiles_of_warps_do_not_count_as_steps():
    timeline, _ = overlap()
    assert {x.key for x in timeline.visits} == {0, 128, 256} and {
        x.row for x in timeline.visits
    } == {0}
    starts = [x.start for x in timeline.phases if x.is_first]
    assert len(starts) == len(set(starts))


def last_state(name, **options):
    timeline, case = recorded(name, **options)
    state = pages._data(timeline, case)["state"]
    return state["index"], state["entries"][-1][2], case.inputs(), case.problem


@pytest.mark.parametrize("causal", [None, True])
def test_the_state_of_a_row_ends_in_its_result(causal):
    row, state, inputs, p = last_state("fa2", causal=causal)
    offset = p.causal_offset if causal else None
    out, lse = reference.attention(*(inputs[x] for x in "QKV"), scale=p.scale, causal_offset=offset)
    np.testing.assert_allclose([float(x) for x in state["O / l"]], out[0, 0, row, :4], rtol=1e-3)
    found = float(state["m"][0]) + np.log(float(state["l"][0]))
    np.testing.assert_allclose(found, lse[0, 0, row], rtol=1e-3)


def test_the_states_of_gradients_end_in_their_results():
    key, state, inputs, p = last_state("columns")
    Q, K, V, dO, out, lse = (
        inputs[x][0, 0].astype(np.float64) for x in ("Q", "K", "V", "dO", "O", "lse")
    )
    P = np.exp(Q @ K.T * p.scale - lse[:, None])
    dS = P * (dO @ V.T - (dO * out).sum(-1)[:, None])
    for name, wanted in (("dV", P.T @ dO), ("dK", dS.T @ Q * p.scale)):
        np.testing.assert_allclose([float(x) for x in state[name]], wanted[key, :4], rtol=2e-3)
    row, state, *_ = last_state("rows")
    np.testing.assert_allclose(
        [float(x) for x in state["dQ"]], (dS @ K * p.scale)[row, :4], rtol=2e-3
    )


def test_texts_of_a_page_end_no_script(tmp_path):
    timeline, case = recorded("fa2")
    path = tmp_path / "page.html"
    pages.save(replace(timeline, problem="</script><b>&amp;"), case, path)
    page = path.read_text()
    assert page.count("</script") == 2 and "<b>&" not in page
    assert json.loads(Scripts(page).data)["problem"] == "</script><b>&amp;"


def test_recordings_that_are_no_steps_of_a_block_are_refused(tmp_path, monkeypatch):
    timeline, case = recorded("fa2")
    for other in (replace(timeline, in_steps=False), replace(timeline, is_detailed=False)):
        with pytest.raises(ValueError, match=r"single block in the simulator; use --backend sim"):
            pages.save(other, case, tmp_path / "page.html")
    monkeypatch.setattr(pages, "_MOST_STEPS", 3)
    with pytest.raises(ValueError, match=r"runs \d+ steps, but a page shows at most 3; choose sm"):
        pages.save(timeline, case, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_page(tmp_path):
    path = tmp_path / "page.html"
    sizes = ("-B", 1, "-H", 1, "-M", 64, "-N", 64, "-d", 16, *SIMULATOR)
    cli("timeline", "fa2", *sizes, "--html", path)
    assert Scripts(path.read_text()).data
    refused = cli("timeline", "fa2", *sizes, "--html", path, "--save", path, code=2)
    assert f"--save and --html both write {path}; choose two different files" in refused.output


# In a browser


def dom(path, query, budget):
    """Returns the page's DOM after ``budget`` milliseconds of virtual time in a browser."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update"),
    )
    own = f"--user-data-dir={path.parent / 'profile'}"
    command = (browser, *flags, own, f"--virtual-time-budget={budget}", "--dump-dom")
    found = subprocess.run(
        (*command, f"file://{path}?{query}"), capture_output=True, text=True, timeout=120
    )
    return found.stdout


@pytest.mark.parametrize("name", FIRST)
def test_a_browser_steps_plays_and_scrubs(name, tmp_path):
    path = written(name, tmp_path)
    page = path.read_text()
    count = len(json.loads(Scripts(page).data)["steps"])
    path.write_text(page.replace("<script", f"{CATCH}<script", 1).replace("</html>", SCRIPT))
    found = dom(path, "step=2", 10_000)
    result = json.loads(re.search(r"<title>(.*?)</title>", found).group(1))
    assert result["errors"] == []
    last = count - 1
    assert result["shown"][:11] == [2, 0, 1, 2, 1, last, last, 0, 4, 5, 5]
    assert 5 < result["shown"][11] <= last


def test_a_page_speaks_two_languages(tmp_path):
    path = written("fa2", tmp_path)
    english, chinese = (dom(path, f"step=2&lang={x}", 2000) for x in ("en", "zh"))
    assert "Warps 0–" in english and "compute the scores" in english and 'lang="en"' in english
    assert "计算分数" in chinese and 'lang="zh-CN"' in chinese
