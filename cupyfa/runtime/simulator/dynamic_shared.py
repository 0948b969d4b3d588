"""Maps ``extern __shared__ float x[];`` in a kernel's source to the shared memory of its block.

A host compiler expects such an array in another object file. All of these arrays share one linker
symbol, and the kernel is linked with an object that defines the symbol as thread-local memory, so
that every worker thread has a copy.
"""

import re

CAPACITY = 227 * 1024  # bytes of shared memory per block, as on an H100

# Code that passes the addresses of the calling worker's shared memory to the runtime.
LOCATOR = """\
extern __thread unsigned char end_of_fixed[] __asm__("simulator_fixed_end");
extern __thread unsigned char start_of_dynamic[] __asm__("simulator_dynamic");
extern "C" __attribute__((visibility("default")))
void simulator_locate(unsigned char** places) {
  places[0] = end_of_fixed;
  places[1] = start_of_dynamic;
}
"""

_TOKEN = re.compile(
    r"""
    (?P<skipped> ^[ \t]*\#(?:[^\n\\]|\\.)* | //[^\n]* | /\*.*?\*/
        | "(?:\\.|[^"\\\n])*" | (?<!\w)'(?:\\.|[^'\\\n])*')
    | (?P<statement> \b(?:extern|__shared__)\b[^;{}\#"'=]*;)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ALIGNMENT = re.compile(
    r"\b(?:__align__|alignas|__attribute__)\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
)
_PLACED = re.compile(r'(\w+) ?\[ ?\][^;"]* __asm__\("simulator_dynamic"\);')


def placed(text: str) -> str:
    """Rewrites each ``extern __shared__`` declaration of a source; keeps line numbers."""
    return _TOKEN.sub(_placed_token, text)


def memory(text: str) -> str:
    """Returns the source of the object that defines a rewritten kernel's dynamic shared memory.

    The memory follows the kernel's static __shared__ variables, whose end another symbol marks. In
    templates g++ ignores the linker symbol and refers to an array by its name, so the object
    defines these names, too.
    """
    symbol = ".weak {0}; .hidden {0}; .type {0}, @object; .size {0}, {1}\n{0}:\n"
    names = ["simulator_dynamic", *sorted(set(_PLACED.findall(text)))]
    assembly = (
        '.section .tbss.simulator_end,"awT",@nobits\n'
        f"{symbol.format('simulator_fixed_end', 1)}.zero 1\n"
        '.section .tbss.simulator_memory,"awT",@nobits\n.balign 1024\n'
        f"{''.join(symbol.format(name, CAPACITY) for name in names)}.zero {CAPACITY}\n.text"
    )
    return f'__asm__(R"(\n{assembly}\n)");\n'


def _placed_token(token: re.Match[str]) -> str:
    statement = token["statement"]
    if not statement or not all(word in statement for word in ("extern", "__shared__")):
        return token[0]
    # Alignment specifiers can be dropped, since the memory has the strictest alignment of any type.
    bare = _ALIGNMENT.sub(" ", re.sub(r"\b(?:extern|__shared__)\b", " ", statement))
    if not re.search(r"\w\s*\[\s*\]", bare):
        return token[0]
    declared = " ".join(bare.rstrip(";").split())
    lines = "\n" * statement.count("\n")
    return f'extern __thread {declared} __asm__("simulator_dynamic");{lines}'
