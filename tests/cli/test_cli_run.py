"""Tests `mmengine run`, `demo` and `env` with the included checkpoint."""

import io
import json
import random
import signal
from importlib import metadata

import pytest

from mmengine.cli import main as cli
from mmengine.cli.chat import Conversation
from mmengine.cli.media_options import MediaUrls
from mmengine.cli.run import model_text
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from tests.cli.cli_process import run_unsupervised
from tests.processing.internet import Internet, answer
from tests.serve.serve_fakes import builder

scenes = pytest.importorskip("mmengine_shapes.scenes")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "shapes.png"
    scenes.random_scene(random.Random(5), count=2).draw().save(path)
    return path


EMBEDDED = f"{model_text(None)}\n"


@pytest.fixture
def call(monkeypatch, capfd):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["mmengine", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, capfd.readouterr()

    return run


def test_a_question_gets_an_answer(call, picture):
    ask = ("run", "How many shapes are there?", "--image", picture)
    code, printed = call(*ask, "--spec", "none")
    assert code == 0 and printed.out.startswith("There ") and printed.err == EMBEDDED
    assert call(*ask)[1].out == printed.out


def test_a_model_is_not_taken_for_a_question(call, tmp_path):
    for name in ("Qwen/Qwen3-VL-2B-Instruct", "hf:a/b@main", tmp_path, "model.gguf"):
        code, printed = call("run", name)
        assert code == 2 and f"mmengine chat {name}"[:60] in printed.err and not printed.out
    code, printed = call("run", "Qwen/Qwen3-VL-2B-Instruct", "What is this?")
    assert code == 2 and "name the model with --model" in printed.err and len(printed.err.splitlines()) == 1


def test_chat_keeps_its_messages(call, picture, monkeypatch):
    lines = ["Hello.", f"How many shapes are there? @{picture}", "/system Be brief.", "@missing.png What?"]
    lines += [
        "Again?",
        "/clear",
        "/help",
        "/quiet",
        "/image",
        f"/image {picture}",
        "What is it?",
        "/exit",
        "not read",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    seen = []
    prepare = Prompt.prepare
    monkeypatch.setattr(
        Prompt, "prepare", lambda self, *how: seen.append(self.messages) or prepare(self, *how)
    )
    code, printed = call("chat", "--max-tokens", 8)
    assert code == 0 and len(printed.out.splitlines()) == 4 and "There are 2 shapes." in printed.out
    assert "there is no file 'missing.png'" in printed.err and printed.err.count("/clear  ") == 1
    assert "/image needs a path" in printed.err and "unknown command /quiet" in printed.err
    roles = [[message["role"] for message in messages] for messages in seen]
    turn = ["user", "assistant"]
    assert roles[:2] == [["user"], [*turn, "user"]] and roles[3] == ["system", *turn, *turn, "user"]
    assert roles[4] == ["system", "user"] and seen[1][2]["content"][0]["image"] == str(picture)
    assert seen[4][1]["content"][0]["image"] == str(picture)


def test_ctrl_c_stops_an_answer_of_a_chat(monkeypatch, capsys):
    with Engine(builder=builder()) as engine:
        conversation = Conversation(engine, {"max_tokens": 300}, "", None)
        step, pressed = engine.step, []

        def interrupted(**how):
            outputs = step(**how)
            if outputs and outputs[0].text and not pressed:
                pressed.append(signal.raise_signal(signal.SIGINT))
            return outputs

        monkeypatch.setattr(engine, "step", interrupted)
        monkeypatch.setattr("sys.stdin", io.StringIO("a long question"))
        conversation.run()
        assert engine.is_idle
    assert "stopped" in capsys.readouterr().err
    assert 0 < len(conversation.messages[1]["content"]) < len("a long question")


def test_an_image_is_resized(call, picture):
    def prompt_tokens(*options):
        code, printed = call("run", "How many?", "--image", picture, "--json", "--max-tokens", 1, *options)
        assert code == 0
        return json.loads(printed.out)["usage"]["prompt_tokens"]

    plain = prompt_tokens()
    assert prompt_tokens("--max-pixels", 4096) < plain < prompt_tokens("--min-pixels", 400_000)


def test_a_terminal_shows_model_and_prompt_progress(call, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    small = ("--set", "token_budget=16", "--set", "max_num_seqs=4")
    assert call("run", "one two three four " * 30, "--max-tokens", 1, *small)[0] == 0, terminal.getvalue()
    said = terminal.getvalue()
    assert "loading the included checkpoint" in said and "KV pool of" in said and "prompt" in said


def test_a_picture_by_url_gets_the_answer_of_its_file(call, picture, monkeypatch):
    net = Internet()
    try:
        net.pages["/a.png"] = answer(picture.read_bytes())
        ask = ("run", "How many shapes are there?", "--image")
        said = call(*ask, picture)[1].out
        monkeypatch.setattr(MediaUrls, "media_options", lambda options: {"urls": net.fetcher()})
        assert (
            call(*ask, net.url("/a.png"), "--allow-media-urls", "public", "--media-ports", net.port)[1].out
            == said
        )
        assert len(net.heads) == 1
    finally:
        net.close()


def test_json_holds_tokens_and_usage_and_a_seed_repeats(call, picture):
    arguments = ("run", "Describe the image.", "--image", picture, "--json", "--temperature", 1, "--seed", 4)
    code, printed = call(*arguments, "--n", 2)
    answer = json.loads(printed.out)
    assert code == 0 and set(answer) == {"choices", "usage"} and len(answer["choices"]) == 2
    again = json.loads(call(*arguments)[1].out)
    assert set(again) == {"text", "token_ids", "finish_reason", "usage"}
    assert again["token_ids"] == answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--image", "nowhere.png"], 2, "nowhere.png"),
        (["--image", "https://a.example/a.png"], 2, "; give --allow-media-urls a.example (or public)\n"),
        (
            ["--image", "http://a.example:81/a.png", "--allow-media-urls", "b.example"],
            2,
            "; give --allow-media-urls a.example (or public) --allow-http-media --media-ports 81\n",
        ),
        (["--image", "https://a b/a.png"], 2, "fetching URLs needs"),
        (["--allow-media-urls", "https://a.example"], 2, "is not a host name"),
        (["--allow-media-urls", "public", "--media-timeout-s", "0"], 2, "timeout_s of media must be above 0"),
        (
            ["--allow-media-urls", "public", "--image", "https://127.0.0.1/a.png"],
            2,
            "its address is not allowed",
        ),
        (["--max-pixels", "4096"], 2, "--min-pixels and --max-pixels need --image or --video"),
        (["--model", "no/such/folder/at/all"], 2, "there is no model folder"),
        (["--device", "tpu"], 2, "tpu"),
        (["--dtype", "float8"], 2, "float8"),
        (["--set", "num_blocks=1"], 2, "num_blocks"),
    ],
)
def test_an_error_is_one_line(call, arguments, code, says):
    got, printed = call("run", "What is this?", *arguments)
    assert got == code and printed.out == "" and len(printed.err.splitlines()) == 1
    assert says in printed.err


SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "count": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["shape", "count"],
    "additionalProperties": False,
}


