"""The pictures of the course. Each function draws a picture and returns its description."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from canvas import Canvas

import cupyfa

DOCS = Path(__file__).resolve().parents[2] / "docs"


def memory(c: Canvas) -> str:
    """Draws the traffic between chip and memory, for three kernels and for one fused kernel."""
    top, chip = 66, 168
    for x, heading in (
        (8, c.say("three kernels", "三个核函数")),
        (208, c.say("one: FlashAttention", "一个：FlashAttention")),
    ):
        c.text(x + 92, 18, heading, bold=True)
        c.box(x, 26, 184, top - 26, "plain")
        c.text(x + 6, 40, c.say("device memory", "显存"), anchor="start", size=11)
        c.box(x, chip, 184, 70, "plain")
        c.text(x + 6, chip + 64, c.say("on the chip", "片上"), anchor="start", size=11)
    c.line((4, 113), (396, 113), colour="alert", dashed=True)
    c.text(300, 108, c.say("chip border", "芯片边界"), size=11, colour="alert")

    for x, array in ((20, "Q"), (34, "K"), (48, "V"), (84, "S"), (120, "P"), (176, "O")):
        c.text(x, 59, array)
    steps = (
        (14, "S=QKᵀ", ("Q,K", "S")),
        (74, "softmax", ("S", "P")),
        (134, "O=PV", ("P,V", "O")),
    )
    for x, step, (read, written) in steps:
        c.box(x, chip + 12, 54, 28, "a", step, size=11)
        for offset, ends, array in (
            (14, (top, chip + 12), read),
            (42, (chip + 12, top), written),
        ):
            is_large = array[0] in "SP"
            colour = "alert" if is_large else "ink"
            c.line((x + offset, ends[0]), (x + offset, ends[1]), arrow=True, colour=colour)
            c.text(x + offset - 3, 140, array, size=10, colour=colour, anchor="end")

    for x, array in ((236, "Q"), (250, "K"), (264, "V"), (350, "O")):
        c.text(x, 59, array)
    loop = c.say("tiles of S and P\nstay here", "S 和 P 的分块\n留在这里")
    c.box(222, chip + 6, 156, 40, "a", loop, size=11)
    for x, ends, array in ((250, (top, chip + 6), "Q,K,V"), (350, (chip + 6, top), "O")):
        c.line((x, ends[0]), (x, ends[1]), arrow=True)
        c.text(x - 3, 140, array, size=10, anchor="end")

    rows, columns = 2048, 64
    inputs = 4 * 2 * rows * columns / 1e6
    scores = 4 * 2 * rows**2 / 1e6
    for x, moved in ((100, f"{inputs + scores:.1f} MB"), (300, f"{inputs:.2f} MB")):
        c.text(x, 258, c.say(f"at least {moved} moved", f"至少搬运 {moved}"))
    note = c.say("one head, M = N = 2048, d = 64, float16", "一个头，M = N = 2048，d = 64，float16")
    c.text(200, 276, note, size=11)

    levels = (
        (c.say("registers (one thread)", "寄存器（单个线程）"), "256 KB / SM", "", 300),
        (
            c.say("shared memory (one block)", "共享内存（单个线程块）"),
            "256 KB / SM",
            "31 TB/s",
            300,
        ),
        (c.say("L2 cache", "L2 缓存"), "50 MB", "", 342),
        (c.say("device memory", "显存（HBM）"), "80 GB", "3.35 TB/s", 384),
    )
    c.text(200, 306, c.say("levels of memory of an H100", "H100 的存储层次"), bold=True)
    for number, (level, size, rate, width) in enumerate(levels):
        y = 316 + 30 * number
        c.box(200 - width / 2, y, width, 26, "abcd"[number])
        c.text(200, y + 17, c.say(", ", "，").join(filter(None, (level, size, rate))), size=11)
    return c.say(
        "Three kernels move S and P through memory; FlashAttention moves Q, K, V and O only.",
        "三个核函数让 S 和 P 经过显存；FlashAttention 只搬运 Q、K、V 和 O。",
    )


# exp(score) and the value of each of eight keys, in four tiles of two keys.
TILES = ((1, 3), (6, 2), (4, 1), (12, 3))
VALUES = ((6, 2), (4, 3), (1, 5), (2, 4))
State = tuple[int, Fraction, Fraction]


def state_of(weights: Sequence[int], values: Sequence[int]) -> State:
    """Returns exp(m), l and O of a tile."""
    largest = max(weights)
    total = Fraction(sum(weights), largest)
    return largest, total, sum(Fraction(w * v, largest) for w, v in zip(weights, values))


def merged(a: State, b: State) -> State:
    largest = max(a[0], b[0])
    f, g = Fraction(a[0], largest), Fraction(b[0], largest)
    return largest, f * a[1] + g * b[1], f * a[2] + g * b[2]


def online_softmax(c: Canvas) -> str:
    """Draws the state of a row after each of four tiles, and two halves that are merged."""
    tiles = [state_of(w, v) for w, v in zip(TILES, VALUES)]
    states = [tiles[0]]
    for tile in tiles[1:]:
        states.append(merged(states[-1], tile))
    c.text(200, 18, c.say("one row, tile by tile", "一行，逐个分块"), bold=True)
    rows = (
        c.say("scores", "分数"),
        c.say("values", "值"),
        "m",
        c.say("factor", "因子"),
        "ℓ",
        "Õ",
    )
    for number, row in enumerate(rows):
        c.text(54, 47 + 26 * number, row, anchor="end")
    for number, (weights, values) in enumerate(zip(TILES, VALUES)):
        x = 64 + 84 * number
        for column, (weight, value) in enumerate(zip(weights, values)):
            c.box(x + 38 * column, 30, 36, 24, "a", f"ln {weight}", size=11)
            c.box(x + 38 * column, 56, 36, 24, "b", f"{value}", size=11)
        largest, total, out = states[number]
        factor = "" if not number else f"× {Fraction(states[number - 1][0], largest)}"
        for line, content in enumerate((f"ln {largest}", factor, f"{total}", f"{out}")):
            if content:
                fill = "plain" if line != 1 else ("c" if factor != "× 1" else "plain")
                c.box(x, 82 + 26 * line, 74, 24, fill, content)
        if number:
            c.line((x - 9, 146), (x - 1, 146), arrow=True)
            c.line((x - 9, 172), (x - 1, 172), arrow=True)
    _, total, out = states[-1]
    largest = states[-1][0]
    c.text(110, 210, f"O = Õ / ℓ = {out / total}")
    c.text(290, 210, f"L = m + log ℓ = ln {largest * total}")

    c.text(200, 246, c.say("two halves, merged", "两半，再合并"), bold=True)
    halves = [merged(*tiles[:2]), merged(*tiles[2:])]
    together = merged(*halves)
    names = (c.say("tiles 1, 2", "分块 1、2"), c.say("tiles 3, 4", "分块 3、4"))
    c.text(92, 262, "m, ℓ, Õ", size=11)
    c.text(346, 278, "m, ℓ, Õ", size=11)
    for number, (largest, total, out) in enumerate(halves):
        y = 268 + 34 * number
        c.box(8, y, 168, 28, "ac"[number], f"ln {largest},  {total},  {out}")
        c.text(182, y + 18, names[number], anchor="start", size=11)
    c.text(262, 304, "⊕", size=20)
    c.line((280, 298), (296, 298), arrow=True)
    largest, total, out = together
    c.box(300, 284, 92, 28, "d", f"ln {largest}, {total}, {out}", size=10.5)
    assert together == states[-1]
    return c.say(
        "The state of a row after each of four tiles: maximum, factor, sum and output; two halves "
        "merge into the same state.",
        "一行在四个分块之后的状态：最大值、因子、和与输出；两半合并得到同样的状态。",
    )


def loop_orders(c: Canvas) -> str:
    """Draws the order in which two loops visit tiles, and what an iteration reads and writes."""
    side, tiles = 36, 4
    for x, heading, first in (
        (32, c.say("keys outside: minimal", "键在外：minimal"), True),
        (206, c.say("rows outside: fa2", "行在外：fa2"), False),
    ):
        c.text(x + 2 * side, 18, heading, bold=True)
        c.text(x + 2 * side, 36, c.say("tiles of keys →", "键分块 →"), size=11)
        for row in range(tiles):
            for column in range(tiles):
                order = column * tiles + row + 1 if first else column + 1
                fill = "a" if first else "abcd"[row]
                c.box(x + side * column, 44 + side * row, side, side, fill, f"{order}")
        if not first:
            for row in range(tiles):
                y = 44 + side * row + side / 2 + 4
                label = c.say(f"block {row}", f"线程块 {row}")
                c.text(x + 4 * side + 4, y, label, anchor="start", size=10)
        else:
            c.text(x + 2 * side, 204, c.say("a block for each head", "每个头一个线程块"), size=11)
    c.text(14, 44 + 2 * side, "Q ↓", size=11)
    blocks = c.say("a block for each tile of Q", "每个 Q 分块一个线程块")
    c.text(206 + 2 * side, 204, blocks, size=11)
    lines = (
        (c.say("an iteration reads", "每次迭代读"), "Q, O, m, ℓ", "K, V"),
        (c.say("and writes", "并写"), "O, m, ℓ", c.say("nothing", "无")),
        (c.say("stays on the chip", "留在片上"), "K, V", "Q, O, m, ℓ"),
    )
    for number, (what, left, right) in enumerate(lines):
        y = 222 + 24 * number
        c.box(8, y, 384, 22, "plain")
        c.text(14, y + 15, what, anchor="start", size=11)
        c.text(200, y + 15, left, size=11)
        c.text(320, y + 15, right, size=11)
    return c.say(
        "A grid of tiles in which keys outside goes down the columns with one block, and rows "
        "outside gives each tile of Q, a row of the grid, to a block.",
        "分块网格：键在外时一个线程块逐列向下；"
        "行在外时每个 Q 分块（网格的一行）各由一个线程块负责。",
    )


def _constants(name: str) -> dict[str, int]:
    dtype = "float16" if name.startswith("mma") else "float32"
    plan = cupyfa.plan(kernel=name, backend="simulator", M=2048, d=64, heads=16, dtype=dtype)
    return dict(plan.constants)


def mapping(c: Canvas) -> str:
    """Draws which thread or warp computes which scores of a tile, for six rungs."""
    cell, count = 15, 8
    v2, v3, mma = (_constants(name) for name in ("v2", "v3", "mma_split_q"))
    owner: dict[str, tuple[str, str, Callable[[int, int], int | None]]] = {
        "minimal": (
            "a thread computes a row;\nrows alternate in colour",
            "一个线程算一行；\n相邻两行颜色交替",
            lambda row, column: row % 2,
        ),
        "v1": (
            "all threads compute one row",
            "所有线程同时算一行",
            lambda row, column: 0 if row == 0 else None,
        ),
        "v2": (
            f"a warp computes a row, {v2['Br']} at a time",
            f"一个 warp 算一行，同时 {v2['Br']} 行",
            lambda row, column: row if row < v2["Br"] else None,
        ),
        "v3": (
            f"a warp: {v3['Wr']} × {v3['Wc']} of {v3['Br']} × {v3['Bc']}",
            f"一个 warp：{v3['Br']} × {v3['Bc']} 中的 {v3['Wr']} × {v3['Wc']}",
            lambda row, column: (
                row * v3["Br"] // 8 // v3["Wr"] * 2 + column * v3["Bc"] // 8 // v3["Wc"]
            ),
        ),
        "fa2": (
            "a thread owns a row and its O;\nrows alternate in colour",
            "一个线程负责一行及其 O；\n相邻两行颜色交替",
            lambda row, column: row % 2,
        ),
        "mma_split_q": (
            f"a warp owns {mma['Wr']} rows and their O",
            f"一个 warp 负责 {mma['Wr']} 行及其 O",
            lambda row, column: row * mma["Br"] // 8 // mma["Wr"],
        ),
    }
    for number, (name, (english, chinese, whose)) in enumerate(owner.items()):
        x, y = 40 + 200 * (number % 2), 34 + 184 * (number // 2)
        c.text(x + 60, y - 14, name, bold=True)
        for row in range(count):
            for column in range(count):
                found = whose(row, column)
                fill = "paper" if found is None else "abcd"[found]
                c.box(x + cell * column, y + cell * row, cell, cell, fill)
        c.text(x - 6, y + 64, "Q ↓", anchor="end", size=11)
        c.text(x + 124, y + 64, "K →", anchor="start", size=11)
        for line, caption in enumerate(c.say(english, chinese).split("\n")):
            c.text(x + 60, y + 134 + 13 * line, caption, size=10)
    return c.say(
        "Tiles of S in six rungs, coloured by the thread or warp that computes them.",
        "六级核函数中 S 的一个分块，按负责计算的线程或 warp 着色。",
    )


def split(c: Canvas) -> str:
    """Draws how four warps share a tile: by keys, and by rows."""
    for x, heading in ((20, "Split-K (FlashAttention 1)"), (220, "Split-Q (FlashAttention 2)")):
        c.text(x + 80, 18, heading, bold=True, size=11)
    for warp, fill in enumerate("abcd"):
        c.box(44 + 28 * warp, 30, 28, 100, fill, f"w{warp}", size=11)
        c.line((58 + 28 * warp, 152), (76 + 16 * warp, 176), arrow=True)
        y = 30 + 25 * warp
        c.box(220, y, 112, 25, fill, f"warp {warp}", size=11)
        c.line((332, y + 12.5), (351, y + 12.5), arrow=True)
        c.box(352, y, 36, 25, fill)
    c.text(100, 146, "S = QKᵀ", size=11)
    c.text(276, 146, "S = QKᵀ", size=11)
    c.text(370, 146, "O", size=11)
    shared = c.say("add O of 4 warps, barrier", "4 份 O 相加，同步")
    c.box(8, 178, 184, 26, "plain", shared, size=9.5, edge="alert")
    c.box(208, 178, 184, 26, "plain", c.say("nothing to exchange", "无需交换"), size=9.5)
    c.text(100, 222, c.say("a warp: partial sums, all rows", "每个 warp：所有行的部分和"), size=10)
    c.text(300, 222, c.say("a warp: its rows, complete", "每个 warp：自己的行，完整"), size=10)
    return c.say(
        "Split-K divides the keys of a tile among four warps, which add their outputs through "
        "shared memory; split-Q divides the rows, and nothing is exchanged.",
        "Split-K 把分块的键分给四个 warp，输出要经过共享内存相加；split-Q 按行划分，无需交换。",
    )


def accumulator_lane(row: int, column: int) -> int:
    """Returns the lane that holds an element of the 16 × 8 result of mma.sync.m16n8k16."""
    return row % 8 * 4 + column // 2


def fragments(c: Canvas) -> str:
    """Draws which lanes hold an mma.sync result, and how two results form the next operand."""
    title = c.say(
        "16 × 8 result of mma.sync: the lane of each element",
        "mma.sync 的 16 × 8 结果：各元素所在的 lane",
    )
    c.text(8, 18, title, bold=True, anchor="start")
    width, height = 20, 15
    for row in range(16):
        for column in range(8):
            lane = accumulator_lane(row, column)
            fill = "abcd"[lane % 4]
            c.box(26 + width * column, 28 + height * row, width, height, fill, f"{lane}", size=10.5)
        c.text(20, 28 + height * row + 11, f"{row}", anchor="end", size=10.5)
    c.text(26 + 80, 284, c.say("8 columns, 16 rows", "8 列、16 行"), size=11)

    c.text(304, 46, c.say("registers of a lane", "一个 lane 的寄存器"), size=11, bold=True)
    for block, (name, fill) in enumerate((("d[0] d[1]", "plain"), ("d[2] d[3]", "plain"))):
        for side in range(2):
            x = 214 + 96 * side
            c.box(x, 56 + 34 * block, 84, 32, fill, name)
    c.text(256, 140, c.say("keys 0-7", "键 0-7"), size=10.5)
    c.text(352, 140, c.say("keys 8-15", "键 8-15"), size=10.5)
    c.line((304, 148), (304, 168), arrow=True)
    c.text(312, 162, "P = exp(S − m)", anchor="start", size=10.5)
    names = (("a[0]", "a[2]"), ("a[1]", "a[3]"))
    pair_of_numbers = c.say("two numbers", "两个数")
    for row, pair in enumerate(names):
        for side, name in enumerate(pair):
            c.box(
                222 + 84 * side,
                176 + 34 * row,
                84,
                34,
                "c",
                f"{name}\n{pair_of_numbers}",
                size=10.5,
            )
    c.text(306, 262, c.say("operand A of PV, 16 × 16", "PV 的操作数 A，16 × 16"), size=10.5)
    c.text(306, 280, c.say("no element moves", "没有元素需要移动"), size=10.5)

    c.text(8, 312, c.say("wgmma: 64 rows", "wgmma：64 行"), anchor="start", bold=True)
    for warp in range(4):
        label = c.say(
            f"warp {warp}: rows {16 * warp}-{16 * warp + 15}, lanes as above",
            f"warp {warp}：第 {16 * warp}-{16 * warp + 15} 行，lane 的排列同上",
        )
        c.box(8, 322 + 24 * warp, 384, 24, "abcd"[warp], label, size=11)
    return c.say(
        "The lanes of a 16 × 8 result; two results side by side have the layout of a 16 × 16 "
        "operand. A warpgroup has four such results, one for each warp.",
        "16 × 8 结果中各元素所在的 lane；两个结果并排就是 16 × 16 操作数的布局。"
        "一个 warpgroup 有四份这样的结果，每个 warp 一份。",
    )


CHUNKS = 8  # 16-byte chunks in a row of 64 16-bit numbers, which covers all 32 banks


def plain_position(row: int, chunk: int) -> int:
    """Returns the chunk index in shared memory without padding."""
    return row * CHUNKS + chunk


def padded_position(row: int, chunk: int) -> int:
    """Returns the chunk index in shared memory with one more chunk in each row."""
    return row * (CHUNKS + 1) + chunk


def swizzled_position(row: int, chunk: int) -> int:
    """Returns the chunk index in shared memory as swizzle.cuh permutes a row of 8 chunks."""
    return row * CHUNKS + (chunk ^ row % 8)


LAYOUTS = {"plain": plain_position, "padded": padded_position, "swizzled": swizzled_position}


def conflicts(position: Callable[[int, int], int]) -> int:
    """Returns the largest number of rows, out of eight, whose first chunks share four banks."""
    groups = [position(row, 0) % CHUNKS for row in range(8)]
    return max(groups.count(group) for group in groups)


def banks(c: Canvas) -> str:
    """Draws eight rows in the banks of shared memory: plain, padded and swizzled."""
    headings = {
        "plain": c.say("plain: mma_split_q", "直接存放：mma_split_q"),
        "padded": c.say("padded rows, as in fa2_coalesced", "行末填充，如 fa2_coalesced"),
        "swizzled": "swizzle: mma_swizzled",
    }
    cell, left = 38, 88
    for number, (layout, position) in enumerate(LAYOUTS.items()):
        top = 40 + 186 * number
        ways = conflicts(position)
        c.text(8, top - 22, headings[layout], anchor="start", bold=True)
        verdict = c.say(f"{ways} cycles" if ways > 1 else "1 cycle", f"{ways} 个周期")
        c.text(392, top - 22, verdict, anchor="end", colour="alert" if ways > 1 else "ink")
        for group in range(CHUNKS):
            label = f"{4 * group}-{4 * group + 3}"
            c.text(left + cell * group + cell / 2, top - 5, label, size=10)
        c.text(left - 6, top - 5, c.say("banks", "bank"), anchor="end", size=10.5)
        for row in range(8):
            for chunk in range(CHUNKS):
                place = position(row, chunk)
                x, y = left + cell * (place % CHUNKS), top + 15 * (place // CHUNKS)
                fill = "b" if chunk == 0 else "plain"
                c.box(x, y, cell, 15, fill, f"{row}.{chunk}", size=11)
        if layout == "padded":
            for gap in range(8):
                place = position(gap, CHUNKS)
                x, y = left + cell * (place % CHUNKS), top + 15 * (place // CHUNKS)
                c.box(x, y, cell, 15, "paper")
        c.text(left - 6, top + 11, c.say("row.chunk", "行.小块"), anchor="end", size=10.5)
    read = c.say(
        "one of the four matrices of an ldmatrix: chunk 0 of 8 rows",
        "ldmatrix 四个矩阵中的一个：8 行的第 0 小块",
    )
    c.legend(c.height + 8, [("b", read)])
    return c.say(
        "Chunk 0 of eight rows lies in the same four banks without padding, and in eight different "
        "groups of banks with padding or a swizzle.",
        "不填充时八行的第 0 小块都在同样的四个 bank 里；"
        "填充或 swizzle 之后分布在八组不同的 bank 里。",
    )


# A step of a schedule is (lane, start, length, kind). Lane 0 shows copies. Every other lane has two
# halves: CUDA cores run softmax and epilogue, tensor cores run products.
COPY, SCORES, SOFTMAX, OUTPUT, FINISH = "plain", "a", "c", "b", "d"
Step = tuple[int, float, float, str]
KEY_TILES, ROW_TILES = 2, 2


def synchronous() -> list[Step]:
    """Returns a schedule in which warps copy a tile, wait for it, and compute."""
    steps: list[Step] = []
    at = 0.0
    for _ in range(ROW_TILES):
        for _ in range(KEY_TILES):
            steps.append((0, at, 2, COPY))
            steps += _computed(at + 2, [1])
            at += 12
        steps.append((1, at, 2, FINISH))
        at += 2
    return steps


def double_buffered() -> list[Step]:
    """Returns a schedule in which warps issue the next tile's copy and compute while it runs."""
    steps: list[Step] = []
    at = 0.0
    for _ in range(ROW_TILES):
        steps.append((0, at, 2, COPY))
        at += 2
        for tile in range(KEY_TILES):
            if tile + 1 < KEY_TILES:
                steps += [(1, at, 1, COPY), (0, at + 1, 2, COPY)]
                at += 1
            steps += _computed(at, [1])
            at += 10
        steps.append((1, at, 2, FINISH))
        at += 2
    return steps


