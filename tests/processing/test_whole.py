"""Tests the whole processor: which modules it imports, and that threads get the same results as a single
thread.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchvision", "transformers"}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
from mmengine_qwen3_vl.processing import load_processor
from mmengine_shapes import checkpoint_path
from PIL import Image
processor = load_processor(checkpoint_path())
assert "av" not in sys.modules
image = Image.new("RGB", (70, 50))
content = [{"type": "image", "image": image}, {"type": "video", "video": [image] * 3}]
prepared = processor.prepare([{"role": "user", "content": content}])
assert len(prepared.media) == 2
assert "av" not in sys.modules
"""


def test_neither_torch_nor_pyav_is_needed_for_images():
    paths = [str(ROOT), str(ROOT / "plugins")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{BLOCKED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_threads_give_the_same_as_one(processor):
    rng = np.random.default_rng(3)

    def request(i):
        size = (30 + 7 * (i % 5), 40 + 11 * (i % 7))
        image = Image.fromarray(np.full((*size, 3), i % 11, np.uint8))
        clip = [Image.fromarray(np.full((*size, 3), j, np.uint8)) for j in range(3)]
        text = "".join(chr(97 + (i * k) % 26) for k in range(50)) + "<|im_end|>"
        content = [
            {"type": "text", "text": text},
            {"type": "image", "image": image},
            {"type": "video", "video": clip},
        ]
        prepared = processor.prepare([{"role": "user", "content": content}])
        return prepared.prompt_token_ids.tobytes(), tuple(m.item for m in prepared.media)

    order = rng.permutation(60).tolist()
    with ThreadPoolExecutor(8) as pool:
        together = dict(zip(order, pool.map(request, order), strict=True))
    assert all(together[i] == request(i) for i in order)
