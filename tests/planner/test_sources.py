"""Source texts of launches: constants prepended to an unchanged file."""

import re
import shutil
from dataclasses import replace

import pytest

from cupyfa import Limits, Problem
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning, cuda_source, includes, source as sources

LIMITS = Limits("a device", shared_bytes=65536)
HOPPER = Limits("another", shared_bytes=227 * 1024, arch="90")


def text(name="fa2", **sizes):
    problem = Problem.of_sizes(**({"M": 10, "d": 8} | sizes))
    return sources.text(planning.plan(LADDER["forward"][name], problem, LIMITS).launches[0])


def test_the_text_is_typed_constants_above_the_unchanged_file():
    file = (sources.KERNELS / "forward" / "fa2.cu").read_text(encoding="utf-8")
    head, found, tail = text(dtype="float16", causal=True).partition(file)
    assert found
    assert head.splitlines() == [
        "#include <cuda_fp16.h>",
        "using scalar = __half;",
        "using operand = __half;",
        "using result = __half;",
        "using real = float;",
        "constexpr int Br = 128;",
        "constexpr int Bc = 32;",
        "constexpr int d = 8;",
        "constexpr int dv = 8;",
        "constexpr bool causal = true;",
        "constexpr bool windowed = false;",
        "constexpr bool has_mask_mod = false;",
        "constexpr bool ragged = false;",
        "constexpr bool packed = false;",
        "constexpr int threads = 128;",
        "constexpr int shared_bytes = 23552;",
        "struct Mods {};",
        '#line 1 "kernels/forward/fa2.cu"',
    ]
    assert tail.strip().startswith("// headers: ")


EXTENDED = [{"mask_mod": "key > 2"}, {"scale": -1.0}, {"dropout": 0.5, "dropout_seed": 1}]


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (5, 2)}, *EXTENDED], ids=str)
def test_headers_of_plain_problems_are_replaced_where_a_problem_needs_more(options):
    problem = Problem.of_sizes(M=10, d=8, **options)
    inlined = sources.inlined(planning.plan(LADDER["forward"]["fa2"], problem, LIMITS).launches[0])
    for header in ("attention/batch.cuh", "attention/score.cuh", "attention/score_context.cuh"):
        assert (f"// ---- kernels/with/{header}" in inlined) == (options in EXTENDED)
        assert (f"// ---- kernels/include/{header}" in inlined) == (options not in EXTENDED)


def test_a_header_that_replaces_another_has_its_functions_and_types():
    defined = re.compile(
        r"^(?:struct|using|__device__[^;{=]*?) ?(\w+)(?:\(| =| [:{]|;)", re.MULTILINE
    )
    for path in sources.WITH.rglob("*.cuh"):
        plain = next(
            (
                x / path.relative_to(sources.WITH)
                for x in (sources.INCLUDE, sources.KERNELS)
                if (x / path.relative_to(sources.WITH)).exists()
            ),
            None,
        )
        if plain:
            assert set(defined.findall(plain.read_text())) <= set(defined.findall(path.read_text()))


@pytest.mark.parametrize("given", [{"mask_mod": "key > 2"}, {"score_mod": "score + key"}], ids=str)
def test_texts_of_scores_and_masks_are_declared_together(given):
    # A branch that is discarded at compile time may still use either function.
    made = text(**given)
    assert " score_mod(" in made and " mask_mod(" in made


def test_a_launch_is_compiled_once_for_all_constants_that_it_does_not_name():
    problems = [Problem.of_sizes(M=10, d=d, dv=24, dtype="float16", causal=d > 8) for d in (8, 40)]
    kernel = LADDER["backward"]["columns"]
    delta, _, columns, _ = zip(*(planning.plan(kernel, p, HOPPER).launches for p in problems))
    assert columns[0].constants["causal"] != columns[1].constants["causal"]
    assert len({sources.text(launch) for launch in columns}) == 2
    assert len({sources.text(launch) for launch in delta}) == 1


@pytest.mark.parametrize(
    "code, named",
    [
        ("int x = Br;", True),
        ('#include "helper.h"', True),
        ('// as many as Br\n/* Br,\nBr */ const char *x = "Br", *y = "\\"Br";', False),
        ("/* see https://x */ int x = Br;", True),
        ('char x[] = "a//b", y = \'"\'; int z = Br;', True),
        ('#define HELPER "helper.h"\n#include HELPER', True),
        ("#define ROWS(name) name##r\nint x = ROWS(B);", True),
    ],
)
def test_a_text_has_only_the_constants_that_it_names(tmp_path, code, named):
    (tmp_path / "own.cu").write_text(code)
    (tmp_path / "helper.h").write_text("int x = Br;")
    launch = planning.plan(LADDER["forward"]["fa2"], Problem.of_sizes(M=10, d=8), LIMITS).launches[
        0
    ]
    made = sources.text(replace(launch, path=tmp_path / "own.cu"))
    assert ("constexpr int Br = " in made) == named


def test_one_text_serves_all_lengths_batches_and_alignments():
    sizes = [
        {"causal": True},
        {"causal": "top-left", "M": 100, "N": 7, "batch": 3, "heads": 4, "kv_heads": 2, "scale": 2},
    ]
    assert len({text(**size) for size in sizes}) == 1


@pytest.mark.parametrize("change", [{"d": 9}, {"dv": 9}, {"dtype": "float64"}, {"causal": True}])
def test_compiled_in_options_change_the_text(change):
    assert text(**change) != text()


