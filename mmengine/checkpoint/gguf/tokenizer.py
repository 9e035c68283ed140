"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary. Byte-level BPE and
SentencePiece's BPE (sentence_pieces.py) are supported.

Control tokens and user-defined tokens become added tokens in tokenizer.json. Padding tokens at the end of the
token list (`[PAD151646]`) are left out, so that no text is encoded to their ids.
"""

from dataclasses import dataclass

from mmengine.checkpoint.gguf.container import Container, StoredArray
from mmengine.checkpoint.gguf.sentence_pieces import sentence_piece_parts
from mmengine.errors import ModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split before BPE merges.

    `pattern`: a regular expression that matches one piece; "" for GPT-2's pattern. `ignore_merges`: whether a
    piece that equals a token becomes this token without merges. `adds_bos`: whether texts begin with BOS if
    the file has no add_bos_token.
    """

    pattern: str = ""
    single_digits: bool = False
    normalizes: bool = False  # Whether texts are normalised to NFC.
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


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Return a pattern for contractions, words, numbers, other characters and white space.

    `digits`: the pattern for numbers. `letters`: the character classes of letters. A word is a run of
    letters, with at most one other character before the run.
    """
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|"
        + digits
        + rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_QWEN2 = PreTokenizer(_words(r"\p{N}"), normalizes=True)
_QWEN35 = PreTokenizer(_words(r"\p{N}", r"\p{L}\p{M}"), normalizes=True)
_LLAMA3 = PreTokenizer(_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_SMOLLM = PreTokenizer(single_digits=True)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
}


_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # Token types; all others are BPE tokens.
_SPECIAL = (_UNKNOWN, _CONTROL)
_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # Keys for the ends of a text, a turn, a message.
# llama.cpp ends an answer at control tokens with these names, even if no key names them.
_END_NAMES = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
    )
    + ("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>")
    + ("<end_of_utterance>", "<eos>")
)


def tokenizer_json(container: Container) -> dict[str, object]:
    """Return tokenizer.json.

    Raises ModelError for an unsupported tokenizer, an unknown pre-tokenizer, duplicate tokens, and merges of
    strings that are not tokens.
    """
    is_spm = _is_sentence_piece(container)
    tokens, types = _tokens(container)
    added = [place for place, kind in enumerate(types) if kind in (*_SPECIAL, _USER_DEFINED)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(place, tokens[place], types[place] in _SPECIAL) for place in added],
        "post_processor": _begins_with(container, tokens) if _adds_bos(container) else None,
        **(_spm_parts if is_spm else _byte_level_parts)(container, tokens, types),
    }


def _spm_parts(container: Container, tokens: list[str], types: list[int]) -> dict[str, object]:
    scores = _array(container, "scores").as_numbers()
    if len(scores) < len(tokens):
        raise ModelError(f"{container.path}: it has {len(tokens)} tokens but {len(scores)} scores")
    adds_space = container.fields.flag(f"{_PREFIX}add_space_prefix", True)
    return sentence_piece_parts(tokens, types, scores[: len(tokens)], adds_space=adds_space)


def _byte_level_parts(container: Container, tokens: list[str], types: list[int]) -> dict[str, object]:
    pre = _pre_tokenizer(container)
    pieces = [place for place, kind in enumerate(types) if kind not in (*_SPECIAL, _USER_DEFINED)]
    num_pieces = 1 + max(pieces, default=-1)
    vocab = {token: place for place, token in enumerate(tokens[:num_pieces])}
    special = {token for token, kind in zip(tokens, types, strict=True) if kind in _SPECIAL}
    return {
        "normalizer": {"type": "NFC"} if pre.normalizes else None,
        "pre_tokenizer": pre.as_json(),
        "decoder": byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": _merges(container, vocab, special),
        },
    }


def tokenizer_config(container: Container) -> dict[str, object]:
    """Return tokenizer_config.json: special tokens, whether texts begin with BOS, and the chat template."""
    tokens, _ = _tokens(container)
    ids = token_ids(container)
    config: dict[str, object] = {
        f"{name}_token": tokens[ids[key]] for name, key in _NAMED.items() if key in ids
    }
    config["add_bos_token"] = _adds_bos(container)
    template = container.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def token_ids(container: Container) -> dict[str, int]:
    """Return the file's special token ids by key (`eos_token_id`, …).

    Raises ModelError for an id outside the vocabulary.
    """
    fields, last = container.fields, num_tokens(container) - 1
    names = dict.fromkeys((*_NAMED.values(), *_ENDS))
    return {
        name: fields.integer(_PREFIX + name, 0, last) for name in names if _PREFIX + name in fields.values
    }


def end_ids(container: Container) -> list[int]:
    """Return the ids of the tokens that end an answer: the ids under the file's keys in _ENDS, then control
    tokens with a name in _END_NAMES. An ordinary token with such a name does not end an answer: Qwen2.5 may
    write `</s>` in a text about HTML.
    """
    ids, (tokens, types) = token_ids(container), _tokens(container)
    named = [ids[name] for name in _ENDS if name in ids]
    if not named:
        return []
    known = [place for place, token in enumerate(tokens) if types[place] == _CONTROL and token in _END_NAMES]
    return list(dict.fromkeys((*named, *known)))


def token_id(container: Container, token: str) -> int:
    """Return a token's id. Raises ModelError if the vocabulary has no such token."""
    tokens = _array(container, "tokens").as_strings()
    if token not in tokens:
        container.fields.fail(f"{_PREFIX}tokens has no {token}, which images need; choose another file")
    return tokens.index(token)