def _is_of_drafts(printed):
    return all(" drafts accepted, " in line for line in printed.removeprefix(EMBEDDED).splitlines())


def test_a_schema_makes_the_answer_json(call, picture):
    path = picture.parent / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    question = ("run", "What is in the image?", "--image", picture, "--schema", path)
    code, printed = call(*question)
    answer = json.loads(printed.out)
    assert code == 0 and list(answer) == ["shape", "count"]
    assert printed.err and _is_of_drafts(printed.err)
    code, printed = call(*question, "--json")
    assert json.loads(json.loads(printed.out)["text"]) == answer and printed.err == EMBEDDED
    ways = ("--on-truncation", "close", "--max-tokens", 90, "--set", "reasoning_end=So")
    code, printed = call(*question, *ways, "--reasoning")
    assert code == 0 and list(json.loads(printed.out)) == ["shape", "count"] and _is_of_drafts(printed.err)
    answered = json.loads(call(*question, *ways, "--reasoning", "--json")[1].out)
    assert answered["content"] == printed.out.strip()
    assert answered["text"] == answered["reasoning"] + "So" + answered["content"]
    assert json.loads(call(*question, *ways, "--no-reasoning")[1].out) == answer
    assert "--reasoning needs --schema" in call("run", "What?", "--reasoning")[1].err
    code, printed = call(*question, "--max-tokens", 3)
    assert code == 1 and "it does not match its format; raise --max-tokens" in printed.err
    path.write_text('{"type": ')
    code, printed = call(*question)
    assert code == 2 and "is not valid JSON" in printed.err and len(printed.err.splitlines()) == 1
    for data, says in {
        b'{"const": "\xff"}': "is not valid JSON",
        b"\xff\xfe{\x00": "is not valid JSON",
        b"[" * 50_000: "is not valid JSON",
        b'{"type": "object", "type": "array"}': 'the key "type" appears twice in one object',
        b'{"type": "integer", "minimum": 3, "maximum": 2}': "schema refused: minimum at #/minimum",
        b'{"items": {"uniqueItems": true, "type": "array"}}': "uniqueItems at #/items/uniqueItems",
    }.items():
        path.write_bytes(data)
        code, printed = call(*question)
        assert code == 2 and says in printed.err and len(printed.err.splitlines()) == 1
    assert "cannot be read" in call("run", "What?", "--schema", picture.parent / "none.json")[1].err
    assert "--schema and --batch exclude" in call("run", "--batch", path, "--schema", path)[1].err


