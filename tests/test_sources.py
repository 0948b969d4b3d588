"""Source texts are strings: constants above an unchanged file."""

import pytest

from cupyfa import Limits, Problem, planning, sources
from cupyfa.ladder import LADDER

LIMITS = Limits("a device", shared_bytes=65536)


def text(name="fa2", **sizes):
    problem = Problem.of_sizes(**({"M": 10, "d": 8} | sizes))
    return sources.text(planning.plan(LADDER["forward"][name], problem, LIMITS).launches[0])


def test_the_text_is_typed_constants_above_the_unchanged_file():
    file = (sources.KERNELS / "forward" / "fa2.cu").read_text()
    head, found, tail = text(dtype="float16", causal=True).partition(file)
    assert found
    assert head.splitlines() == [
        "#include <cuda_fp16.h>",
        "using scalar = __half;",
        "using real = float;",
        "constexpr int Br = 128;",
        "constexpr int Bc = 32;",
        "constexpr int d = 8;",
        "constexpr int dv = 8;",
        "constexpr bool causal = true;",
        "constexpr int threads = 128;",
        "constexpr int shared_bytes = 23552;",
        '#line 1 "kernels/forward/fa2.cu"',
    ]
    assert tail.strip().startswith("// headers: ")


def test_one_text_serves_all_lengths_batches_and_alignments():
    sizes = [
        {"causal": True},
        {"causal": "top-left", "M": 100, "N": 7, "batch": 3, "heads": 4, "kv_heads": 2, "scale": 2},
    ]
    assert len({text(**size) for size in sizes}) == 1


@pytest.mark.parametrize("change", [{"d": 9}, {"dv": 9}, {"dtype": "float64"}, {"causal": True}])
def test_what_is_compiled_in_changes_the_text(change):
    assert text(**change) != text()


def test_a_changed_header_changes_the_text(tmp_path, monkeypatch):
    before = text()
    for file in sources.INCLUDE.glob("*.cuh"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "math.cuh").write_text("// another\n" + (tmp_path / "math.cuh").read_text())
    monkeypatch.setattr(sources, "INCLUDE", tmp_path)
    assert text() != before
