"""Runs llama.cpp's convert_hf_to_gguf.py on a checkpoint with an unknown vocabulary.

    python benchmarks/rivals/convert_gguf.py LLAMA_CPP FOLDER --outtype bf16 --outfile FILE

The converter fails if it does not know a checkpoint's vocabulary. This script always names Qwen's vocabulary.
The name is not important, because the benchmarks pass prompts as token ids.
"""

import runpy
import sys
from pathlib import Path

sources = Path(sys.argv.pop(1))
sys.path[:0] = [str(sources), str(sources / "gguf-py")]
sys.path.append(str(Path(__file__).parents[2] / "build" / "rivals" / "converter"))  # Has sentencepiece.

import conversion  # noqa: E402 (found by the path above)

conversion.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv[0] = str(sources / "convert_hf_to_gguf.py")
runpy.run_path(sys.argv[0], run_name="__main__")
