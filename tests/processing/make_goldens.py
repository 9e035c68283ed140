"""Writes video_goldens.json: the output of transformers' own video processing for the cases in
video_cases.py.

    pip install --no-deps --target DIR torchvision==0.28.0
    python tests/processing/make_goldens.py DIR

Run once by hand, with the CPU build of torch 2.13 and with transformers. transformers' video processor needs
torchvision. Pixels are stored as the SHA-256 of the uint8 patches.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parents[1] / "plugins" / "mmengine_shapes" / "checkpoint"


def load_processor(torchvision_folder: str):
    """Return transformers' processor, and the operator library, which the caller must keep alive.

    Declares two of torchvision's operators before the import, because torchvision's CUDA wheel cannot load
    them into a CPU build of torch.
    """
    sys.path.insert(0, torchvision_folder)
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(CHECKPOINT), library


def golden(processor, case, video) -> dict:
    options = dict(case.options)
    if case.size:
        options["size"] = {"shortest_edge": case.size[0], "longest_edge": case.size[1]}
    if case.cap:
        options["cap_pixels_per_frame"] = True
    if "num_frames" in options:
        options["fps"] = None  # transformers refuses num_frames together with fps.
    if case.fps is not None:
        entry = {"total_num_frames": len(video), "fps": case.fps}
        if case.indices:
            entry["frames_indices"] = list(case.indices)
        options["video_metadata"] = [entry]
    outputs = processor.video_processor([video], return_tensors="pt", return_metadata=True, **options)
    values = (outputs["pixel_values_videos"].numpy().astype(np.float64) * 0.5 + 0.5) * 255
    pixels = np.rint(values)
    assert np.abs(values - pixels).max() < 1e-3
    text = processor.replace_video_token(outputs, 0)
    text = "look<|vision_start|>" + text + "<|vision_end|>what happens, 1 2 3?"
    return {
        "shape": list(case.shape),
        "grid": outputs["video_grid_thw"][0].tolist(),
        "text": re.sub(r"(<\|video_pad\|>)+", lambda m: f"[{len(m[0]) // len('<|video_pad|>')}]", text),
        "sha256": hashlib.sha256(pixels.astype(np.uint8).tobytes()).hexdigest(),
        "first_row": pixels[0].astype(int).tolist()[:32],
    }


def main() -> None:
    processor, _library = load_processor(sys.argv[1])
    from video_cases import CASES, draw

    goldens = [golden(processor, case, draw(case)) for case in CASES]
    lines = ",\n".join(json.dumps(entry) for entry in goldens)
    (HERE / "video_goldens.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
