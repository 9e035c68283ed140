"""Parses GGUF file names, and picks files from a list by llama.cpp's rules. Finds the model for a tag, a
split model's parts, and the projector.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

SUFFIX = ".gguf"
DEFAULT_TAGS = ("Q4_K_M", "Q8_0")  # Tried in this order if the user names no tag.
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})", re.IGNORECASE | re.ASCII | re.DOTALL)
_TAG = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE | re.ASCII)
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


class PartName(NamedTuple):
    """A parsed file name. `prefix`: the name without suffix and part number. `number`: the part number, from
    1.
    """

    prefix: str
    number: int
    parts: int

    def of(self, number: int) -> str:
        return f"{self.prefix}-{number:05}-of-{self.parts:05}{SUFFIX}"


def part_name(name: str) -> PartName:
    """Parse a file's name into prefix, part number and number of parts. Both numbers are 1 for an unsplit
    file.
    """
    stem = name.removesuffix(SUFFIX)
    found = _SPLIT.fullmatch(stem)
    return PartName(found[1], int(found[2]), int(found[3])) if found else PartName(stem, 1, 1)


def num_bits(name: str) -> int:
    """Return the first number in the name's tag (`Q4_K_M`: 4, `BF16`: 16), or 0."""
    tag = _TAG.search(part_name(name).prefix)
    digits = re.search("[0-9]+", tag[1]) if tag else None
    return int(digits[0][:6]) if digits else 0


def is_model_name(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith(SUFFIX) and not any(word in name for word in _NO_MODELS)


def find_model(paths: Sequence[str], tag: str = "") -> str | None:
    """Return the first model whose path contains `tag` followed by "-" or ".", or None. Case is ignored.

    Without a tag, DEFAULT_TAGS are tried in order. If no model has such a tag, the first model is returned.
    For a split model, the result is the path of its first part.
    """
    models = [path for path in paths if is_model_name(path) and part_name(path).number == 1]
    for each in (tag,) if tag else DEFAULT_TAGS:
        pattern = re.compile(re.escape(each) + "[.-]", re.IGNORECASE)
        if found := next((path for path in models if pattern.search(path)), None):
            return found
    return next(iter(models), None) if not tag else None


def parts_of(paths: Sequence[str], model: str) -> list[str]:
    """Return the paths of the model's parts, in order. Parts that are not in the list are left out."""
    whole = part_name(model)
    if whole.parts <= 1:
        return [model]
    named = {path: part_name(path) for path in paths if path.endswith(SUFFIX)}
    alike = [path for path, part in named.items() if part[::2] == whole[::2]]
    return sorted(alike, key=lambda path: named[path].number)


def find_projector(paths: Sequence[str], model: str) -> str | None:
    """Return the projector for `model`, or None. Searches the model's folder and its parent folders.

    Prefers the deepest folder, then the tag with the nearest number of bits (`Q4_K_M`: 4), then the first
    path.
    """
    folders = model.split("/")[:-1]
    found, best = None, (0, 0)
    for path in paths:
        *own, name = path.split("/")
        if not name.endswith(SUFFIX) or "mmproj" not in name or own != folders[: len(own)]:
            continue
        rank = (-len(own), abs(num_bits(name) - num_bits(model)))
        if found is None or rank < best:
            found, best = path, rank
    return found