def specialized() -> list[Step]:
    """Returns a schedule in which one warp copies and two warpgroups compute in parallel."""
    steps: list[Step] = []
    at = 0.0
    for _ in range(ROW_TILES):
        steps += [(0, at + 2 * tile, 2, COPY) for tile in range(KEY_TILES)]
        at += 2
        for _ in range(KEY_TILES):
            steps += _computed(at, [1, 2])
            at += 10
        steps += [(lane, at, 2, FINISH) for lane in (1, 2)]
        at += 2
    return steps


def _computed(at: float, lanes: Sequence[int]) -> list[Step]:
    """Returns the steps of a tile of keys; each of its two products takes 4 units of time."""
    return [
        step
        for lane in lanes
        for step in ((lane, at, 4, SCORES), (lane, at + 4, 2, SOFTMAX), (lane, at + 6, 4, OUTPUT))
    ]


# Steps of two alternating warpgroups: start in warpgroup 0, delay of warpgroup 1, and kind. Each
# step takes 2 units. S of the next key tile is issued before P V of the current tile, so that the
# next tile's softmax overlaps with this P V. No two products overlap.
BEGINNING = ((2, 2, SCORES), (4, 2, SOFTMAX), (6, 4, SCORES), (8, 4, OUTPUT), (8, 4, SOFTMAX))
TURNS = (*BEGINNING, (14, 2, OUTPUT), (16, 2, FINISH))
# The steps for two tiles of Q; the second tile begins before O of the first tile is written.
PERSISTENT_TURNS = (
    *BEGINNING,
    (14, 4, OUTPUT),
    (16, 4, SCORES),
    (16, 4, FINISH),
    (18, 4, SOFTMAX),
    (22, 4, SCORES),
    (24, 4, OUTPUT),
    (24, 4, SOFTMAX),
    (30, 2, OUTPUT),
    (32, 2, FINISH),
)
PERSISTENT_COPIES = (0, 2, 8, 14)  # three buffers: the last copy waits until the first is free


