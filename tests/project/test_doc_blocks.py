"""Tests that every command and code block in the documents runs in a test, or is listed here with a reason.

`RUN` maps blocks to the test that runs them; `NOT_RUN` has the reasons.
"""

import functools
import importlib.util
import re
import shlex

import pytest

from mmengine.cli.main import app
from tests.project.doc_blocks import ROOT, blocks, commands, documents, parse

HERE = "tests/project/test_docs_run.py"
# Maps a block's (document, language) to the test that runs the block. "" is a fence without a language.
RUN = {
    ("README.md", "python"): "tests/test_readme.py",
    ("README.md", "sh"): "tests/test_readme.py",
    ("README.md", "bash"): "tests/server/test_server_command.py",
    ("docs/tutorials/first_answers.md", "python"): "tests/test_readme.py",
    ("docs/tutorials/first_answers.md", "sh"): "tests/test_readme.py",
    ("docs/tutorials/a_killed_server.md", "python"): "tests/test_readme.py",
    ("docs/how-to/structured_output.md", "python"): "tests/test_readme.py",
    ("docs/how-to/structured_output.md", "sh"): "tests/test_readme.py",
    ("docs/how-to/structured_output.md", "indented"): HERE,
    ("docs/tutorials/a_bad_night.md", "sh"): "tests/test_debugging.py",
    ("docs/tutorials/a_bad_night.md", "python"): "tests/test_debugging.py",
    ("docs/tutorials/a_bad_night.md", ""): "tests/test_debugging.py",
    ("docs/tutorials/a_bad_night.md", "indented"): HERE,
    ("docs/reference/log.md", "python"): HERE,
    ("docs/reference/debugger.md", "indented"): "tests/cli/test_debug_command.py",
    ("docs/explanation/crash.md", "python"): HERE,
    ("docs/reference/pipeline.md", "python"): HERE,
    ("docs/how-to/tools.md", "python"): HERE,
    ("docs/explanation/policies.md", "python"): HERE,
    ("docs/how-to/sessions.md", "python"): HERE,
    ("docs/explanation/policies.md", "toml"): HERE,
    ("docs/explanation/policies.md", "indented"): HERE,
    ("docs/how-to/batches.md", "json"): "tests/server/test_server_batches.py",
    ("docs/how-to/batches.md", "python"): "tests/server/test_server_batches.py",
    ("docs/how-to/simulation.md", ""): HERE,
    ("docs/how-to/simulation.md", "json"): HERE,
    ("plugins/mmengine_shapes/README.md", "python"): HERE,
}
# Maps blocks to tests that read the document with their own parser.
RUN_ELSEWHERE = {
    ("README.md", "console"): "tests/test_readme.py",
    ("docs/how-to/deploy.md", "yaml"): "tests/project/test_deploy_files.py",
    ("docs/how-to/deploy.md", "nginx"): "tests/project/test_deploy_files.py",
    ("docs/how-to/deploy.md", "sh"): "tests/project/test_deploy_files.py",
    ("docs/reference/log.md", "console"): "tests/cli/test_docs_log.py",
    ("docs/how-to/extract-documents.md", "sh"): "tests/extraction/test_extract_command.py",
    ("docs/how-to/laptop-model.md", "sh"): "tests/gguf/test_laptop_model.py",
    ("docs/how-to/laptop-model.md", "python"): "tests/gguf/test_laptop_model.py",
    ("docs/how-to/search-images.md", "sh"): "tests/pooling/test_search_images.py",
    ("docs/tutorials/a_broken_build.md", "console"): "tests/test_broken_build.py",
    ("docs/tutorials/a_debugger_session.md", "console"): "tests/test_debugger_session.py",
    ("docs/tutorials/a-bad-night-of-vllm.md", "console"): "tests/vllm/test_vllm_faults.py",
}
ITSELF = "it sets up the checkout or runs all tests; the target's existence is tested"
TRAINING = "it takes an hour; the module's existence is tested"
SERVES = "it runs until it is stopped; tests/server/test_server_command.py starts it"
KILLS = "it takes half a minute; tests/durable/test_durable_example.py runs it"
A_GPU = "it needs a GPU"
AN_AGENT = "it needs the agent; tests/server/test_server_agents.py sends its requests"
VLLM = "it needs vLLM's environment; `make vllm` makes one"
VLLM_FAULTS = "it needs vLLM; tests/vllm/test_vllm_fault_examples.py runs it in that environment"
RAY = "it needs Ray; `make ray` runs a similar command"
# Blocks that no test runs, with the reason. Key: document, and the beginning of a command or of a block
# without commands.
NOT_RUN = {
    ("CONTRIBUTING.md", "git clone …"): "the checkout exists already",
    ("CONTRIBUTING.md", "make check"): ITSELF,
    ("CONTRIBUTING.md", "make test"): ITSELF,
    ("CONTRIBUTING.md", "scheduler: skip"): "subjects; tests/project/test_commit_subjects.py checks them",
    (
        "README.md",
        "pip install '.[serve]'",
    ): "it fetches a gigabyte; all tests use the packages that it installs",
    ("README.md", "mmengine demo"): "tests/cli/test_cli_run.py runs it",
    ("docs/tutorials/first_answers.md", "make demo"): "tests/cli/test_cli_run.py runs `mmengine demo`",
    ("docs/tutorials/first_answers.md", "source .venv/bin/activate"): "it changes the reader's shell",
    ("docs/tutorials/a_killed_server.md", "python examples/killed_server.py"): KILLS,
    ("docs/tutorials/a_killed_server.md", "20 responses"): "the output of the example",
    (
        "benchmarks/results/report_page.md",
        "102493 steps",
    ): "the printed output of the benchmark above the block",
    ("docs/explanation/architecture.md", "messages, images, video"): "a drawing",
    ("docs/explanation/architecture.md", "core/     decide/"): "a drawing",
    ("docs/explanation/crash.md", "python examples/killed_server.py"): KILLS,
    (
        "docs/explanation/cpu.md",
        "CPU kernels",
    ): "it differs by CPU; that `mmengine env` has the line is tested",
    (
        "docs/explanation/cpu.md",
        "mmengine: loaded in",
    ): "it differs by machine; tests/cli/test_cli_loading.py checks such a line",
    ("docs/how-to/gpu.md", 'pip install ".[cuda]"'): "it fetches gigabytes",
    ("docs/how-to/gpu.md", "mmengine run --device cuda"): A_GPU,
    ("docs/how-to/gpu.md", "bash benchmarks/gpu.sh"): A_GPU,
    ("docs/how-to/gpu.md", "bash benchmarks/gpu.sh --dry-run"): "tests/benchmarks/test_gpu.py runs it",
    (
        "docs/how-to/gpu.md",
        "GPUs ",
    ): "it differs by what is installed; that `mmengine env` has the lines is tested",
    (
        "docs/how-to/gpu.md",
        "the KV cache does not fit",
    ): f"{A_GPU}; tests/runtime/test_runtime_memory.py checks a similar message",
    (
        "docs/how-to/gpu.md",
        '[project.entry-points."mmengine.devices"]',
    ): "tests/project/test_docs_run.py reads it",
    ("docs/reference/log-format.md", "header  magic"): "a layout of bytes; tests/golden hold them",
    ("docs/reference/log-format.md", 'magic "mmfr"'): "a layout of bytes; tests/golden hold them",
    ("docs/reference/log-format.md", 'magic "mmsn"'): "a layout of bytes; tests/golden hold them",
    ("docs/reference/log-format.md", "from mmengine.events.log"): "tests/project/test_docs_run.py runs it",
    ("docs/how-to/agents.md", "mmengine serve"): SERVES,
    ("docs/how-to/schedule_vllm.md", "pip install . ./plugins/mmengine_vllm"): VLLM,
    ("docs/how-to/schedule_vllm.md", "MMENGINE_LOG=run.log vllm"): VLLM,
    ("docs/how-to/schedule_vllm.md", "mmengine log "): "tests/vllm verify such logs",
    ("examples/vllm_faults/README.md", "HF_HUB_OFFLINE=1"): VLLM_FAULTS,
    ("examples/vllm_faults/README.md", "build/vllm/bin/python"): VLLM_FAULTS,
    ("examples/vllm_faults/README.md", "make vllm"): VLLM,
    ("docs/how-to/agents.md", "ANTHROPIC_BASE_URL"): AN_AGENT,
    ("docs/how-to/agents.md", 'model = "local"'): AN_AGENT,
    ("docs/how-to/agents.md", "OPENAI_API_BASE_URL"): AN_AGENT,
    ("docs/how-to/agents.md", "OPENAI_API_KEY=none"): AN_AGENT,
    ("docs/how-to/agents.md", '{\n  "model": "mmengine/local"'): AN_AGENT,
    ("docs/how-to/agents.md", "cline auth"): AN_AGENT,
    ("docs/how-to/agents.md", "x-mmengine-ignored-fields"): "tests/server/test_server_agents.py checks it",
    ("docs/how-to/lora.md", "mmengine serve"): SERVES,
    (
        "docs/how-to/lora.md",
        "mmengine run",
    ): "it needs adapters; tests/lora/test_lora_server.py uses adapters",
    ("docs/how-to/lora.md", "curl"): "tests/lora/test_lora_server.py calls the routes",
    ("docs/explanation/models.md", "x ── norm"): "a drawing",
    (
        "docs/how-to/add_a_model.md",
        "class TestLlama",
    ): "tests/models/test_contract_llama.py is a similar class",
    (
        "docs/how-to/quantisation.md",
        "mmengine run",
    ): "it asks a hub; tests/models/test_quantising.py tests the option",
    (
        "docs/how-to/block_store.md",
        "mmengine serve",
    ): "it serves until it is ended; tests/serve/test_block_store_engines.py uses the store",
    ("docs/how-to/routers.md", "pip install"): "it fetches packages",
    (
        "docs/how-to/routers.md",
        "mmengine serve",
    ): "it serves until it is ended; tests/serve/test_kv_publisher.py tests the events",
    ("docs/how-to/record-vllm.md", "pip install"): "it needs vLLM; make vllm runs the same",
    ("docs/how-to/record-vllm.md", "MMENGINE_LOG=run.log"): "it needs vLLM; make vllm runs the same",
    ("docs/how-to/record-vllm.md", "mmengine log"): "tests/vllm/test_vllm_recordings.py reads such logs",
    ("docs/how-to/record-vllm.md", "MMENGINE_LOG=/var/log"): "it needs vLLM; make vllm runs the same",
    ("docs/how-to/ray.md", "clients (OpenAI's API)"): "a drawing",
    ("docs/how-to/ray.md", "pip install '.[ray]'"): RAY,
    (
        "docs/how-to/laptop.md",
        "pip install .",
    ): "it fetches packages; tests/cli/test_cli_laptop.py has the same list",
    ("docs/how-to/ray.md", "mmengine serve --ray"): RAY,
    ("docs/how-to/ray.md", "serve run"): RAY,
    (
        "docs/how-to/ray.md",
        "mmengine log",
    ): "tests/fleet/test_fleet_logs.py runs these queries on replicas' logs",
    ("docs/how-to/ray.md", "mmengine run --batch"): "tests/cli/test_cli_shards.py runs shards",
    ("docs/how-to/ray.md", "import ray"): RAY,
    (
        "docs/how-to/deploy.md",
        "[Service]",
    ): "a systemd unit; tests/server/test_server_listening.py reads it",
    ("docs/how-to/serve.md", "mmengine serve"): SERVES,
    (
        "docs/how-to/sessions.md",
        "curl localhost",
    ): "it needs a server; tests/server/test_server_sessions.py starts one",
    ("plugins/mmengine_shapes/README.md", "OMP_NUM_THREADS=1 python -m"): TRAINING,
    ("plugins/mmengine_shapes/README.md", "python -m"): TRAINING,
}
# Examples outside the documents' code blocks, and their tests.
EXAMPLES = {
    "stream.py": "tests/test_readme.py",
    "receipts.py": "tests/test_readme.py",
    "shortest_remaining.py": "tests/core/test_policies.py",
    "planted.py": "tests/test_debugging.py",
    "killed_server.py": "tests/durable/test_durable_example.py",
    "chat_image_schema.py": "tests/server/test_server_command.py",
    "tool_loop.py": "tests/server/test_server_tools.py",
    "watch_folder.py": "tests/serve/test_watch_folder.py",
    **{
        f"{name}.py": "tests/vllm/test_vllm_fault_examples.py"
        for name in (
            *("priority_victim", "draft_budget", "double_free", "lost_rows", "encoder_reference"),
            *("chunk_livelock", "recorded_run", "served_script", "table"),
        )
    },
}
INLINE = re.compile(r"`((?:mmengine|python|make|bash) [^`]+)`")


