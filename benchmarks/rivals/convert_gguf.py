"""llama.cpp's own convert_hf_to_gguf.py on a checkpoint whose vocabulary it does not know.

python benchmarks/rivals/convert_gguf.py LLAMA_CPP FOLDER --outtype bf16 --outfile FILE

It tells vocabularies apart by a hash of a tokenised text; the embedded checkpoint's is in none of its lists.
How texts would be cut is of no account here, since prompts are ids: Qwen's way is written.
"""

import runpy
import sys
from pathlib import Path

sources = Path(sys.argv.pop(1))
sys.path[:0] = [str(sources), str(sources / "gguf-py")]

import conversion  # noqa: E402 (found by the path above)

conversion.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv[0] = str(sources / "convert_hf_to_gguf.py")
runpy.run_path(sys.argv[0], run_name="__main__")