def _in_turns(turns: Sequence[tuple[float, float, str]], start: float = 0) -> list[Step]:
    """Returns the steps of both warpgroups; each step takes 2 units of time."""
    return [
        (1 + warpgroup, start + at + later * warpgroup, 2, kind)
        for at, later, kind in turns
        for warpgroup in (0, 1)
    ]


def ping_pong() -> list[Step]:
    """Returns a schedule in which two warpgroups alternate on the tensor cores.

    Each block begins when the previous block has ended.
    """
    steps: list[Step] = []
    at = 0.0
    for _ in range(ROW_TILES):
        steps += [(0, at + 2 * tile, 2, COPY) for tile in range(KEY_TILES)]
        steps += _in_turns(TURNS, at)
        at = ending(steps)
    return steps


def persistent() -> list[Step]:
    """Returns a schedule in which a block begins its second tile of Q before the first one ends."""
    steps: list[Step] = [(0, at, 2, COPY) for at in PERSISTENT_COPIES]
    return steps + _in_turns(PERSISTENT_TURNS)


def ending(steps: Sequence[Step]) -> float:
    return max(start + length for _, start, length, _ in steps)


def pipeline(c: Canvas) -> str:
    """Draws idealised timelines of two tiles of Q in five kinds of kernels, at the same scale."""
    lanes = (c.say("copies", "复制"), c.say("warps", "各 warp"))
    groups = (c.say("producer", "生产者"), "warpgroup 0", "warpgroup 1")
    kinds = (
        (c.say("synchronous: mma_swizzled", "同步：mma_swizzled"), lanes, synchronous()),
        (c.say("double buffering: mma_async", "双缓冲：mma_async"), lanes, double_buffered()),
        (c.say("warp specialization: wgmma", "warp 专用化：wgmma"), groups, specialized()),
        (c.say("ping-pong: wgmma_overlap", "乒乓调度：wgmma_overlap"), groups, ping_pong()),
        (
            c.say("persistent blocks: wgmma_persistent", "线程块常驻：wgmma_persistent"),
            groups,
            persistent(),
        ),
    )
    unit = 300 / max(ending(steps) for _, _, steps in kinds)
    y = 18.0
    for heading, names, steps in kinds:
        c.text(8, y, heading, anchor="start", bold=True, size=11)
        time = c.say(f"time {ending(steps):g}", f"用时 {ending(steps):g}")
        c.text(394, y, time, anchor="end", size=11)
        for lane, name in enumerate(names):
            c.text(88, y + 20 + 20 * lane, name, anchor="end", size=10.5)
            c.line((92, y + 25 + 20 * lane), (396, y + 25 + 20 * lane), colour="pale")
        for lane, start, length, fill in steps:
            top, height = y + 7 + 20 * lane, 16
            if lane:
                top, height = (top, 8) if fill in (SOFTMAX, FINISH, COPY) else (top + 8, 8)
            c.box(94 + unit * start, top, unit * length, height, fill)
        y += 30 + 20 * len(names) + 4
    c.legend(
        y - 6,
        [
            (COPY, c.say("copy", "复制")),
            (SCORES, "S = QKᵀ"),
            (SOFTMAX, "softmax"),
            (OUTPUT, "O += PV"),
            (FINISH, c.say("epilogue: divide and write O", "收尾：除以 ℓ 并写出 O")),
        ],
    )
    return c.say(
        "Two tiles of Q with two tiles of keys each take less time in each kind: copies are hidden "
        "behind products, softmax behind products of the same and of the other warpgroup, and the "
        "epilogue behind the first scores of the next tile of Q.",
        "两个 Q 分块、各两个键分块，用时逐级减少：复制与乘法重叠，"
        "softmax 与本 warpgroup 及另一个 warpgroup 的乘法重叠，"
        "收尾与下一个 Q 分块的第一个 S 重叠。",
    )


