"""Decodes token ids for `mmengine log` commands, with a tokenizer that the user names."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mmengine.errors import ModelError

TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="Model folder or tokenizer.json; token ids are printed with their text.",
        show_default=False,
    ),
]


def decoder_of(path: Path) -> Callable[[Sequence[int]], str]:
    """Return a function that maps token ids to text. Raises ModelError if `path` has no readable
    tokenizer.
    """
    from mmengine.checkpoint.files import read_json  # Lazy: only --tokenizer needs these modules.
    from mmengine.processing.chat.tokenizer_builder import build_tokenizer, check_tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    data = read_json(file)
    try:
        check_tokenizer(data)
        tokenizer = build_tokenizer(json.dumps(data))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ModelError(f"{file} is not a readable tokenizer: {str(error)[:200]}") from None
    size = tokenizer.get_vocab_size()

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode([token for token in tokens if 0 <= token < size], skip_special_tokens=False)

    return decode
