"""Tests that UTF-8 files may begin with a byte order mark, as editors on Windows write them."""

import codecs
import io
import json

from mmengine.cli.run_options import Question
from mmengine.cli.schema_reports import _schema_in
from mmengine.cli.serve_options import _template
from mmengine.processing.chat.template import _find_source
from mmengine.serve.batch.request_file import numbered_lines
from mmengine.server.http.auth import ApiKeys
from mmengine.simulation.bounded_files import lines, read_object
from mmengine.structured_output.json_schema.reading.loading import loads

SCHEMA = {"type": "integer"}


def marked(path, text):
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    return path


def test_the_first_api_key_is_known(tmp_path, monkeypatch):
    monkeypatch.delenv("MMENGINE_API_KEY", raising=False)
    keys = ApiKeys(marked(tmp_path / "keys", "first\nsecond\n"))
    assert all(keys.owner_of({b"x-api-key": key}) for key in (b"first", b"second"))


def test_a_template_gains_no_text(tmp_path):
    path = marked(tmp_path / "chat_template.jinja", "{{ messages }}")
    assert _template(path) == _find_source(tmp_path) == "{{ messages }}"


def test_schemas_are_read(tmp_path):
    path = marked(tmp_path / "schema.json", json.dumps(SCHEMA))
    assert loads(_schema_in(path)) == loads(path.read_bytes()) == read_object(path) == SCHEMA
    assert Question(schema=path).response_format()["json_schema"]["schema"] == path.read_bytes()[3:]


def test_the_first_line_of_requests_is_read(tmp_path):
    path = marked(tmp_path / "requests.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    expected = [b'{"prompt": "a"}', b'{"prompt": "b"}']
    assert [line for _, line in numbered_lines(io.BytesIO(path.read_bytes()))] == expected
    assert [line.strip() for _, line in lines(path, None)] == expected