LATE = (0, 0, 0, 8)  # start time of each block; the last block waits for a busy SM


def in_order(work: Sequence[int], blocks: int) -> list[list[int]]:
    """Assigns tiles to blocks round-robin, in the order of the tiles."""
    return [[*work[block::blocks]] for block in range(blocks)]


def snake(work: Sequence[int], blocks: int) -> list[list[int]]:
    """Assigns tiles to blocks from the longest to the shortest, in alternating block order."""
    found: list[list[int]] = [[] for _ in range(blocks)]
    for number, length in enumerate(sorted(work, reverse=True)):
        turn, place = divmod(number, blocks)
        found[place if turn % 2 == 0 else blocks - 1 - place].append(length)
    return found


def dynamic(work: Sequence[int], blocks: int) -> list[list[int]]:
    """Assigns the longest remaining tile to the first free block, as an atomic counter does."""
    found: list[list[int]] = [[] for _ in range(blocks)]
    for length in sorted(work, reverse=True):
        ends = [late + sum(lengths) for late, lengths in zip(LATE, found)]
        found[ends.index(min(ends))].append(length)
    return found


def causal(c: Canvas) -> str:
    """Draws a causal tile map, and how evenly three schedules share its rows among blocks."""
    tiles, side, blocks = 12, 15, 4
    c.text(8, 18, c.say("tiles under a causal mask", "因果掩码下的分块"), anchor="start", bold=True)
    for row in range(tiles):
        for column in range(tiles):
            fill = "a" if column < row else "c" if column == row else "paper"
            c.box(30 + side * column, 28 + side * row, side, side, fill)
        c.text(24, 28 + side * row + 11, f"{row + 1}", anchor="end", size=10.5)
    y = 60.0
    for fill, meaning in (
        ("a", c.say("full: no mask needed", "完整：不用掩码")),
        ("c", c.say("diagonal: masked", "对角：逐元素掩码")),
        ("paper", c.say("skipped", "跳过")),
    ):
        c.legend(y, [(fill, meaning)], x=224)
        y += 20
    numbers = c.say("number: work of a row", "数字：该行的工作量")
    c.text(224, y + 16, numbers, anchor="start", size=11)
    work = range(1, tiles + 1)
    schedules = (
        (c.say("in order", "按顺序"), in_order(work, blocks)),
        (c.say("longest first, snake", "从长到短，蛇形"), snake(work, blocks)),
        (c.say("longest first, atomic counter", "从长到短，原子计数器"), dynamic(work, blocks)),
    )
    y, unit = 236.0, 10.4
    for heading, found in schedules:
        longest = max(late + sum(lengths) for late, lengths in zip(LATE, found))
        c.text(8, y, heading, anchor="start", bold=True)
        total = c.say(f"time {longest}", f"用时 {longest}")
        c.text(392, y, total, anchor="end", size=11)
        for block, lengths in enumerate(found):
            x = 60 + unit * LATE[block]
            if LATE[block]:
                busy = c.say("SM is busy", "SM 被占用")
                c.box(60, y + 6 + 18 * block, x - 60, 16, "plain", busy, size=10)
            top = y + 6 + 18 * block
            c.text(54, top + 12, c.say(f"block {block}", f"线程块 {block}"), anchor="end", size=10)
            for number, length in enumerate(lengths):
                c.box(x, top, unit * length, 16, "abdc"[number], f"{length}", size=10)
                x += unit * length
        y += 104
    return c.say(
        "Tiles above the diagonal are skipped, and rows of tiles have 1 to 12 tiles. Dealt out in "
        "order to four blocks, of which one begins late by 8, because its SM is still busy, they "
        "take a time of 32; in snake order 26; with an atomic counter 22.",
        "对角线以上的分块被跳过，各行有 1 到 12 个分块。分给四个线程块，"
        "其中一个因 SM 被占用而晚 8 开始：按顺序分配用时 32，蛇形 26，原子计数器 22。",
    )


