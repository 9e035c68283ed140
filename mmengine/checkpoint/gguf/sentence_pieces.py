"""Builds fields of tokenizer.json for a GGUF file with SentencePiece's BPE (tokenizer.ggml.model "llama").
Such a file stores scores of tokens instead of merges. Characters without a token become byte tokens, such as
`<0x0A>`.
"""

from collections.abc import Sequence

NORMAL, UNKNOWN = 1, 2  # Token types.
SPACE = "\u2581"  # Tokens contain this character instead of a space.
_LONGEST = 128  # Maximum number of characters in a joined token; SentencePiece's default maximum is 16.


def sentence_piece_parts(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, adds_space: bool
) -> dict[str, object]:
    """Return the fields `normalizer`, `pre_tokenizer`, `decoder` and `model` of tokenizer.json. `adds_space`:
    whether encoding puts a space before the text, and decoding removes it.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    prefix = {"type": "Prepend", "prepend": SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prefix, spaces]} if adds_space else spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": merges_of(tokens, types, scores),
        },
    }


def merges_of(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of normal tokens that join to a normal token, by descending score of the joined token.
    Tokens longer than _LONGEST are not split, because the time grows with the square of a token's length.
    """
    score_of = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL
    }
    found = [
        (-score, -cut, token)
        for token, score in score_of.items()
        for cut in range(1, len(token) if len(token) <= _LONGEST else 0)
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    return [(token[:-cut], token[-cut:]) for _, cut, token in sorted(found)]
