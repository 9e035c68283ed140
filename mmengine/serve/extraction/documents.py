"""Finds the documents for an extraction: pictures and PDF documents."""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from mmengine.errors import InvalidRequest

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PDF = ".pdf"
# Marks an extraction's work folder, which is not searched for documents.
MANIFEST = "extract.json"


class Document(msgspec.Struct, frozen=True):
    """A document. `name`: the path as given, which is also shown in the table."""

    name: str
    size: int = 0
    mtime_ns: int = 0
    error: str = ""

    @property
    def path(self) -> Path:
        return Path(self.name)

    @property
    def is_pdf(self) -> bool:
        return self.path.suffix.lower() == PDF


def find_documents(paths: Iterable[Path], max_bytes: int) -> list[Document]:
    """Return the documents in `paths`, without duplicates. A folder's files are sorted by name. A file that
    cannot be used has an `error`. Raises InvalidRequest for a missing path, and if `paths` contain no
    document.
    """
    given = list(paths)
    found: dict[str, Document] = {}
    for path in given:
        if not path.exists():
            raise InvalidRequest(f"{path}: no such file or folder")
        for each in _files_in(path) if path.is_dir() else (path,):
            found.setdefault(os.path.abspath(each), _document(each, max_bytes))
    if not found:
        shown = ", ".join(str(path) for path in given[:3])
        raise InvalidRequest(
            f"{shown}: there is no document with a supported format ({', '.join((*PICTURES, PDF))})"
        )
    return list(found.values())


def _files_in(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if MANIFEST in names:
            folders.clear()
            continue
        folders.sort()
        for name in sorted(names):
            if os.path.splitext(name)[1].lower() in (*PICTURES, PDF):
                yield Path(place, name)


def _document(path: Path, max_bytes: int) -> Document:
    try:
        name = os.fspath(path)
        name.encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode(errors="replace")
        return Document(name, error="the file name is not valid UTF-8; rename the file")
    try:
        found = path.stat()
    except OSError as error:
        return Document(name, error=f"the file cannot be read: {error.strerror}")
    if not stat.S_ISREG(found.st_mode):
        return Document(name, error="the document is not a regular file")
    document = Document(name, found.st_size, found.st_mtime_ns)
    if path.suffix.lower() not in (*PICTURES, PDF):
        text = f"the file's name does not end in {', '.join((*PICTURES, PDF))}"
        return msgspec.structs.replace(document, error=text)
    if found.st_size > max_bytes:
        text = f"the file has {found.st_size:,} bytes; the limit is {max_bytes:,} (--max-bytes)"
        return msgspec.structs.replace(document, error=text)
    return document
