"""The measured ladder: its table, its sections in the pages, its picture."""

import re
import sys
from dataclasses import replace

import pytest
from helpers.cli import cli, refused, strict
from helpers.pictures import assert_readable
from matplotlib.text import Text

from cupyfa import Problem
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.lab.report import plots as plotting, publish as pages
from cupyfa.ladder import LADDER
from cupyfa.planner import source as sources

RUNGS = list(LADDER["forward"])
OTHERS = ("mma_tf32", "mma_fp16x2", "mma_f64", "wgmma_fp16x2", "wgmma_fp8")
OF_16_BITS = [x for x in RUNGS if x not in OTHERS]
WHERE = {
    "device": "a card",
    "cuda": "12.9",
    "cupyfa": "0.1",
    "command": "cupyfa ladder --docs --save x.json",
}
PAGE = "# Title\n<!-- measured forward -->\nold\n<!-- /measured forward -->\nrest\n"


def measured(name, ms, M=2048, factors=None):
    problem = Problem.of_sizes(batch=4, heads=16, M=M, d=64, dtype="float16")
    times = [ms] * 3 if ms else []
    how = {"peak": 700.0, "factors": factors or {}}
    return Measurement(name, "forward", problem, {}, times, True, **how)


ROWS = [
    measured("baseline", 8.0, factors={"baseline": None, "rung before": None}),
    measured("fa2", 10.0, factors={"baseline": 0.8, "rung before": 5.123}),
    measured("fa2_coalesced", 4.0, factors={"baseline": 2.0, "rung before": 2.5}),
    measured("v1", None, factors={"baseline": None, "rung before": None}),
]


def test_figures_of_a_rung():
    baseline, fa2, _, v1 = pages.shown_rungs(ROWS)
    assert list(fa2) == [
        "rung",
        "adds",
        "ms",
        "TFLOP/s",
        "%_of_baseline",
        "%_of_peak",
        "x_rung_before",
    ]
    assert fa2["adds"] == LADDER["forward"]["fa2"].adds
    assert (fa2["ms"], fa2["%_of_baseline"], fa2["x_rung_before"]) == (10.0, 80, 5.12)
    assert fa2["%_of_peak"] == pytest.approx(100 * fa2["TFLOP/s"] / 700, rel=0.01)
    assert (baseline["%_of_baseline"], baseline["x_rung_before"]) == (100, None)
    assert (v1["ms"], v1["%_of_baseline"]) == (None, None)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    for name in pages.PAGES:
        (tmp_path / name).write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    return tmp_path


def published(checkout, rows=ROWS, **where):
    """Publishes rows in a checkout and returns the texts of its pages."""
    pages.publish(checkout, Results({**WHERE, **where}, rows), rows)
    return [(checkout / name).read_text(encoding="utf-8") for name in pages.PAGES]


def test_the_table_is_written_between_the_markers_of_every_page(checkout):
    _, chinese = pages.PAGES
    (checkout / chinese).write_text(PAGE.replace("Title", "标题"), encoding="utf-8")
    texts = published(checkout)
    for text, title in zip(texts, ("Title", "标题")):
        head = f"# {title}\n<!-- measured forward -->\n| rung | adds | ms | TFLOP/s |"
        assert text.startswith(head)
        assert text.endswith(".\n<!-- /measured forward -->\nrest\n")
        assert "old" not in text and "| fa2 | " in text
        line = text.splitlines()[-3]
        for word in ("a card", "cuda 12.9", "M=2048", "d=64 float16", "`cupyfa ladder`"):
            assert word in line
    assert published(checkout) == texts, "publishing again changes nothing"


def test_gradients_have_their_own_markers(checkout):
    gradients = [replace(row, kernel="rows", operation="backward") for row in ROWS[1:2]]
    with pytest.raises(ValueError, match="must contain <!-- measured backward -->"):
        published(checkout, gradients)
    for name in pages.PAGES:
        both = PAGE + PAGE.replace("forward", "backward")
        (checkout / name).write_text(both, encoding="utf-8")
    before, after = published(checkout, gradients)[0].split("rest\n")[:2]
    assert before == PAGE.removesuffix("rest\n")
    assert "| rows |" in after


def test_no_page_is_written_unless_all_can_be(checkout):
    english, chinese = pages.PAGES
    (checkout / chinese).write_text("no markers")
    with pytest.raises(ValueError, match=r"zh/ladder\.md must contain <!-- measured forward -->"):
        published(checkout)
    assert (checkout / english).read_text() == PAGE
    (checkout / english).unlink()
    with pytest.raises(
        ValueError, match="does not contain docs/ladder.md; run this command in a checkout"
    ):
        published(checkout)


def test_times_of_the_simulator_are_not_published(checkout):
    message = "simulator times must not be written to docs/ladder.md"
    with pytest.raises(ValueError, match=message):
        published(checkout, backend="simulator")
    Results({**WHERE, "backend": "simulator"}, ROWS).save(checkout / "a.json")
    assert message in refused("ladder", "--from", checkout / "a.json", "--docs", code=2)
    assert (checkout / pages.PAGES[0]).read_text() == PAGE


@pytest.mark.parametrize("has_page, word", [(True, "measure on a GPU"), (False, "in a checkout")])
def test_nothing_is_measured_that_cannot_be_published(checkout, monkeypatch, has_page, word):
    monkeypatch.setattr(
        "cupyfa.lab.commands.ladder.bench", lambda *_, **__: pytest.fail("measured")
    )
    if not has_page:
        (checkout / pages.PAGES[0]).unlink()
    assert word in refused("ladder", "--docs", "--backend", "simulator", code=2)


def test_the_pages_of_the_project_have_the_markers():
    for name in pages.PAGES:
        text = (sources.ROOT / name).read_text(encoding="utf-8")
        for operation in ("forward", "backward"):
            assert text.count(f"<!-- measured {operation} -->") == 1, name
            assert text.count(f"<!-- /measured {operation} -->") == 1, name


def test_rows_of_one_length():
    rows = [measured("fa2", 1.0, M) for M in (256, 2048, 4096)]
    assert [row.problem.M for row in pages.at_length(rows, None)] == [2048]
    assert [row.problem.M for row in pages.at_length(rows, 256)] == [256]
    assert [row.problem.M for row in pages.at_length(rows[:1], None)] == [256]
    left_out = [measured(name, None, M) for name in ("fa2", "v2") for M in (2048, 4096)]
    timed = [measured("fa2", 1.0, 256), measured("v2", 1.0, 256), measured("fa2", 1.0, 512)]
    assert {row.problem.M for row in pages.at_length([*timed, *left_out], None)} == {256}
    with pytest.raises(ValueError, match="M=7 was not measured; choose from 256, 2048, 4096"):
        pages.at_length(rows, 7)
    other = Measurement("fa2", "forward", Problem.of_sizes(M=256, d=8))
    with pytest.raises(ValueError, match="a ladder requires measurements of a single problem"):
        pages.at_length([*rows, other], 256)
    single, *rounded = (
        replace(x, problem=other.problem.with_options(precision=precision))
        for x, precision in zip(rows, (None, "tf32", "float16"))
    )
    several = [single, replace(rounded[0], kernel="mma_tf32"), replace(rounded[1], kernel="v3")]
    assert pages.at_length(several, 256) == several
    assert pages.problem_of(several) == pages.problem_of([single]) == single.problem
    with pytest.raises(ValueError, match="a ladder requires measurements of a single problem"):
        pages.at_length([single, *rounded], 256)


def test_rows_of_other_kernels_are_refused(tmp_path):
    others = [measured(name, 1.0) for name in ("mine", "flash", "mine")]
    short = measured("fa2", 1.0, 256)
    assert pages.at_length([*others, short], None) == [short]
    file = tmp_path / "a.json"
    for rows, told in ((others, ", but mine, flash"), ([], "")):
        Results(WHERE, rows).save(file)
        message = refused("ladder", "--from", file, "--plot", tmp_path / "a.svg", code=2)
        assert f"the results contain no rung{told}; measure rungs with" in message


def sweep(**tops):
    """Returns rows of kernels with the given TFLOP/s at N = 4096.

    Kernels below 1 TFLOP/s are measured only up to N = 1024.
    """
    rows = []
    for name, top in tops.items():
        for M in (256, 512, 1024, 2048, 4096)[: 3 if top < 1 else 5]:
            flops = measured(name, 1.0, M).flops
            rows.append(measured(name, flops / (top * (M / 4096) ** 0.3) / 1e9, M))
    return rows


CROWD = sweep(
    **{f"wgmma_{i}": 500 + 10 * i for i in range(6)},
    **{f"mma_{i}": 100 * 1.2**i for i in range(6)},
    fa2=6,
    fa2_again=6,
    v1=0.5,
    v2=0.52,
    minimal=0.1,
)


