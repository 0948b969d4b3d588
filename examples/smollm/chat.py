"""Answers questions with SmolLM2-135M-Instruct, without torch; docs/model.md explains how."""

import argparse
import sys

from generator import Generator, Request
from model import BACKENDS, Model
from numpy_layers import DTYPES
from tokenizer import Tokenizer
from weights import find, read

from cupyfa.runtime.cuda import device


def stream(generator: Generator, tokenizer: Tokenizer, requests: list[Request]) -> None:
    """Prints the first answer as it grows, then the others, and tokens per second."""
    first, printed, count = requests[0], 0, 0
    for count, (request, _) in enumerate(generator.run(), 1):
        text = tokenizer.decode(first.tokens[first.prompt :])
        if request is first and not text.endswith("\ufffd"):  # its last character is whole
            print(text[printed:], end="", flush=True)
            printed = len(text)
        elif request is not first and first not in generator.running.values():
            print(f"\r{count} tokens of all answers", end="", file=sys.stderr, flush=True)
    for request in requests[1:]:
        print(f"\n\n{tokenizer.decode(request.tokens[request.prompt :])}", end="")
    many = {"prefill": sum(x.prompt for x in requests), "decode": count - len(requests)}
    rates = (f"{x} {n} tokens, {n / generator.seconds[x]:,.0f} per second" for x, n in many.items())
    print("\n\n" + "; ".join(rates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("questions", nargs="+", metavar="QUESTION")
    add("--weights", metavar="FOLDER", help="where the GGUF file is  [$SMOLLM_WEIGHTS]")
    add("--new", type=int, default=200, help="most new tokens of an answer  [200]")
    add("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy  [0]")
    add("--seed", type=int, default=0, help="of sampling  [0]")
    add("--kernel", default="auto", help="of attention: a rung, or script.py:name  [auto]")
    add("--backend", choices=BACKENDS, help="[cuda, or numpy without a GPU]")
    add("--dtype", choices=DTYPES, help="[bfloat16, or float32 without a GPU]")
    add("--capacity", type=int, default=2048, help="most tokens of question and answer  [2048]")
    options = parser.parse_args()
    backend = options.backend or ("cuda" if device.unavailable() is None else "numpy")
    dtype = options.dtype or ("bfloat16" if backend == "cuda" else "float32")
    try:
        sizes, weights, fields = read(find(options.weights))
        model = Model(sizes, weights, dtype, backend, options.kernel)
        tokenizer, slots = Tokenizer(fields), min(64, len(options.questions))
        generator = Generator(model, slots, options.capacity, options.temperature, tokenizer.end)
        prompts = map(tokenizer.chat, options.questions)
        requests = [Request(x, options.new, options.seed + i) for i, x in enumerate(prompts)]
        for request in requests:
            generator.submit(request)
        stream(generator, tokenizer, requests)
    except (ArithmeticError, ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
