"""Settings as users of vLLM and llama.cpp try them first: flags, files, the environment; and TLS."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer

from mmengine.cli.main import app
from tests.cli.cli_process import call_cli
from tests.server.running import served

COMMANDS = typer.main.get_command(app).commands
OPTIONS = {each.opts[0]: each for each in COMMANDS["serve"].params if each.name not in ("help", "config")}


@pytest.fixture
def started(monkeypatch):
    """Runs the command up to its engine: what it would serve with."""
    import mmengine.server.lifecycle as lifecycle
    from mmengine.cli import serve

    kept = SimpleNamespace()

    def engine(model, log, config):
        kept.model, kept.log, kept.config = model, log, config
        return "an engine"

    def serving(engine, settings, keys, names, bound, listening, door):
        kept.settings, kept.keys, kept.names = settings, keys, names
        listening()

    monkeypatch.setattr(serve, "_engine", engine)
    monkeypatch.setattr(lifecycle, "serve", serving)
    monkeypatch.setattr(lifecycle, "run", lambda found: None)

    def start(*arguments, **environment):
        import os

        ran = call_cli("serve", *arguments, env={**os.environ, "MMENGINE_PORT": "0", **environment})
        assert ran.returncode == 0 and "serving" in ran.stderr, ran.stderr
        return kept

    return start


def test_each_engine_option_of_run_is_one_of_serve():
    run = {each.name: each for each in COMMANDS["run"].params}
    panel = [each.name for each in run.values() if getattr(each, "rich_help_panel", "") == "Model"]
    assert {"model", "device", "dtype", "setting", "spec", "tensor_parallel"} <= set(panel)
    assert set(panel) <= {each.name for each in OPTIONS.values()}


def test_each_flag_has_a_variable_of_its_name():
    for flag, option in OPTIONS.items():
        assert option.envvar == "MMENGINE_" + flag.removeprefix("--").replace("-", "_").upper()


@pytest.mark.parametrize("way", ["flags", "file", "environment"])
def test_three_ways_to_set_the_same(started, tmp_path, way):
    template = tmp_path / "a.jinja"
    template.write_text("{{ messages[0].content }}")
    if way == "flags":
        found = started(
            *("--served-model-name", "one", "--served-model-name", "two", "--chat-template", template),
            *("--generation-config", "none", "--unknown-fields", "ignore", "--open-metrics"),
            *("--set", "max_num_seqs=3", "--set", "token_budget=64", "--max-body-bytes", "4096"),
            *("--dtype", "bfloat16", "--no-request-log", "--spec", "none"),
        )
    elif way == "file":
        (tmp_path / "serve.yaml").write_text(
            f"served-model-name: [one, two]\nchat-template: {template}\ngeneration_config: none\n"
            "unknown-fields: ignore\nopen-metrics: true\nset: {max_num_seqs: 3, token_budget: 64}\n"
            "max_body_bytes: 4096\ndtype: bfloat16\nrequest-log: false\nspec: none\nhost: null\n"
        )
        found = started("--config", tmp_path / "serve.yaml")
    else:
        found = started(
            MMENGINE_SERVED_MODEL_NAME="one two",
            MMENGINE_CHAT_TEMPLATE=str(template),
            MMENGINE_GENERATION_CONFIG="none",
            MMENGINE_UNKNOWN_FIELDS="ignore",
            MMENGINE_OPEN_METRICS="1",
            MMENGINE_SET="max_num_seqs=3 token_budget=64",
            MMENGINE_MAX_BODY_BYTES="4096",
            MMENGINE_DTYPE="bfloat16",
            MMENGINE_REQUEST_LOG="0",
            MMENGINE_SPEC="none",
        )
    settings = found.settings
    assert found.names == ("one", "two") and settings.chat_template == "{{ messages[0].content }}"
    assert (settings.generation_config, settings.unknown_fields) == ("none", "ignore")
    assert settings.open_metrics and settings.max_body_bytes == 4096 and settings.host == "127.0.0.1"
    assert (found.config.max_num_seqs, found.config.token_budget, found.config.spec) == (3, 64, "none")
    assert found.model.dtype == "bfloat16"


def test_one_name_in_a_file_is_one_name_and_settings_may_be_a_list(started, tmp_path):
    (tmp_path / "serve.yaml").write_text("served-model-name: shapes\nset: [max_num_seqs=3]\n")
    found = started("--config", tmp_path / "serve.yaml")
    assert found.names == ("shapes",) and found.config.max_num_seqs == 3
    (tmp_path / "serve.yaml").write_text("set: {enable_prefix_caching: false}\nserved_model_name: 7\n")
    found = started("--config", tmp_path / "serve.yaml")
    assert found.names == ("7",) and found.config.enable_prefix_caching is False


def test_the_command_line_wins_then_the_environment_then_the_file(started, tmp_path):
    (tmp_path / "serve.yaml").write_text("drain-s: 1\nping-s: 1\nkey-share: 0.25\n")
    arguments = ("--config", tmp_path / "serve.yaml", "--drain-s", "3")
    settings = started(*arguments, MMENGINE_DRAIN_S="2", MMENGINE_PING_S="2").settings
    assert (settings.drain_s, settings.ping_s, settings.key_share) == (3, 2, 0.25)
    assert started(MMENGINE_CONFIG=str(tmp_path / "serve.yaml")).settings.drain_s == 1


def test_the_model_is_called_by_its_own_name_unless_it_has_another(started):
    assert started().names == ("mmengine-shapes",)
    assert started("--model", "Qwen/Qwen3-VL-8B-Instruct").names == ("Qwen/Qwen3-VL-8B-Instruct",)


def test_null_is_absence_in_all_routes_and_in_what_they_hold():
    from mmengine.server.fields import COMPLETION

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
    """Of a server that is called localhost, and of a client, both signed by themselves."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
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


def test_tls_files_are_looked_at_before_a_model_is_loaded(certificates, started):
    folder = certificates
    locked = ("--ssl-certfile", folder / "locked.pem", "--ssl-keyfile", folder / "locked.key")
    assert started(*locked, MMENGINE_SSL_KEYFILE_PASSWORD="secret").settings.ssl_keyfile_password == "secret"
    own = ("--ssl-certfile", folder / "server.pem", "--ssl-keyfile", folder / "server.key")
    for arguments, says in (
        (("--ssl-certfile", "nowhere", "--ssl-keyfile", "nowhere"), "No such file"),
        (("--ssl-certfile", folder / "server.pem", "--ssl-keyfile", folder / "client.key"), "cannot be used"),
        (locked, "--ssl-keyfile-password"),
        ((*own, "--ssl-ca-certs", __file__), "--ssl-ca-certs"),
        (("--ssl-ca-certs", folder / "client.pem"), "need ssl_certfile"),
    ):
        ran = call_cli("serve", *arguments)
        assert ran.returncode == 2 and says in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="as tests of the command are")
def test_a_wrong_value_of_a_file_is_told(tmp_path):
    for text, says in (
        ("port: many\n", "port"),
        ("unknown-fields: maybe\n", "unknown-fields"),
        ("set: {tokens: 1}\n", "no engine setting 'tokens'"),
        ("- port\n", "must hold option: value"),
        ("port: [\n", "is no YAML"),
        ("help: true\n", "there is no option 'help'"),
    ):
        (tmp_path / "a.yaml").write_text(text)
        ran = call_cli("serve", "--config", tmp_path / "a.yaml")
        assert ran.returncode == 2 and says in ran.stderr and "Traceback" not in ran.stderr, (
            text,
            ran.stderr,
        )