def test_a_changed_header_changes_the_text(tmp_path, monkeypatch):
    before = text()
    shutil.copytree(sources.INCLUDE, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(sources, "INCLUDE", tmp_path)
    assert text() == before
    for name, matters in [
        ("tile/math.cuh", True),
        ("ptx/wmma.cuh", False),
    ]:  # fa2 uses no tensor cores
        (tmp_path / name).write_text("// another\n" + (tmp_path / name).read_text())
        assert (text() != before) == matters
        before = text()


OWN = {
    "own.cu": '#include <tile/tensor.cuh>\n  # include "helper.h"\n#include <missing.h>\n',
    "helper.h": "#pragma once\n#include <sub/x.cuh>\n",
    "sub/x.cuh": '#include "y.inc"\n#include "../helper.h"\n',
    "sub/y.inc": "constexpr int beside_x = 1;\n",
    "unused.cuh": "",
}


@pytest.mark.parametrize("changed", OWN)
def test_a_changed_file_of_a_users_kernel_changes_its_text(tmp_path, changed):
    (tmp_path / "sub").mkdir()
    for name, content in OWN.items():
        (tmp_path / name).write_text(content)
    fa2 = LADDER["forward"]["fa2"]
    launch = planning.plan(fa2, Problem.of_sizes(M=10, d=8), LIMITS).launches[0]
    launch = replace(launch, path=tmp_path / "own.cu")
    before = sources.text(launch)
    (tmp_path / changed).write_text(OWN[changed] + "// changed\n")
    assert (sources.text(launch) != before) == (changed != "unused.cuh")


def digest(text, folders):
    return includes.digest(includes.reached(text, folders))


def test_cyclic_includes_are_read_once(tmp_path):
    for one, other in ("ab", "ba"):
        (tmp_path / one).mkdir()
        text = f'#pragma once\n#include "../{other}/{other}.cuh"\n'
        (tmp_path / one / f"{one}.cuh").write_text(text)
    found = includes.reached("#include <a/a.cuh>", [tmp_path.resolve()])
    assert [path.name for path in found] == ["a.cuh", "b.cuh"]


def test_a_digest_uses_the_include_order_of_the_compiler(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        (folder / "sub").mkdir(parents=True)
        (folder / "x.cuh").write_text(str(folder))
    (folders[0] / "folder.cuh").mkdir()
    (folders[0] / "nowhere.cuh").symlink_to(tmp_path / "missing")
    one, other = (digest("#include <x.cuh>", [folder]) for folder in folders)
    assert one != other
    assert digest('#include "x.cuh"', folders) == one
    assert digest("#include <x.cuh>", folders[::-1]) == other
    nothing = digest("", folders)
    assert digest("#include <folder.cuh>\n#include <nowhere.cuh>", folders) == nothing
    (folders[1] / "folder.cuh").write_text("found in the next folder")
    assert digest("#include <folder.cuh>", folders) != nothing
    # With quotes, a file next to the including file is found first.
    (folders[1] / "sub" / "a.cuh").write_text('#include "x.cuh"')
    before = digest("#include <sub/a.cuh>", folders)
    (folders[1] / "sub" / "x.cuh").write_text("nearer")
    assert digest("#include <sub/a.cuh>", folders) != before


@pytest.mark.parametrize("name", ["fa2", "mma_async", "wgmma"])
@pytest.mark.parametrize("options", [{}, {"score_mod": "score + key", "causal": True}], ids=str)
def test_an_inlined_text_has_the_same_machine_code(name, options):
    compiler = pytest.importorskip("cupyfa.runtime.cuda.compiler")
    kernel = LADDER["forward"][name]
    sizes = {"M": 100, "N": 100, "d": 64, "dtype": kernel.dtypes[0]}
    plan = planning.plan(kernel, Problem.of_sizes(**sizes, **options), HOPPER)
    for launch in plan.programs:
        texts = {
            sources.text(launch): sources.include_folders(launch),
            sources.inlined(launch): (),
        }
        arch = launch.target or "90"
        made = [compiler.compile_text(x, "x.cu", arch, y, log=False)[0] for x, y in texts.items()]
        assert made[0] == made[1]


def test_an_inlined_text_has_each_file_where_it_is_first_included(tmp_path):
    for name, content in {
        "a.cuh": '#pragma once\n#include "b.cuh"  // for b\nint a;\n',
        "b.cuh": "// b\n#include <a.cuh>\n  #  pragma once\nint b;",
    }.items():
        (tmp_path / name).write_text(content)
    text = '/*\n#include <b.cuh>\n*/\n#include <a.cuh>\n#include "b.cuh"\n#include <x.h>\nint c;\n'
    texts = {"host": "int d;", "c.cu": text}
    assert (
        includes.inlined(texts, [tmp_path], lambda path: path.name)
        == """// ---- host
int d;

// ---- c.cu
/*
#include <b.cuh>
*/
// ---- a.cuh
// ---- b.cuh
// b
int b;

// ---- a.cuh, continued
int a;

// ---- c.cu, continued
#include <x.h>
int c;
"""
    )


LONG = " + ".join(f"tanh(score * {i})" for i in range(9))


def test_a_long_text_is_a_function_that_kernels_call():
    """If hundreds of operations were inlined per pair of a tile, compiling would take minutes."""
    for text, how in ((LONG, "__noinline__ Score"), ("tanh(score)", "__forceinline__ Score")):
        p = Problem.of_sizes(M=64, N=64, d=16, score_mod=f"score + {text}")
        assert f"__device__ {how} score_mod(" in cuda_source.header(p)


def test_too_many_derivatives_by_elements_are_refused():
    sums = " + ".join(f"t[{i}] * score" for i in range(70))
    sizes = {"M": 64, "N": 99, "d": 16, "captured": {"t": "f32[99]"}}
    p = Problem.of_sizes(**sizes, score_mod=f"score + {sums}", wrt="t")
    with pytest.raises(ValueError, match="^wrt: the expressions read elements of t in 70 places"):
        cuda_source.header(p, taped=True)
