"""Pre-tokenizers by their GGUF names (`tokenizer.ggml.pre`), each as in the tokenizer.json of the model that
the name was introduced for.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split before BPE merges. `pattern`: the pieces' pattern, "" for GPT-2's own.
    `ignore_merges`: a piece that is a token becomes that token, whatever its merges. `adds_bos`: default for
    files that do not tell.
    """

    pattern: str = ""
    single_digits: bool = False
    normalizes: bool = False  # To NFC.
    ignore_merges: bool = False
    adds_bos: bool = False

    def as_json(self) -> dict[str, object]:
        """Return the pre-tokenizer's entry in tokenizer.json."""
        steps: list[dict[str, object]] = []
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern:
            steps.append(_split(self.pattern))
        steps.append(byte_level(use_regex=not self.pattern))
        return {"type": "Sequence", "pretokenizers": steps}


def byte_level(use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> str:
    """Return the pattern for contractions, letters with one character before them, numbers, the rest of a
    line, spaces.
    """
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_QWEN2 = PreTokenizer(_words(r"\p{N}"), normalizes=True)
_LLAMA3 = PreTokenizer(_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_SMOLLM = PreTokenizer(single_digits=True)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
}
