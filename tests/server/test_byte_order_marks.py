"""Tests that UTF-8 files may begin with a byte order mark, as editors on Windows write them."""

import codecs
import io
import json

import pytest

from mmengine.cli.run_options import Question
from mmengine.cli.schema_reports import _schema_in
from mmengine.cli.serve_options import _template
from mmengine.errors import InvalidRequest
from mmengine.processing.chat.template import ChatTemplate, _find_source
from mmengine.serve.batch.request_file import numbered_lines
from mmengine.serve.pooling.input_file import read_inputs
from mmengine.server.http.auth import ApiKeys
from mmengine.simulation.bounded_files import lines, read_object
from mmengine.structured_output.json_schema.reading.loading import loads
from tests.server.running import served

SCHEMA = {"type": "integer"}
UTF16 = "begins with the byte order mark of UTF-16; save it as UTF-8"


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


def test_the_first_input_of_embed_is_read(tmp_path):
    path = marked(tmp_path / "inputs.jsonl", '"a"\n"b"\n')
    assert [each.content for each in read_inputs(path)] == ["a", "b"]


def test_a_schema_and_a_template_in_a_text_may_have_a_mark():
    assert loads("\ufeff" + json.dumps(SCHEMA)) == SCHEMA
    plain, mark = (ChatTemplate(start + "{{ messages }}", {}, NoTokens(), "here") for start in ("", "\ufeff"))
    assert plain.source == mark.source


class NoTokens:
    marked = special = {}


def test_the_body_of_a_call_may_have_a_mark():
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    with served() as one:
        for path in ("/v1/chat/completions", "/tokenize"):
            assert one.call(path, codecs.BOM_UTF8 + body.encode())[0] == 200
        status, _, answer = one.call("/v1/chat/completions", body.encode("utf-16"))
        assert status == 400 and UTF16 in answer["error"]["message"]


def test_files_in_utf_16_are_named(tmp_path):
    path = tmp_path / "schema.json"
    path.write_bytes(json.dumps(SCHEMA).encode("utf-16"))
    for read in (_schema_in, read_object, lambda path: Question(schema=path).response_format()):
        with pytest.raises(InvalidRequest, match=UTF16):
            read(path)