def test_an_empty_run_is_refused_before_loading_a_model(call, tmp_path, monkeypatch):
    monkeypatch.setattr("mmengine.serve.engine.engine.Engine", None)
    for name, *value in (
        ("--schema", tmp_path),
        ("--on-truncation", "close"),
        ("--no-reasoning",),
        ("--thinking-token-budget", 0),
        ("--json",),
        *(
            (name, "3")
            for name in ("--max-tokens", "--min-tokens", "--top-k", "--seed", "--stop", "--logprobs", "--n")
        ),
        ("--temperature", 0.5),
        ("--top-p", 0.5),
        ("--ignore-eos",),
    ):
        code, printed = call("run", "--batch", tmp_path, "--out", tmp_path / "out", name, *value)
        says = f"{name.replace('--no-', '--')} and --batch exclude each other"
        assert code == 2 and says in printed.err and len(printed.err.splitlines()) == 1, printed.err
        hint = "are JSON anyway" if name == "--json" else "request line"
        assert hint in printed.err
    code, printed = call("run", "What?", "--thinking-token-budget", -2)
    assert code == 2 and "thinking_token_budget must be a number of tokens" in printed.err, printed.err


def test_a_request_file_with_paths_beside_it(call, picture, monkeypatch):
    run_unsupervised(monkeypatch)
    folder = picture.parent

    def request(name, image, **fields):
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "Describe."}]
        return json.dumps({"custom_id": name, "messages": [{"role": "user", "content": parts}], **fields})

    lines = [
        request("relative", picture.name),
        request("absolute", str(picture)),
        request("gone", "gone.png"),
    ]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    out, log = folder / "answers.jsonl", folder / "log"
    code, printed = call("run", "--batch", folder / "requests.jsonl", "--out", out, "--log", log)
    assert code == 1 and "2 answers and 1 errors" in printed.err
    answers = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert answers["relative"]["text"] == answers["absolute"]["text"] != ""
    assert "gone.png" in answers["gone"]["error"]
    code, printed = call("log", "verify", log)
    assert code == 0 and "2 requests" in printed.out
    code, printed = call("run", "again", "--log", log)
    assert code == 1 and "has a log already" in printed.err


def test_the_demo_answers_and_verifies(call, tmp_path):
    code, printed = call("demo", "--folder", tmp_path / "demo")
    assert code == 0 and "verified: no divergence" in printed.out
    assert printed.out.count("(right)") + printed.out.count("(wrong)") == 12
    assert len(list((tmp_path / "demo").glob("*.png"))) == 6
    assert call("log", "verify", tmp_path / "demo" / "log-1")[0] == 0
    assert call("demo", "--folder", tmp_path / "demo", "--seed", 3)[0] == 0
    assert (tmp_path / "demo" / "log-2").is_dir()


def test_env_describes_this_machine(call):
    code, printed = call("env", "--json")
    facts = json.loads(printed.out)
    assert code == 0 and "Qwen3VLForConditionalGeneration" in facts["model plugins"]
    assert facts["included checkpoint"].endswith("MB)") and facts["attention"] and facts["GPUs"]
    assert facts["torch"] == metadata.version("torch")
    assert facts["attention torch"] == "usable on any device"
    assert call("env")[1].out.splitlines()[0].split() == ["mmengine-vl", facts["mmengine-vl"]]