def num_tokens(container: Container) -> int:
    """Return the length of the token list, including padding tokens: the number of embedding rows."""
    return _array(container, "tokens").count


def _is_sentence_piece(container: Container) -> bool:
    """Return True for SentencePiece's BPE and False for byte-level BPE. Raises ModelError for other
    tokenizers.
    """
    fields = container.fields
    model = fields.values.get(f"{_PREFIX}model")
    if model not in ("gpt2", "llama"):
        fields.fail(
            f"{_PREFIX}model is {repr(model)[:60]}; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece's BPE)"
        )
    return model == "llama"


def _pre_tokenizer(container: Container) -> PreTokenizer:
    fields = container.fields
    name = fields.values.get(f"{_PREFIX}pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        fields.fail(f"{_PREFIX}pre is {repr(name)[:60]}; supported are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _array(container: Container, name: str) -> StoredArray:
    value = container.metadata.get(_PREFIX + name)
    if not isinstance(value, StoredArray):
        raise ModelError(f"{container.path}: {_PREFIX}{name} is missing or not an array")
    return value


def _tokens(container: Container) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, without the padding tokens at the end."""
    tokens = _array(container, "tokens").as_strings()
    types = _array(container, "token_type").as_integers().tolist()
    if len(tokens) != len(types):
        raise ModelError(f"{container.path}: it has {len(tokens)} tokens but {len(types)} token types")
    for place, token in enumerate(tokens):
        if not token:
            tokens[place], types[place] = f"[EMPTY_{place}]", _UNUSED
        elif types[place] == _USER_DEFINED and token == f"[PAD{place}]":
            types[place] = _UNUSED
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{container.path}: {_PREFIX}tokens has a token twice; the file is damaged")
    while types and types[-1] == _UNUSED:
        tokens.pop()
        types.pop()
    return tokens, types


def _added(place: int, token: str, special: bool) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": place, "content": token, **flags, "special": special}


def _merges(container: Container, vocab: dict[str, int], special: set[str]) -> list[tuple[str, str]]:
    merges = []
    for text in _array(container, "merges").as_strings():
        left, _, right = text.partition(" ")
        joined = left + right
        if left not in vocab or right not in vocab or joined not in vocab or joined in special:
            raise ModelError(
                f"{container.path}: the merge {text[:60]!r} does not join "
                "two tokens to one; the file is damaged"
            )
        merges.append((left, right))
    return merges


def _adds_bos(container: Container) -> bool:
    fields = container.fields
    default = _is_sentence_piece(container) or _pre_tokenizer(container).adds_bos
    return fields.flag(f"{_PREFIX}add_bos_token", default) and f"{_PREFIX}bos_token_id" in fields.values


def _begins_with(container: Container, tokens: list[str]) -> dict[str, object]:
    bos = token_ids(container)["bos_token_id"]
    token = tokens[bos]
    first = [{"SpecialToken": {"id": token, "type_id": 0}}]
    text, pair = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*first, text],
        "pair": [*first, text, {"SpecialToken": {"id": token, "type_id": 1}}, pair],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }
