"""Writes video_goldens.json: the output of transformers' own video processing for the cases in
video_cases.py, and a hash of the number words from num2words.

    pip install --no-deps --target DIR torchvision==0.28.0 num2words==0.5.14 docopt==0.6.2
    PYTHONPATH=. python tests/smolvlm/make_goldens.py DIR

Run by hand, with the CPU build of torch 2.13 and with transformers, whose video processor needs torchvision.
Pixels are stored as a SHA-256. Pixels at the edge that no patch covers are left out.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.processing.video_cases import draw
from tests.smolvlm.tiny import PATCH, SIDE, make_tiny
from tests.smolvlm.video_cases import CASES

GOLDENS = Path(__file__).with_name("video_goldens.json")
MAX_NUMBER = 2048


def let_torchvision_be_imported():
    """Declare two torchvision operators before the import, because torchvision's CUDA wheel cannot load them
    with a CPU build of torch. The operators exist only while the caller keeps the return value.
    """
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def golden(processor, case) -> dict:
    video = draw(case)
    seconds = None if case.indices else len(video) / case.fps
    entry = {"total_num_frames": len(video), "fps": case.fps, "duration": seconds}
    if case.indices:
        entry["frames_indices"] = list(case.indices)
    out = processor.video_processor(
        [video],
        video_metadata=[entry],
        do_sample_frames=case.indices is None,
        return_tensors="pt",
        return_metadata=True,
        **case.options,
    )
    values = (out["pixel_values"].numpy().astype(np.float64) * 0.5 + 0.5) * 255
    pixels = np.rint(values)
    assert np.abs(values - pixels).max() < 1e-3
    seen = SIDE // PATCH * PATCH
    frames = pixels[0, :, :, :seen, :seen].astype(np.uint8)
    return {
        "frames": len(frames),
        "text": processor.replace_video_token(out, 0),
        "sha256": hashlib.sha256(np.ascontiguousarray(frames).tobytes()).hexdigest(),
    }


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    _library = let_torchvision_be_imported()
    from num2words import num2words
    from transformers import AutoProcessor

    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder))
        processor = AutoProcessor.from_pretrained(folder)
        videos = [golden(processor, case) for case in CASES]
    words = " ".join(map(num2words, range(MAX_NUMBER + 1)))
    made = {"videos": videos, "words": hashlib.sha256(words.encode()).hexdigest()}
    GOLDENS.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
