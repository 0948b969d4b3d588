"""The pictures of the course: files match the drawing program, and drawings match kernels."""

import re
import sys
from itertools import combinations, pairwise

import pytest

from cupyfa.planner.source import ROOT

sys.path.insert(0, str(ROOT / "tools" / "pictures"))
import drawings
from canvas import SIZE, WIDTH, Canvas

FOLDER = ROOT / "docs" / "pictures"
EACH = pytest.mark.parametrize("language", ["en", "zh"])


def drawn(name, language):
    canvas = Canvas(name, language)
    draw, *titles = drawings.PICTURES[name]
    description = draw(canvas)
    return canvas, canvas.svg(titles[language == "zh"], description)


@EACH
@pytest.mark.parametrize("name", drawings.PICTURES)
def test_files_are_what_the_program_draws(name, language):
    suffix = ".svg" if language == "en" else ".zh.svg"
    file = FOLDER / f"{name}{suffix}"
    assert file.read_text(encoding="utf-8") == drawn(name, language)[1], "run python tools/pictures"


def test_the_bars_are_the_forward_steps_of_the_course():
    course = (ROOT / "docs" / "course.md").read_text("utf-8").split("## Backward")[0]
    steps = re.findall(r"^\| \d+ \| \[(\w+)\]", course, re.M)
    assert [*drawings.STEPS] == [name for name in steps if not name.startswith("softmax")]


def test_no_other_files_are_there():
    names = {f"{name}{suffix}" for name in drawings.PICTURES for suffix in (".svg", ".zh.svg")}
    assert {file.name for file in FOLDER.iterdir()} == names


@EACH
@pytest.mark.parametrize("name", drawings.PICTURES)
def test_words_are_within_the_picture_and_apart(name, language):
    canvas, _ = drawn(name, language)
    assert all(left >= 0 and right <= WIDTH for left, right, _, _ in canvas.texts)
    for (left, right, y, text), (other_left, other_right, other_y, other) in combinations(
        canvas.texts, 2
    ):
        overlap = min(right, other_right) - max(left, other_left)
        assert overlap <= 1 or abs(y - other_y) >= 0.7 * SIZE, (text, other)


def test_states_of_tiles_give_the_softmax_of_the_row():
    weights = [weight for tile in drawings.TILES for weight in tile]
    values = [value for tile in drawings.VALUES for value in tile]
    state = drawings.state_of(drawings.TILES[0], drawings.VALUES[0])
    for tile in zip(drawings.TILES[1:], drawings.VALUES[1:]):
        state = drawings.merged(state, drawings.state_of(*tile))
    largest, total, out = state
    assert largest * total == sum(weights)
    assert out / total * sum(weights) == sum(w * v for w, v in zip(weights, values))


def test_each_lane_holds_four_elements_of_a_result():
    lanes = [drawings.accumulator_lane(row, column) for row in range(16) for column in range(8)]
    assert {lanes.count(lane) for lane in range(32)} == {4}


def test_layouts_keep_every_chunk_and_two_of_them_avoid_conflicts():
    for name, position in drawings.LAYOUTS.items():
        places = {position(row, chunk) for row in range(8) for chunk in range(8)}
        assert len(places) == 64
        assert drawings.conflicts(position) == (8 if name == "plain" else 1)


@pytest.mark.parametrize("schedule", [drawings.in_order, drawings.snake, drawings.dynamic])
def test_schedules_deal_out_every_tile_once(schedule):
    dealt = schedule(range(1, 13), 4)
    assert sorted(length for block in dealt for length in block) == [*range(1, 13)]


def test_each_kind_of_pipeline_is_faster_and_its_products_do_not_overlap():
    kinds = [drawings.synchronous(), drawings.double_buffered(), drawings.specialized()]
    kinds += [drawings.ping_pong(), drawings.persistent()]
    endings = [drawings.ending(steps) for steps in kinds]
    assert endings == sorted(endings, reverse=True)
    for steps in kinds[3:]:
        products = sorted(
            (start, start + length)
            for _, start, length, kind in steps
            if kind in (drawings.SCORES, drawings.OUTPUT)
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(products))


def begins(steps, kind, warpgroup=0):
    """Returns the times at which a warpgroup begins its steps of a kind; copies run in lane 0."""
    lane = 0 if kind == drawings.COPY else 1 + warpgroup
    return sorted(start for at, start, _, found in steps if (at, found) == (lane, kind))


TURNS = pytest.mark.parametrize("kind", [drawings.ping_pong, drawings.persistent])
WARPGROUPS = pytest.mark.parametrize("warpgroup", [0, 1])


@TURNS
@WARPGROUPS
def test_scores_of_the_next_keys_come_before_output_and_softmax_overlaps_with_it(kind, warpgroup):
    steps = kind()
    scores, softmax, output = (
        begins(steps, name, warpgroup)
        for name in (drawings.SCORES, drawings.SOFTMAX, drawings.OUTPUT)
    )
    for first in (0, drawings.KEY_TILES):
        assert scores[first + 1] < output[first] == softmax[first + 1]
    for copy, s, p, o in zip(begins(steps, drawings.COPY), scores, softmax, output):
        assert copy + 2 <= s and s + 2 <= p and p + 2 <= o


@WARPGROUPS
def test_a_persistent_block_writes_output_during_the_next_scores(warpgroup):
    steps = drawings.persistent()
    finish = begins(steps, drawings.FINISH, warpgroup)
    assert finish[0] == begins(steps, drawings.SCORES, warpgroup)[drawings.KEY_TILES]
    assert finish[0] >= begins(steps, drawings.OUTPUT, warpgroup)[drawings.KEY_TILES - 1] + 2


def test_a_persistent_block_copies_the_next_tile_early_but_only_to_free_buffers():
    steps, buffers = drawings.persistent(), 3
    copies = begins(steps, drawings.COPY)
    assert copies[drawings.KEY_TILES] == begins(steps, drawings.SOFTMAX)[drawings.KEY_TILES - 1]
    for copy, *outputs in zip(
        copies[buffers:], *(begins(steps, drawings.OUTPUT, warpgroup) for warpgroup in (0, 1))
    ):
        assert copy >= max(outputs) + 2