MEASURED = Results.load(sources.ROOT / "docs" / "ladder.json")


@pytest.mark.parametrize(
    "rows", [CROWD, sweep(one=1), sweep(a=1, b=1, c=1), MEASURED.rows, sweep(mma_a=3, wgmma=4)]
)
def test_labels_are_at_the_right_and_no_text_hides_another(rows):
    curves = plotting.curves_of(rows)
    figure = plotting._figure(curves, "a card")
    assert {*curves, "N"} <= assert_readable(figure)
    for axes in figure.axes:
        labels = {label.get_text(): Text.get_window_extent(label) for label in axes.texts}
        for name, box in labels.items():
            y = axes.transData.transform(curves[name][-1])[1]
            assert 0 < box.x0 - axes.bbox.x1 < 20
            assert abs((box.y0 + box.y1) / 2 - y) < 100
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_a_panel_for_each_family_has_the_first_rung_to_compare_with():
    figure = plotting._figure(plotting.curves_of(MEASURED.rows), "")
    panels = {axes.get_title("left"): [x.get_text() for x in axes.texts] for axes in figure.axes}
    assert list(panels) == ["cuBLAS, CUDA cores, WMMA", "mma.sync", "wgmma"]
    assert all(names[0] == "baseline" for names in panels.values())
    assert panels["wgmma"][1:] == ["wgmma", "wgmma_overlap", "wgmma_persistent", "wgmma_slices"]


def test_curves_of_a_panel_differ_without_colour():
    for axes in plotting._figure(plotting.curves_of(CROWD), "").axes:
        looks = [(line.get_marker(), line.get_linestyle()) for line in axes.lines]
        assert len({*looks}) == len(looks)


def test_a_curve_that_ends_early_says_why(tmp_path):
    rows = sweep(fa2=6, v1=2)
    short = [x for x in rows if x.kernel != "v1" or x.problem.N < 1024]
    refused_rows = [replace(x, milliseconds=[], note="no room") for x in rows if x not in short]

    def drawn(rows):
        plotting.draw(rows, tmp_path / "a.svg", "a title")
        return (tmp_path / "a.svg").read_text()

    said = "v1 ends at 512: a launch at 1024 would take about "
    assert drawn(short).count(said) == 2  # in the plot and in <desc>
    assert "v1 ends at 512: no room" in drawn([*short, *refused_rows])
    assert " ends at " not in drawn(rows)


def test_data_of_a_ladder_is_not_rounded(tmp_path):
    ladder = ("ladder", "--from", sources.ROOT / "docs" / "ladder.json", "-M", 2048, "--format")
    kept = {x.kernel: x for x in Results.load(ladder[2]).rows if x.problem.M == 2048}
    for row in strict(cli(*ladder, "json").stdout):
        assert row["TFLOP/s"] == kept[row["rung"]].tflops
    assert "| 69.9 |" in cli(*ladder, "md").stdout


@pytest.mark.parametrize("name", ["ladder", "ladder_backward"])
def test_the_pictures_and_tables_of_the_pages_show_the_kept_measurements(name, tmp_path):
    kept = Results.load(sources.ROOT / "docs" / f"{name}.json")
    title = pages.title(kept, pages.problem_of(pages.at_length(kept.rows, None)))
    plotting.draw(kept.rows, tmp_path / "a.svg", title)
    files = tmp_path / "a.svg", sources.ROOT / "docs" / f"{name}.svg"
    drawn, shown = (re.search("<title>.*</desc>", x.read_text(), re.S)[0] for x in files)
    assert drawn == shown
    rungs = pages.shown_rungs(pages.at_length(kept.rows, None))
    for page in pages.PAGES:
        table = (sources.ROOT / page).read_text(encoding="utf-8")
        for row in rungs:
            assert re.search(rf"^\| {row['rung']} \| .* \| {row['TFLOP/s']:g} \|", table, re.M), row
    for page in ("README.md", "README.zh-CN.md"):
        table = (sources.ROOT / page).read_text(encoding="utf-8")
        for row in rungs:
            shown = re.search(rf"^\| \[{row['rung']}\]\(.* \| (\S+) \|$", table, re.M)
            assert shown is None or shown[1] == f"{row['TFLOP/s']:g}", row