def is_listed(block):
    if (block.document, block.language) in {**RUN, **RUN_ELSEWHERE}:
        return True
    elsewhere = {each for key in RUN for other in blocks(*key) for each in commands(other)}
    whole = commands(block) or [block.text.strip()]
    begins = [text for document, text in NOT_RUN if document == block.document]
    return all(each in elsewhere or any(map(each.startswith, begins)) for each in whole)


@pytest.mark.parametrize("document", documents())
def test_each_block_is_run_or_listed(document):
    assert not [block.name for block in blocks(document) if not is_listed(block)]


def test_an_unlisted_block_is_found():
    text = "# T\n\n```sh\nmmengine env\nmmengine run new\n```\n\nA list:\n\n    mmengine run old\n\n"
    text += "1. a\n   ```\n   x\n   ```\n"
    found = parse("CONTRIBUTING.md", text)
    assert [(each.line, each.language) for each in found] == [(3, "sh"), (10, "indented"), (13, "")]
    assert not any(is_listed(each) for each in found) and found[2].text == "x\n"
    assert is_listed(parse("CONTRIBUTING.md", "    make test  # the whole\n    mmengine env\n")[0])


def test_the_lists_name_only_existing_blocks():
    for (document, language), test in RUN.items():
        assert blocks(document, language), (document, language)
        source = (ROOT / test).read_text()
        assert f'blocks("{document}", "{language}")' in source, (
            f"{test} does not run {language} of {document}"
        )
    for (document, language), test in RUN_ELSEWHERE.items():
        assert blocks(document, language) and document.rpartition("/")[2] in (ROOT / test).read_text(), (
            document
        )
    for document, begin in NOT_RUN:
        texts = [text for block in blocks(document) for text in (block.text.strip(), *commands(block))]
        assert any(text.startswith(begin) for text in texts), (document, begin)
    for name, test in EXAMPLES.items():
        assert name.removesuffix(".py") in (ROOT / test).read_text(), (name, test)