def backward(c: Canvas) -> str:
    """Draws two loop orders of the backward pass, and the matrix products of a tile."""
    side = 30
    for x, heading, by_columns in (
        (28, c.say("columns: a block owns keys", "columns：线程块负责键"), True),
        (228, c.say("rows: a block owns rows", "rows：线程块负责行"), False),
    ):
        c.text(x + 70, 18, heading, bold=True, size=10.5)
        for row in range(4):
            for column in range(4):
                owned = (column if by_columns else row) == 1
                c.box(x + side * column, 40 + side * row, side, side, "a" if owned else "plain")
        if by_columns:
            for row in range(4):
                y = 40 + side * row + side / 2
                c.line((x + 1.5 * side, y), (x + 4 * side + 14, y), arrow=True, colour="alert")
            c.text(x + 4 * side + 16, 36, "dQ +=", size=10.5, colour="alert")
            c.line((x + 1.5 * side, 40), (x + 1.5 * side, 160 + 12), arrow=True)
            c.text(x + 1.5 * side, 186, c.say("dK, dV: kept", "dK、dV：留在片上"), size=10.5)
        else:
            for column in range(4):
                at = x + side * column + side / 2
                c.line((at, 40 + 1.5 * side), (at, 160 + 12), arrow=True, colour="alert")
            c.text(x + 2 * side, 186, "dK +=, dV +=", size=10.5, colour="alert")
            c.line((x, 40 + 1.5 * side), (x + 4 * side + 14, 40 + 1.5 * side), arrow=True)
            kept = c.say("dQ:\nkept", "dQ：\n片上").split("\n")
            for number, line in enumerate(kept):
                c.text(x + 4 * side + 16, 72 + 14 * number, line, anchor="start", size=9.5)
    c.text(36, 34, c.say("keys →", "键 →"), size=10, anchor="start")
    atomics = c.say("red: atomic additions in memory", "红色：显存中的原子累加")
    c.text(200, 204, atomics, size=11, colour="alert")

    c.text(200, 232, c.say("five products of a tile", "一个分块的五个乘积"), bold=True)
    places = {
        "S = QKᵀ": (70, 262, "a"),
        "dP = dO Vᵀ": (70, 322, "a"),
        "P = exp(S − L)": (200, 262, "c"),
        "dS = P∘(dP − D)": (200, 322, "c"),
        "dV += Pᵀ dO": (332, 262, "b"),
        "dK += dSᵀ Q": (332, 310, "b"),
        "dQ += dS K": (332, 346, "b"),
    }
    for text, (x, y, fill) in places.items():
        c.box(x - 58, y - 13, 116, 26, fill, text, size=11)
    for start, end in (
        ((128, 262), (141, 262)),
        ((128, 322), (141, 322)),
        ((258, 262), (273, 262)),
        ((200, 275), (200, 308)),
        ((258, 318), (273, 312)),
        ((258, 328), (273, 342)),
    ):
        c.line(start, end, arrow=True)
    return c.say(
        "A block that owns keys keeps dK and dV and adds to dQ in memory; one that owns rows keeps "
        "dQ and adds to dK and dV. S and dP lead to P and dS, and these to the three gradients.",
        "负责键的线程块留住 dK 和 dV，在显存中累加 dQ；负责行的线程块留住 dQ，累加 dK 和 dV。"
        "由 S 和 dP 得到 P 和 dS，再得到三个梯度。",
    )


