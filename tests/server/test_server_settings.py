"""Tests TLS, and the options of `mmengine serve` from flags, files and the environment."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import typer

from mmengine.cli.main import app
from mmengine.cli.serve_options import Fleet, server_settings
from mmengine.events.segment import segment_name
from mmengine.server.lifecycle import lifecycle
from mmengine.server.lifecycle.listening_socket import listen
from tests.cli.cli_process import call_cli
from tests.server.running import served

COMMANDS = typer.main.get_command(app).commands
# tests/fleet tests the options of --ray.
ELSEWHERE = ("help", "config", "first", *(field.name for field in fields(Fleet)))
OPTIONS = {each.opts[0]: each for each in COMMANDS["serve"].params if each.name not in ELSEWHERE}


@pytest.fixture
def started(monkeypatch):
    """Return a function that runs `mmengine serve` with fakes, and returns the values that the fakes got."""
    from mmengine.cli import serve

    kept = SimpleNamespace()

    def engine(model, log, config, progress, beats, loras):
        kept.model, kept.log, kept.config = model, log, config
        return "an engine"

    def serving(engine, settings, keys, names, bound, listening, media_fetcher, *given):
        kept.settings, kept.keys, kept.names = settings, keys, names
        listening()

    def groups(*given):
        kept.groups = given
        return server_settings(*given)

    def told(routers, log):
        kept.routers = routers
        return nullcontext()

    monkeypatch.setattr(serve, "_told", told)
    monkeypatch.setattr(serve, "_engine", engine)
    monkeypatch.setattr(serve, "check_tracing", lambda settings: None)  # OpenTelemetry may not be installed.
    monkeypatch.setattr(serve, "server_settings", groups)
    monkeypatch.setattr(lifecycle, "serve", serving)
    monkeypatch.setattr(lifecycle, "run", lambda found: None)

    def start(*arguments, **environment):
        import os

        given = {**os.environ, "MMENGINE_PORT": "0", **environment}
        ran = call_cli(
            "serve", *arguments, env={name: value for name, value in given.items() if value is not None}
        )
        assert ran.returncode == 0 and "serving" in ran.stderr, ran.stderr
        return kept

    return start


def test_serve_has_all_engine_options_of_run():
    run = {each.name: each for each in COMMANDS["run"].params}
    panel = [each.name for each in run.values() if getattr(each, "rich_help_panel", "") == "Model"]
    assert {"model", "device", "dtype", "setting", "spec", "tensor_parallel"} <= set(panel)
    assert set(panel) <= {each.name for each in OPTIONS.values()}


def other_values(tmp_path):
    """Return, for each flag, a value other than its default."""
    for name in ("keys", "template"):
        (tmp_path / name).write_text("a")
    given = {
        **dict.fromkeys(("--host", "--health-host"), "localhost"),
        "--health-port": 8002,
        "--port": 8001,
        "--served-model-name": ["one", "two"],
        **dict.fromkeys(("--api-key-file", "--admin-key-file"), tmp_path / "keys"),
        "--chat-template": tmp_path / "template",
        "--metrics-compat": "vllm",
        "--generation-config": "none",
        "--unknown-fields": "ignore",
        "--unsupported": "strict",
        "--cors-origins": ["https://a.org", "http://localhost:3000"],
        "--reasoning-fields": "both",
        **{f"--ssl-{name}": tmp_path / name for name in ("certfile", "keyfile", "ca-certs")},
        "--ssl-keyfile-password": "secret",
        "--key-share": 0.25,
        "--recovery": "strict",
        "--allow-media-urls": ["a.org", "b.org"],
        "--media-ports": [8443, 444],
        **dict.fromkeys(("--media-root", "--lora-root"), tmp_path),
        "--model": "some/model",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--model-impl": "native",
        "--spec": "none",
        "--grammar-backend": "xgrammar",
        "--set": ["max_num_seqs=3", "token_budget=64"],
        "--log": tmp_path / "log",
        **{f"--kv-events{end}": f"tcp://127.0.0.1:1{end}" for end in ("", "-replay", "-topic")},
        "--tensor-parallel": 2,
        **dict.fromkeys(("--quantize", "--activations"), "int8"),
        "--lora": ["mine=folder", "other=owner/name"],
    }
    for flag, option in OPTIONS.items():
        if isinstance(option.default, bool):
            given[flag] = not option.default
        elif flag not in given:
            given[flag] = (option.default or 0) + 1  # The remaining flags are numbers.
    return given


def test_each_flag_has_a_variable_and_a_file_option(started, tmp_path, monkeypatch):
    """Flags, environment variables and lines in a file set the same values. Each option gets a value other
    than its default.
    """
    somewhere = partial(msgspec.structs.replace, port=0)  # Port 8001 may be in use.
    monkeypatch.setattr(
        "mmengine.server.lifecycle.listening_socket.listen", lambda settings: listen(somewhere(settings))
    )
    for name in ("server.lifecycle.tls.check_tls", "cli.serve.check_template"):
        monkeypatch.setattr(f"mmengine.{name}", lambda *given: None)
    given = other_values(tmp_path)

    def words(value):
        return [str(each) for each in (value if isinstance(value, list) else [value])]

    def as_argument(flag, value):
        if isinstance(value, bool):
            return [flag if value else OPTIONS[flag].secondary_opts[0]]
        return [word for each in words(value) for word in (flag, each)]

    def found(kept):
        groups = (*kept.groups, kept.model, kept.log, kept.routers)
        return {field.name: getattr(group, field.name) for group in groups for field in fields(group)}

    assert given.keys() == OPTIONS.keys()
    own = found(started())
    arguments = [word for flag, value in given.items() for word in as_argument(flag, value)]
    flags = found(started(*arguments))
    assert flags.keys() == {option.name for option in OPTIONS.values()}
    assert not [name for name in flags if flags[name] == own[name]]
    variables = {
        "MMENGINE_" + flag.removeprefix("--").replace("-", "_").upper(): " ".join(words(value))
        for flag, value in given.items()
    }
    assert found(started(**variables)) == flags
    lines = {flag.removeprefix("--"): value for flag, value in given.items()}
    (tmp_path / "serve.yaml").write_text(json.dumps(lines, default=str))  # JSON is YAML.
    assert found(started("--config", tmp_path / "serve.yaml", MMENGINE_PORT=None)) == flags


def test_a_config_file_sets_options(started, tmp_path):
    template = tmp_path / "a.jinja"
    template.write_text("{{ messages[0].content }}")
    (tmp_path / "serve.yaml").write_text(
        f"served-model-name: [one, two]\nchat-template: {template}\ngeneration_config: none\n"
        "unknown-fields: ignore\nopen-metrics: true\nset: {max_num_seqs: 3, token_budget: 64}\n"
        "max_body_bytes: 4096\ndtype: bfloat16\nrequest-log: false\nspec: none\nhost: null\n"
    )
    found = started("--config", tmp_path / "serve.yaml")
    settings = found.settings
    assert found.names == ("one", "two") and settings.chat_template == "{{ messages[0].content }}"
    assert (settings.generation_config, settings.unknown_fields) == ("none", "ignore")
    assert settings.open_metrics and settings.max_body_bytes == 4096 and settings.host == "127.0.0.1"
    assert (found.config.max_num_seqs, found.config.token_budget, found.config.spec) == (3, 64, "none")
    assert found.model.dtype == "bfloat16"


def test_names_and_settings_in_a_file(started, tmp_path):
    (tmp_path / "serve.yaml").write_text("served-model-name: shapes\nset: [max_num_seqs=3]\n")
    found = started("--config", tmp_path / "serve.yaml")
    assert found.names == ("shapes",) and found.config.max_num_seqs == 3
    (tmp_path / "serve.yaml").write_text("set: {enable_prefix_caching: false}\nserved_model_name: 7\n")
    found = started("--config", tmp_path / "serve.yaml")
    assert found.names == ("7",) and found.config.enable_prefix_caching is False


def test_precedence_of_option_sources(started, tmp_path):
    (tmp_path / "serve.yaml").write_text("drain-s: 1\nping-s: 1\nkey-share: 0.25\n")
    arguments = ("--config", tmp_path / "serve.yaml", "--drain-s", "3")
    settings = started(*arguments, MMENGINE_DRAIN_S="2", MMENGINE_PING_S="2").settings
    assert (settings.drain_s, settings.ping_s, settings.key_share) == (3, 2, 0.25)
    assert started(MMENGINE_CONFIG=str(tmp_path / "serve.yaml")).settings.drain_s == 1


def test_the_default_served_name(started):
    assert started().names == ("mmengine-shapes",)
    for words in (["--model", "a/b"], ["a/b"], ["a/b", "--model", "a/b"]):
        found = started(*words)
        assert found.names == ("a/b",) and found.model.model == "a/b"


def test_null_is_absence_in_all_routes_and_in_what_they_hold():
    # A null field, also in a nested object, is treated as absent.
    from mmengine.server.chat.field_tables import COMPLETION

    with served() as one:
        nulls = {field.name: None for field in COMPLETION if field.name != "prompt"}
        assert one.call("/v1/completions", {"prompt": "abc", **nulls})[0] == 200
        part = {"type": "text", "text": "abc", "cache_control": None}
        message = {"role": "user", "content": [part], "name": None, "tool_calls": None, "refusal": None}
        asked = {
            "messages": [message],
            "stream_options": {"include_usage": None},
            "stream": True,
            "response_format": {"type": "text", "json_schema": None},
            "structured_outputs": {"json": None, "regex": None},
            "mm_processor_kwargs": {"max_pixels": None},
            "chat_template_kwargs": {"enable_thinking": None},
        }
        assert one.call("/v1/chat/completions", asked)[0] == 200
        assert one.call("/tokenize", {"prompt": "abc", "messages": None, "model": None})[0] == 200


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Self-signed certificates for a server with the name localhost, and for a client."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    for name, key in (
        ("server", ["-noenc"]),
        ("client", ["-noenc"]),
        ("locked", ["-passout", "pass:secret"]),
    ):
        made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2", "-x509"]
        where = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        about = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run(["openssl", "req", *made, *key, *where, *about], check=True, capture_output=True)
    return folder


def over_tls(port, folder, client=""):
    context = ssl.create_default_context(cafile=folder / "server.pem")
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", "/v1/models")
        return json.loads(connection.getresponse().read())["object"]
    finally:
        connection.close()


def test_tls_and_certificates_of_clients(certificates):
    folder = certificates
    own = {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key")}
    with served(**own) as one:
        assert over_tls(one.port, folder) == "list"
        with pytest.raises((OSError, http.client.HTTPException)):
            one.call("/v1/models")
    with served(**own, ssl_ca_certs=str(folder / "client.pem")) as one:
        assert over_tls(one.port, folder, "client") == "list"
        with pytest.raises((OSError, http.client.HTTPException)):
            over_tls(one.port, folder)


def test_tls_files_are_checked_before_a_model_is_loaded(certificates, started):
    folder = certificates
    locked = ("--ssl-certfile", folder / "locked.pem", "--ssl-keyfile", folder / "locked.key")
    assert started(*locked, MMENGINE_SSL_KEYFILE_PASSWORD="secret").settings.ssl_keyfile_password == "secret"
    own = ("--ssl-certfile", folder / "server.pem", "--ssl-keyfile", folder / "server.key")
    for arguments, says in (
        (("--ssl-certfile", "nowhere", "--ssl-keyfile", "nowhere"), "No such file"),
        (("--ssl-certfile", folder / "server.pem", "--ssl-keyfile", folder / "client.key"), "cannot be used"),
        (locked, "--ssl-keyfile-password"),
        ((*own, "--ssl-ca-certs", __file__), "--ssl-ca-certs"),
        (("--ssl-ca-certs", folder / "client.pem"), "require ssl_certfile"),
    ):
        ran = call_cli("serve", *arguments)
        assert ran.returncode == 2 and says in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="`mmengine serve` is tested only on Linux")
def test_invalid_values_in_a_file_are_reported(tmp_path):
    for text, says in (
        ("port: many\n", "port"),
        ("unknown-fields: maybe\n", "unknown-fields"),
        ("set: {tokens: 1}\n", "unknown engine setting 'tokens'"),
        ("tensor-parallel-size: 2\n", "--set tensor_parallel=N"),
        ("max_model_len: 2\n", "set: {max_model_len: VALUE}"),
        ("api_key_fil: a\n", "did you mean api_key_file"),
        ("- port\n", "must contain lines of option: value"),
        ("port: [\n", "YAML"),
        ("help: true\n", "unknown option 'help'"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        ran = call_cli("serve", "--config", tmp_path / "a.yaml")
        assert ran.returncode == 2 and says in ran.stderr and "Traceback" not in ran.stderr, (
            text,
            ran.stderr,
        )


def test_a_new_log_uses_priority_scheduling(started, tmp_path):
    """A policy that the user sets takes precedence. An existing log keeps its own policy."""
    log = tmp_path / "log"
    begun = ("--no-supervise", "--log", log)
    assert started().config.policy == "fcfs" and started(*begun).config.policy == "priority"
    assert started(*begun, "--set", "policy=prefill_first").config.policy == "prefill_first"
    log.mkdir()
    (log / segment_name(1)).touch()
    assert started(*begun).config.policy == "fcfs"
