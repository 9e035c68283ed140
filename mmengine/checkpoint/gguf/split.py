"""Opens a model that is split into several GGUF files, NAME-00001-of-0000N.gguf."""

from dataclasses import replace
from pathlib import Path

from mmengine.checkpoint.gguf.container import Container, StoredTensor, open_container
from mmengine.checkpoint.gguf.file_names import PartName, part_name
from mmengine.errors import ModelError

MAX_PARTS = 1000  # Maximum number of parts in a split model.
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


def part_files(path: Path) -> list[Path]:
    """Return the paths of all parts. `path` is the first part. The files need not exist."""
    name = part_name(path.name)
    if name.parts > MAX_PARTS or name.number != 1:
        return [path]
    return [path, *(path.with_name(name.of(index)) for index in range(2, name.parts + 1))]


def open_parts(path: Path) -> Container:
    """Open a GGUF file. If the file is the first part of a split model, also open the other parts.

    Returns the first part's metadata and all parts' tensors. Raises ModelError for a part that is missing,
    damaged or from another model.
    """
    first = open_container(path)
    name = part_name(path.name)
    count = first.fields.integer(_COUNT, 0, MAX_PARTS, 1)
    if count <= 1 and name.parts <= 1:
        return first
    _check_first(first, name, count)
    parts = [first]
    for index, file in enumerate(part_files(path)[1:], 2):
        if not file.is_file():
            raise ModelError(f"{file} is missing: {path.name} is part 1 of {count}; download it")
        parts.append(_open_part(file, index, count))
    return _joined(parts)


def _check_first(first: Container, name: PartName, count: int) -> None:
    number = first.fields.integer(_NUMBER, 0, MAX_PARTS, 0) + 1
    if number != 1 or name.number != 1:
        wanted = name.of(1) if name.parts > 1 else "the first"
        first.fields.fail(f"it is part {max(number, name.number)} of {max(count, name.parts)}; give {wanted}")
    if name.parts == 1:
        first.fields.fail(
            f"it is one of {count} parts, but its name does not end with -00001-of-{count:05}.gguf, so the "
            "other parts cannot be found; restore the names, or join the parts with llama-gguf-split --merge"
        )
    if name.parts != count:
        first.fields.fail(f"{_COUNT} is {count}, but the name says {name.parts} parts; download it again")


def _open_part(file: Path, index: int, count: int) -> Container:
    part = open_container(file)
    number, own = (part.fields.integer(key, 0, 2**16 - 1, 0) for key in (_NUMBER, _COUNT))
    if (number + 1, own) != (index, count):
        part.fields.fail(
            f"it is part {number + 1} of {own}, not part {index} of {count} as its name says; download it "
            "again"
        )
    return part


def _joined(parts: list[Container]) -> Container:
    first = parts[0]
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                part.fields.fail(
                    f"tensor {name} is in {tensors[name].path.name} too; download the parts again"
                )
            tensors[name] = tensor
    wanted = first.fields.integer(_TENSORS, 0, 2**20, len(tensors))
    if len(tensors) != wanted:
        first.fields.fail(
            f"its {len(parts)} parts have {len(tensors)} tensors, but {_TENSORS} is {wanted}; one of them is "
            "from another model: download them again"
        )
    return replace(first, tensors=tensors)
