"""Writes random models in the formats of the measured engines: safetensors, GGUF and OpenVINO."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "rivals"
PYTHON = BUILD / "python" / "bin" / "python"
CONVERTERS = BUILD / "llama_cpp_python" / "vendor" / "llama.cpp"
QUANTIZE = BUILD / "llama" / "bin" / "llama-quantize"
TEXT, INDEX = "model.language_model.", "model.safetensors.index.json"
GGUF = ("BF16", "Q8_0", "Q4_K_M")
SHAPES = ("small", "0.4 B", "2 B", "4 B")
DEFAULT_SHAPES = ("0.4 B", "2 B")  # Shapes that rivals_cpu measures without --shape.


def make(shape: str) -> dict[str, Path]:
    """Return a dict from format to path, and write the files if they are missing.

    The formats are bf16 and int4 (folders for mmengine and transformers), BF16, Q8_0 and Q4_K_M (GGUF files),
    and openvino/bf16 and openvino/int8.
    """
    folder = BUILD / "models" / shape.replace(" ", "")
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _make(shape, folder)
        (folder / "whole").touch()
    found = {name: folder / name for name in ("bf16", "int4", "openvino/bf16", "openvino/int8")}
    return found | {name: folder / f"{name}.gguf" for name in GGUF}


def make_gguf(shape: str, folder: Path, sources: Path, libraries: Path) -> Path:
    """Return the path of a random model in Q4_K_M, made with llama.cpp's converter and quantiser.

    `folder`: where files are kept for later calls. `sources`: the folder with the converter. `libraries`: the
    folder with libllama.
    """
    from benchmarks.rivals.packaged_llama import quantise

    name = shape.replace(" ", "")
    made, whole = folder / f"{name}-Q4_K_M.gguf", folder / f"{name}-BF16.gguf"
    if not made.exists():
        if not whole.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                plain = Path(scratch) / "plain"
                _text_folder(_with_vision(shape, Path(scratch) / "whole"), plain)
                shutil.rmtree(Path(scratch) / "whole", ignore_errors=True)
                converter = (HERE / "convert_gguf.py", sources, plain, "--outtype", "bf16")
                _run(sys.executable, *converter, "--outfile", whole)
        quantise(libraries, whole, made, "Q4_K_M")
    return made


def make_image_gguf(
    shape: str, folder: Path, sources: Path, libraries: Path, projector: str
) -> tuple[Path, Path]:
    """Return the paths of a random Qwen3-VL: a Q4_K_M file, and a projector file in F16 or Q8_0.

    `projector`: "F16" or "Q8_0". For all other arguments, see `make_gguf`.
    """
    from benchmarks.rivals.packaged_llama import quantise

    name = shape.replace(" ", "")
    whole, made = folder / f"{name}-VL-BF16.gguf", folder / f"{name}-VL-Q4_K_M.gguf"
    tower = folder / f"mmproj-{name}-VL-{projector}.gguf"
    if not (made.exists() and tower.exists()):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            plain = _with_vision(shape, Path(scratch) / "whole", tower_layers=None)
            converter = (sys.executable, HERE / "convert_gguf.py", sources, plain)
            _run(*converter, "--mmproj", "--outtype", projector.lower(), "--outfile", tower)
            if not made.exists():
                _run(*converter, "--outtype", "bf16", "--outfile", whole)
                quantise(libraries, whole, made, "Q4_K_M")
                whole.unlink()
    return made, tower


def _make(shape: str, folder: Path) -> None:
    from benchmarks.quantised.folders import quantised

    plain = folder / "bf16"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _text_folder(_with_vision(shape, Path(scratch) / "whole"), plain)
    quantised(plain, folder / "int4", "int4")
    gguf = {name: folder / f"{name}.gguf" for name in GGUF}
    _run(PYTHON, HERE / "convert_gguf.py", CONVERTERS, plain, "--outtype", "bf16", "--outfile", gguf["BF16"])
    for name in GGUF[1:]:
        _run(QUANTIZE, gguf["BF16"], gguf[name], name)
    _run(PYTHON, HERE / "export_openvino.py", plain, folder / "openvino" / "bf16")
    command = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", plain)
    task = ("--task", "text-generation-with-past", "--disable-convert-tokenizer")
    _run(PYTHON, *command, *task, "--weight-format", "int8", folder / "openvino" / "int8")


def _with_vision(shape: str, folder: Path, tower_layers: int | None = 1) -> Path:
    """Return a folder with a random Qwen3-VL. `tower_layers`: layers in the vision tower; None: all."""
    from benchmarks.common import half_billion_model
    from benchmarks.common import large_model as day_one_model

    if shape == "0.4 B":
        return half_billion_model.cached_folder()
    sizes = day_one_model.FOUR_BILLION if shape == "4 B" else None
    day_one_model.make(folder, None, small=shape == "small", tower_layers=tower_layers, sizes=sizes)
    return folder


def _text_folder(whole: Path, folder: Path) -> None:
    """Write a Qwen3 model to `folder`: the text decoder of the Qwen3-VL model in the folder `whole`. All
    measured engines support Qwen3.
    """
    config = json.loads((whole / "config.json").read_text())
    text = config["text_config"]
    rope = {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}
    ends = {name: text.get(name) for name in ("bos_token_id", "eos_token_id")}
    made = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        **{name: value for name, value in ends.items() if value is not None},
    }
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    ):
        made[name] = text[name]
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX, "*processor*"))
    (folder / "config.json").write_text(json.dumps(made))
    shards = sorted(whole.glob("*.safetensors"))
    places: dict[str, str] = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names = [name for name in file.keys() if name.startswith(TEXT)]  # noqa: SIM118 (no mapping)
            tensors = {"model." + name.removeprefix(TEXT): file.get_tensor(name) for name in names}
        if tensors:
            save_file(tensors, folder / shard.name, {"format": "pt"})
            places |= dict.fromkeys(tensors, shard.name)
    if len(set(places.values())) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def num_weights(folder: Path) -> int:
    """Return the number of weights in an unquantised folder, with the tied head counted once."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2


def _run(*command: object) -> None:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-2000:]}")
