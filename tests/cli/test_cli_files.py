"""Tests options whose value is a pipe, a device, a folder or a socket instead of a file."""

import os
import socket
import threading
from pathlib import Path

import pytest

from mmengine import bounded_files
from mmengine.bounded_files import read_bounded
from mmengine.cli.extract import Extraction
from mmengine.cli.logs.redact import _key_in
from mmengine.cli.run_options import Question
from mmengine.cli.schema_reports import CheckOptions, check_all
from mmengine.cli.serve_config import read_config
from mmengine.cli.serve_options import _template
from mmengine.errors import ConfigError, InvalidRequest, ModelError
from mmengine.processing.chat.template import _find_source
from mmengine.server.http.auth import ApiKeys

OPTIONS: CheckOptions = {"bounds": None, "strict": False, "strict_keywords": False}


def schema_check(path):
    (checked,) = check_all([path], "llguidance", None, OPTIONS)
    if checked.report is None:
        raise InvalidRequest(checked.error)


READERS = {
    "--api-key-file": ApiKeys,
    "--chat-template": _template,
    "--config": lambda path: read_config(None, path),
    "--schema": lambda path: Question(schema=path).response_format(),
    "extract --schema": lambda path: Extraction([], path, path).schema_text(),
    "schema check": schema_check,
    "log redact --key": _key_in,
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_without_waiting(tmp_path, monkeypatch, name):
    """/dev/zero never ends, and opening a pipe without a writer blocks."""
    monkeypatch.setattr(bounded_files, "PIPE_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "socket", tmp_path / "none"):
            with pytest.raises((ConfigError, InvalidRequest)):
                READERS[name](path)
        if name != "schema check":  # `schema check` accepts a folder.
            with pytest.raises((ConfigError, InvalidRequest), match="irectory"):
                READERS[name](tmp_path)


def test_a_pipe_that_is_written_is_read(tmp_path):
    """All keys in a pipe are read, as for `--api-key-file <(command)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        with pipe.open("wb", buffering=0) as file:
            for piece in (b"first\n", b"second\n"):
                file.write(piece)

    writer = threading.Thread(target=write)
    writer.start()
    keys = ApiKeys(pipe)
    writer.join()
    assert all(keys.owner_of({b"x-api-key": key}) for key in (b"first", b"second"))


def test_the_limit_is_exact(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    assert read_bounded(path, 100) == bytes(100)
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_bounded(path, 99)


def test_a_huge_template_of_a_checkpoint_is_not_read(tmp_path):
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match="more than 1,048,576 bytes"):
        _find_source(tmp_path)
