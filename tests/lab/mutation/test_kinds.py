"""What each kind of fault replaces in a file, and by which code."""

import pytest

from cupyfa.lab.mutation.kinds import KINDS, changes

BARRIER = "void f() { load(x); __syncthreads(); }"
MULTIPLY = "float f(float a, float b) { return a * b; }"
# Statements in a function, and the mutants of a kind: (old, new).
MUTANTS = [
    ("synchronization left out", "__syncthreads();", [("__syncthreads();", ";")]),
    ("synchronization left out", "::wait(full[s], p);", [("::wait(full[s], p);", ";")]),
    ("synchronization left out", "cp_async_wait_group<0>();", [("cp_async_wait_group<0>();", ";")]),
    ("synchronization left out", "if (all) pipe.release(at);", [("pipe.release(at);", ";")]),
    ("synchronization left out", "const bool is = wait(x); load(y);", []),
    ("atomic made plain", "atomicAdd(p + i, v);", [("atomicAdd(p + i, v);", "*(p + i) += (v);")]),
    ("atomic made plain", "old = atomicAdd(p, v);", []),
    ("stage or phase off by one", "f(K[at.stage]);", [("at.stage", "at.stage + 1")]),
    ("stage or phase off by one", "f(phase);", [("phase", "phase ^ 1")]),
    ("stage or phase off by one", "f(i % stages);", [("i % stages", "(i + 1) % stages")]),
    ("stage or phase off by one", "stage = 0;", []),
    ("stage or phase not advanced", "at.phase ^= 1;", [("at.phase ^= 1;", ";")]),
    ("stage or phase not advanced", "++stage;", [("++stage;", ";")]),
    ("bound off by one", "f(a < b);", [("a < b", "a <= b")]),
    ("bound off by one", "f<a>(b);", []),
    ("test left out", "f(a && b);", [("a && b", "a"), ("a && b", "b")]),
    ("test left out", "x = a ? b : c;", [("a", "true")]),
    ("test left out", "if (a) return;", [("a", "false")]),
    ("test left out", "if (a) b();", [("a", "true")]),
    ("clamp left out", "f(max(0, a));", [("max(0, a)", "0"), ("max(0, a)", "a")]),
    (
        "position off by one",
        "f(x.kv_end(row));",
        [("x.kv_end(row)", "x.kv_end(row) + 1"), ("x.kv_end(row)", "x.kv_end(row) - 1")],
    ),
    ("position off by one", "x.sees(a, key);", [("key", "key + 1"), ("key", "key - 1")]),
    ("position off by one", "f(a, key);", []),
    ("wrong index", "K.row(kv_head);", [("kv_head", "0"), ("kv_head", "kv_head + 1")]),
    ("wrong index", "K.row(heads);", []),
    ("indices swapped", "K.row(batch, head);", [("K.row(batch, head)", "K.row(head, batch)")]),
    ("factor left out", "f(a * b);", [("a * b", "a"), ("a * b", "b")]),
    ("factor left out", "f(a / b);", [("a / b", "a")]),
    ("factor left out", "f(8 * b, x[a * b]);", []),
    ("factor left out", "constexpr int n = a * b;", []),
    ("factor left out", "f<a * b>(); float x[a * b];", []),
    ("wrong sign", "f(a - b, -c);", [("a - b", "a + b"), ("-c", "c")]),
    ("term left out", "f(dP - delta, a - 1);", [("dP - delta", "dP")]),
    ("sum or maximum left out", "softmax.raise(x);", [("softmax.raise(x);", ";")]),
    ("sum or maximum left out", "sums[i] *= factor;", [("sums[i] *= factor;", ";")]),
    ("reduction left out", "x = warp_max(x);", [("warp_max(x)", "x")]),
    (
        "initialization left out",
        "float a[2] = {}, b = c, d = -infinity;",
        [("float a[2] = {}, b = c, d = -infinity;", "float a[2], b = c, d;")],
    ),
    ("initialization left out", "O[i] = real(0);", [("O[i] = real(0);", ";")]),
    ("initialization left out", "const int a = 0; auto b = 0; c = 2 * d;", []),
    ("initialization left out", "for (int i = 0; i < 4;) f(i);", []),
    ("option left out", "p = x.dropped(p, row, key);", [("x.dropped(p, row, key)", "p")]),
    ("option left out", "if constexpr (has_sink) f();", [("has_sink", "false")]),
    (
        "option applied twice",
        "p = x.dropped(p, 1);",
        [("x.dropped(p, 1)", "x.dropped(x.dropped(p, 1), 1)")],
    ),
    (
        "option applied twice",
        "apply_sink(x);",
        [("apply_sink(x);", "{ apply_sink(x); apply_sink(x); }")],
    ),
]


def mutants(code):
    """Returns (kind, old, new) of every change."""
    return [(x.kind, code[x.start : x.end], x.new) for x in changes(code.encode())]


@pytest.mark.parametrize("kind, statement, expected", MUTANTS, ids=[x[1] for x in MUTANTS])
def test_a_kind_has_these_mutants(kind, statement, expected):
    found = mutants(f"__device__ void f() {{ {statement} }}")
    assert [(old, new) for of, old, new in found if of == kind] == expected


def test_every_kind_is_tested():
    assert {kind for kind, _, expected in MUTANTS if expected} == set(KINDS)


def test_default_values_of_members_are_left_out():
    found = mutants("struct State { int stage = 0, phase = 0; };")
    assert found == [("initialization left out", "int stage = 0, phase = 0;", "int stage, phase;")]


def test_code_that_does_not_run_on_the_device_is_not_changed():
    assert not mutants("static_assert(a * b < c); using T = Tile<a * b>; int x[a * b];")
    assert not mutants("void f() { timeline::event(timeline::tile, first_key, row); }")
    assert not mutants("#define TWICE(x) (x * y)\n// a * b < c\n")


@pytest.mark.parametrize(
    "code, expected",
    [
        (BARRIER, "trap(); __syncthreads();"),
        ("void f() { for (;;) __syncthreads(); }", "{ trap(); __syncthreads(); }"),
        (MULTIPLY, "(trap(), a * b)"),
        ("void f() { for (;;) x.arrive(T{}); }", "{ trap(); x.arrive(T{}); }"),
    ],
)
def test_a_probe_runs_the_same_code_after_a_trap(code, expected):
    first, *_ = changes(code.encode())
    assert first.probe.format(trap="trap") == expected


def test_characters_of_several_bytes_move_no_place():
    code = f"// Q Kᵀ × V\n{BARRIER}"
    (change,) = changes(code.encode())
    assert code.encode()[change.start : change.end] == b"__syncthreads();"
