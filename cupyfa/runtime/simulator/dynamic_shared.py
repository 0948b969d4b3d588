"""Gives ``extern __shared__ float x[];`` in a kernel's text the place of its block's memory.

To a host compiler that is an array of another object. All such arrays get one name for the linker,
and the kernel is linked with an object that has thread-local memory of this name, so that every
worker has its own.
"""

import re

CAPACITY = 227 * 1024  # bytes that a block can have, as on an H100

# Gives the runtime the addresses of the calling worker's memory.
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
    """The text with each such declaration naming that memory; every line keeps its number."""
    return _TOKEN.sub(_placed_token, text)


def memory(text: str) -> str:
    """The source of the object with the memory, for a text in which arrays have been placed.

    It lies behind the kernel's own __shared__ variables, whose end another symbol marks. In a
    template g++ forgets the linker's name, and asks for the array's.
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
    # The memory is aligned as strictly as any type asks for.
    bare = _ALIGNMENT.sub(" ", re.sub(r"\b(?:extern|__shared__)\b", " ", statement))
    if not re.search(r"\w\s*\[\s*\]", bare):
        return token[0]
    declared = " ".join(bare.rstrip(";").split())
    lines = "\n" * statement.count("\n")
    return f'extern __thread {declared} __asm__("simulator_dynamic");{lines}'