def test_each_example_is_run():
    shown = "".join(block.text for key in (*RUN, *RUN_ELSEWHERE) for block in blocks(*key))
    planted = (
        ROOT / "docs" / "tutorials" / "a_bad_night.md"
    ).read_text()  # tests/test_debugging_bugs.py runs the document's table
    for path in (ROOT / "examples").rglob("*.*"):
        if path.suffix in (".py", ".json"):
            in_table = path.parent.name == "bugs" and f"| `{path.stem}` |" in planted
            assert in_table or path.name in EXAMPLES or path.name in shown, (
                f"no block and no test runs {path.name}"
            )


def targets():
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)


@functools.cache
def command_line():
    """Return the click command for `mmengine`, built once."""
    from typer.main import get_command

    return get_command(app)


def exists(command):
    """Return whether all names in a command exist: its subcommand and options, make target, module or
    file.
    """
    if "…" in command:  # For example `mmengine log …`.
        command = command.partition("…")[0]
    words = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command), comments=True)
    if words[0] == "make":
        return words[1] in targets()
    if words[0] == "python" and words[1] == "-m":
        return importlib.util.find_spec(words[2]) is not None
    if words[0] in ("python", "bash"):
        return (ROOT / words[1]).is_file()
    found, rest = command_line(), words[1:]
    while hasattr(found, "commands") and rest and not rest[0].startswith("-"):
        found, rest = found.commands[rest[0]], rest[1:]
    known = {name for each in found.params for name in each.opts} | {"--help"}
    return all(word.partition("=")[0] in known for word in rest if word.startswith("--"))


def test_commands_that_are_not_run_exist():
    commands_shown = [
        each for document in documents() for block in blocks(document) for each in commands(block)
    ]
    commands_shown += [
        each for document in documents() for each in INLINE.findall((ROOT / document).read_text())
    ]
    others = ("git ", "pip ", "source ", "curl ", "$", "python {", "python check.py", "MMENGINE_LOG=")
    commands_shown = [each for each in commands_shown if not each.startswith(others)]
    assert len(commands_shown) > 60
    for command in commands_shown:
        for part in command.split(" && "):
            assert exists(part), f"{part!r} does not exist"
