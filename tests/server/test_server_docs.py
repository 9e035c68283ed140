"""Tests that docs/reference/http.md, the settings, the options and the OpenAPI document match the server."""

import json
import re
from dataclasses import fields

import jsonschema

from mmengine.cli.serve_options import Http, Kept, Limits, Loras, Media
from mmengine.server.app.adapter_routes import LOAD, UNLOAD
from mmengine.server.app.openapi import document
from mmengine.server.chat.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from mmengine.server.chat.field_tables import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from mmengine.server.messages.body import CountBody, MessagesBody
from mmengine.server.messages.field_table import COUNT_TOKENS, MESSAGES
from mmengine.server.responses.body import ResponsesBody
from mmengine.server.responses.field_table import RESPONSES
from mmengine.server.settings import ServerSettings
from tests.server.fields_page import PAGE, filled
from tests.server.running import served


def test_field_tables_match_the_code():
    assert PAGE.read_text() == filled(PAGE.read_text()), "python -m tests.server.fields_page"


def test_field_tables_are_complete_without_duplicates():
    for table, body in (
        (CHAT, ChatBody),
        (COMPLETION, CompletionBody),
        (RESPONSES, ResponsesBody),
        (MESSAGES, MessagesBody),
        (COUNT_TOKENS, CountBody),
        (TOKENIZE, TokenizeBody),
        (DETOKENIZE, DetokenizeBody),
    ):
        names = [field.name for field in table]
        assert len(names) == len(set(names))
        read = {field.name for field in table if field.how in ("taken", "translated")}
        assert read == set(body.__struct_fields__)


def test_settings_have_flags_and_flags_have_settings():
    # Each setting except served_model_names has a flag. The defaults of limits and media are the same, unless
    # a flag's default is None.
    values = {field.name: field.default for group in (Limits, Media) for field in fields(group)}
    values = {name: value for name, value in values.items() if value is not None}
    defaults = ServerSettings()
    assert values == {name: getattr(defaults, name) for name in values}
    flags = {field.name for group in (Limits, Http, Media, Kept, Loras) for field in fields(group)}
    assert set(ServerSettings.__struct_fields__) - flags == {"served_model_names"}


def test_the_openapi_document_is_one_and_names_what_is_taken():
    # The document lists the server's routes, and its ChatBody accepts the bodies that the server accepts.
    with served() as one:
        found = one.call("/openapi.json")[2]
        routes = {path.replace("{name:path}", "{name}") for path in one.app._known}
        asked = {"messages": [{"role": "user", "content": "hi"}], "stop": None, "user": "me", "n": 2}
        assert one.call("/v1/chat/completions", asked)[0] == 200
    assert found == json.loads(document())
    assert found["paths"].keys() == routes - {"/openapi.json"}
    schemas = found["components"]["schemas"]
    body = {"$ref": "#/components/schemas/ChatBody", "components": found["components"]}
    jsonschema.Draft202012Validator.check_schema(body)
    jsonschema.Draft202012Validator(body).validate(asked)
    for wrong in ({**asked, "guided_json": {}}, {**asked, "n": "a"}, {"stop": "a"}):
        assert not jsonschema.Draft202012Validator(body).is_valid(wrong)
    assert schemas["ChatBody"]["properties"].keys() == {field.name for field in CHAT}
    neutral = {field.name: field.neutral[0] for field in CHAT if field.neutral}
    jsonschema.Draft202012Validator(body).validate({**asked, **neutral, "guided_json": None})
    for path, methods in found["paths"].items():
        for method in methods.values():
            assert {"200", "405", "431", "500"} <= method["responses"].keys(), path


def test_the_openapi_document_allows_what_a_lenient_server_leaves_out():
    schemas = json.loads(document())["components"]["schemas"]
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    cases = (
        ("/v1/responses", "ResponsesBody", RESPONSES, {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", "MessagesBody", MESSAGES, messages),
    )
    with served() as one:
        for path, name, table, required in cases:
            optional = {field.name: {} for field in table if field.how == "optional"}
            body = {**required, **optional, "an_unknown_field": [1]}
            assert optional and one.call(path, body)[0] == 200
            schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
            jsonschema.Draft202012Validator(schema).validate(body)


def test_a_refused_method_is_answered_with_all_documented_methods():
    """Some paths have several methods, for example GET and POST of /v1/files. Adapter routes are skipped,
    because they check the admin key before the method.
    """
    paths = json.loads(document())["paths"].items()
    with served() as one:
        for path, methods in ((path, methods) for path, methods in paths if path not in (LOAD, UNLOAD)):
            status, headers, _ = one.call(re.sub(r"{\w+}", "0", path), method="OPTIONS")
            allowed = set(headers["allow"].split(", "))
            assert (status, allowed - {"HEAD"}) == (405, {name.upper() for name in methods} - {"HEAD"}), path