@pytest.mark.parametrize("suffix, magic", [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_pictures_are_reproducible(tmp_path, suffix, magic):
    for name in ("a", "b"):
        plotting.draw(sweep(fa2=6, v1=0.5), tmp_path / f"{name}{suffix}", "a title")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b"))
    assert first.startswith(magic)
    assert first == second


def test_colours_have_contrast_on_white():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))

    for colour in (*plotting.COLOURS, plotting.INK):  # WCAG 2 requires 4.5 for text
        assert 1.05 / (luminance(colour) + 0.05) > 4.5, colour


def test_invalid_pictures_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"a\.gif must end with \.svg or \.png"):
        plotting.draw(CROWD, tmp_path / "a.gif")
    with pytest.raises(ValueError, match="nothing to plot: no row was timed"):
        plotting.draw([measured("v1", None)], tmp_path / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused("ladder", "--plot", tmp_path / "a.svg", code=3)


@pytest.mark.slow
def test_all_rungs_that_take_the_dtype():
    args = ("ladder", "--backend", "simulator", "-B", 1, "-H", 1, "-M", 12, "-d", 8, "--budget", 0)
    rows = strict(cli(*args, "--format", "json").stdout)
    assert [row["rung"] for row in rows] == OF_16_BITS
    assert all(row["ms"] > 0 for row in rows)
    assert {(row["device"], row["M"], row["d"]) for row in rows} == {("the simulator", 12, 8)}
    assert all(row["x_rung_before"] > 0 for row in rows[1:])
    shown = cli(*args).stdout.splitlines()
    assert shown[0] == "the simulator: batch=1 heads=1 M=12 N=12 d=8 float16 scale=0.353553"


def test_the_rungs_of_gradients(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "cupyfa.lab.commands.ladder.bench", lambda names, **_: asked.extend(names) or ROWS
    )
    cli("ladder", "--backward", "--backend", "simulator")
    of_others = ("mma_fp16x2_two_pass", "mma_f64_columns", "wgmma_fp16x2_two_pass")
    assert asked == [x for x in LADDER["backward"] if x not in of_others]  # 16-bit kernels


@pytest.mark.parametrize("columns", [80, 120])
def test_the_ladder_fits_the_terminal(monkeypatch, tmp_path, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    Results(WHERE, ROWS).save(tmp_path / "a.json")
    shown = cli("ladder", "--from", tmp_path / "a.json").stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown


def test_from_a_file_nothing_is_measured(tmp_path, checkout):
    rows = [row for row in CROWD if row.kernel in ("fa2", "v1")]
    Results(WHERE, rows).save(tmp_path / "a.json")
    picture = tmp_path / "a.svg"
    done = cli("ladder", "--from", tmp_path / "a.json", "--plot", picture, "--docs", "-M", 1024)
    assert ">fa2</text>" in picture.read_text()
    assert ">TFLOP/s on a card: batch=4 heads=16 d=64 float16</text>" in picture.read_text()
    assert "M=1024" in (checkout / pages.PAGES[0]).read_text()
    assert f"note: wrote {checkout / pages.PAGES[0]}" in done.stderr


def test_a_sweep_for_a_picture_goes_through_the_lengths(monkeypatch, tmp_path):
    def bench(kernels, *, backend, budget, patience, progress, **sizes):
        assert (kernels, budget, patience) == (OF_16_BITS, 2.0, 10.0)
        assert sizes["M"] == [256, 300, 512, 1024, 2048, 4096]
        assert (sizes["dtype"], sizes["d"]) == ("float16", 32)
        return [measured("fa2", 1.0, M) for M in sizes["M"]]

    monkeypatch.setattr("cupyfa.lab.commands.ladder.bench", bench)
    args = ("--backend", "simulator", "-d", 32, "-M", 300, "--budget", 2, "--format", "json")
    (row,) = strict(cli("ladder", *args, "--plot", tmp_path / "a.png").stdout)
    assert row["rung"] == "fa2"
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("M, told", [(256, 256), (2048, 512)])
def test_an_interrupted_sweep_prints_and_saves_its_results(monkeypatch, tmp_path, M, told):
    rows, file = [measured("fa2", 1.0, M) for M in (256, 512)], tmp_path / "a.json"

    def bench(*_, so_far, **__):
        so_far(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr("cupyfa.lab.commands.ladder.bench", bench)
    args = ("ladder", "--backend", "simulator", "-M", M, "--plot", tmp_path / "a.svg")
    done = cli(*args, "--save", file, code=130)
    assert done.stdout == ""
    assert f"the simulator: batch=4 heads=16 M={told} " in done.stderr
    assert "note: interrupted; these are the measurements so far" in done.stderr
    assert Results.load(file).rows == rows