# Forward steps of the course, and the idea of each in a few words.
STEPS = {
    "baseline": ("three stages, by cuBLAS", "三个阶段，用 cuBLAS"),
    "minimal": ("tiles: scores stay on the chip", "分块：分数留在片上"),
    "v1": ("coalesced loads", "合并访存"),
    "v2": ("a warp for each row", "每行一个 warp"),
    "fa2": ("loops swapped", "交换循环"),
    "fa2_coalesced": ("coalesced copies, padded rows", "合并复制，行末填充"),
    "mma_split_q": ("tensor cores", "张量核心"),
    "mma_swizzled": ("no bank conflicts", "没有 bank 冲突"),
    "mma_async": ("double buffering", "双缓冲"),
    "mma_tma": ("copies by the copy engine (TMA)", "由复制引擎（TMA）复制"),
    "wgmma": ("warp specialization", "warp 专用化"),
    "wgmma_overlap": ("ping-pong", "乒乓调度"),
    "wgmma_persistent": ("persistent blocks", "常驻线程块"),
}
LENGTH, COLUMNS = 2048, 64  # M and d of the measurements in the picture


def measured_speeds() -> dict[str, float]:
    """Returns the TFLOP/s of the steps in docs/ladder.json."""
    rows = json.loads((DOCS / "ladder.json").read_text("utf-8"))["rows"]
    speeds = {}
    for row in rows:
        p = row["problem"]
        if row["kernel"] in STEPS and (p["M"], p["d"]) == (LENGTH, COLUMNS):
            operations = 2 * p["batch"] * p["heads"] * p["M"] * p["N"] * (p["d"] + p["dv"])
            speeds[row["kernel"]] = operations / min(row["milliseconds"]) / 1e9
    return speeds


