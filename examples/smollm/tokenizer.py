"""Text to tokens and back: a byte-level BPE tokenizer, built from the fields of a GGUF file."""

from collections.abc import Mapping
from typing import Any

CONTROL = 3  # token type of <|im_start|>, <|im_end|> and others that structure a chat
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Encodes text as numbers of tokens, and decodes them. end: the token that ends an answer."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        names = ("tokens", "token_type", "merges", "eos_token_id")
        tokens, kinds, merges, self.end = (fields[f"tokenizer.ggml.{x}"].contents() for x in names)
        pairs = [tuple(pair.split(" ")) for pair in merges]
        self.coder = Tokenizer(models.BPE({x: i for i, x in enumerate(tokens)}, pairs))
        # What the file calls the pre-tokenizer "smollm": each digit is a word, then words of GPT-2.
        words = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.coder.pre_tokenizer = pre_tokenizers.Sequence([*words])
        self.coder.decoder = decoders.ByteLevel()
        self.coder.add_special_tokens([x for x, kind in zip(tokens, kinds) if kind == CONTROL])

    def encode(self, text: str) -> list[int]:
        return list(self.coder.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.coder.decode(tokens, skip_special_tokens=True))

    def chat(self, question: str, system: str = SYSTEM) -> list[int]:
        """Encodes a question by the chat template of the file, up to where the answer begins."""
        turns = ("system", system), ("user", question)
        text = "".join(f"<|im_start|>{who}\n{words}<|im_end|>\n" for who, words in turns)
        return self.encode(f"{text}<|im_start|>assistant\n")