def course(c: Canvas) -> str:
    """Draws a bar for the speed of each forward step of the course."""
    speeds = measured_speeds()
    title = c.say("TFLOP/s of the steps, H200, float16", "各步的 TFLOP/s，H200，float16")
    c.text(8, 18, title, anchor="start", bold=True)
    left, unit, lowest = 130, 52, 0.01  # logarithmic axis; a factor of ten spans `unit`
    decades = [(left + unit * number, lowest * 10**number) for number in range(5)]
    for x, speed in decades:
        c.text(x, 36, f"{speed:g}", size=10)
        c.line((x, 39), (x, 43), colour="pale")
    for number, (name, ideas) in enumerate(STEPS.items()):
        y = 45 + 31 * number
        c.text(left - 6, y + 12, name, anchor="end", size=11)
        c.text(left, y + 26, c.say(*ideas), anchor="start", size=9.5)
        if name not in speeds:
            c.text(left, y + 12, c.say("not measured", "未测量"), anchor="start", size=11)
            continue
        width = unit * math.log10(speeds[name] / lowest)
        family = "c" if name.startswith("wgmma") else "b" if name.startswith("mma") else "a"
        c.box(left, y, width, 15, family)
        for x, speed in decades:
            if lowest < speed < speeds[name]:
                c.line((x, y), (x, y + 15), colour="paper")
        c.text(left + width + 5, y + 12, f"{speeds[name]:.3g}", anchor="start", size=11)
    note = c.say(
        f"batch 4, 16 heads, M = N = {LENGTH}, d = {COLUMNS}; the scale is logarithmic",
        f"批次 4，16 个头，M = N = {LENGTH}，d = {COLUMNS}；对数刻度",
    )
    c.text(8, 45 + 31 * len(STEPS) + 12, note, anchor="start", size=10)
    fastest, slowest = max(speeds.values()), min(speeds.values())
    return c.say(
        f"Bars from {slowest:.2g} TFLOP/s for v1 to {fastest:.3g} for wgmma_persistent.",
        f"条形图：从 v1 的 {slowest:.2g} TFLOP/s 到 wgmma_persistent 的 {fastest:.3g}。",
    )


# Files and titles, in the order of the course.
PICTURES: dict[str, tuple[Callable[[Canvas], str], str, str]] = {
    "course": (course, "The speed of each step", "每一步的速度"),
    "memory": (memory, "What crosses the border of the chip", "哪些数据越过芯片边界"),
    "online_softmax": (online_softmax, "Online softmax, tile by tile", "在线 softmax，逐个分块"),
    "loop_orders": (loop_orders, "Two orders of the loops", "两种循环顺序"),
    "mapping": (mapping, "Who computes which scores", "谁计算哪些分数"),
    "split": (split, "Split-K and split-Q among warps", "warp 之间的 split-K 与 split-Q"),
    "fragments": (fragments, "Lanes of a matrix product", "矩阵乘结果在各 lane 中的分布"),
    "banks": (banks, "Banks of shared memory", "共享内存的 bank"),
    "pipeline": (pipeline, "From copies that wait to ping-pong", "从等待复制到乒乓调度"),
    "causal": (causal, "Load balance under a causal mask", "因果掩码下的负载均衡"),
    "backward": (backward, "Two orders of the gradients", "梯度的两种循环顺序"),
}
