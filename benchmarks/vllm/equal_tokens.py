"""Compares the answers of plain vLLM with those of vLLM under mmengine_vllm.Scheduler, on the CPU in float32.

    build/vllm/bin/python -m benchmarks.vllm.equal_tokens [--requests 200] [--settings plain drafts]

Each setting runs in two processes with the same requests: texts, images, JSON answers, stop strings,
logprobs, aborts, arrivals over time, and a KV pool that is too small for them. Answers that were aborted on
either side are not compared. The exit code is 1 if an answer differs, or if a log does not verify.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mmengine.replay import verify
from mmengine_shapes.questions import image_questions
from mmengine_shapes.scenes import random_scene
from mmengine_vllm.vllm_object import VllmObject

CHECKPOINT = Path(__file__).parents[2] / "plugins" / "mmengine_shapes" / "checkpoint"
TEXTS = ("What is 3 plus 4?", "Hello!", "Who are you?", "What is a triangle?")
FORM = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
SETTINGS: dict[str, dict[str, VllmObject]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "priority": {"scheduling_policy": "priority"},
    "drafts": {"speculative_config": DRAFTS},
    "vLLM's rules": {},  # MMENGINE_COMPAT
}


def workload(number: int) -> list[dict[str, VllmObject]]:
    """Return the requests: scenes to draw, a question, and options."""
    draw = random.Random(3)
    shared = [random_scene(draw, side=side) for side in (128, 256)]
    made = []
    for index in range(number):
        scenes = {
            1: lambda: [draw.choice(shared)],
            2: lambda: [random_scene(draw, side=draw.choice((96, 192, 256)))],
            4: lambda: [draw.choice(shared), random_scene(draw, side=128)],
        }.get(index % 5, list)()
        if scenes:
            question = draw.choice(
                [q for of_kind in image_questions(scenes[0], draw).values() for q, _ in of_kind]
            )
        else:
            question = " ".join([draw.choice(TEXTS)] * draw.randint(1, 12))
        made.append(
            {
                "text": question,
                "scenes": scenes,
                "step": 2 * index if index < 12 else 12 + index,
                "priority": draw.randint(0, 2),
                "options": {
                    "max_tokens": draw.randint(24, 100),
                    "ignore_eos": index % 7 != 3 and draw.random() < 0.7,
                    "logprobs": 3 if index % 6 == 1 else None,
                    "stop": ["e"] if index % 9 == 4 else None,
                },
                "is_form": index % 7 == 3,
            }
        )
    return made


def run(setting: str, is_ours: bool, number: int, out: Path) -> None:
    """Run the workload in this process and write the answers to `out`."""
    from vllm import LLM, SamplingParams  # lazy: takes seconds
    from vllm.sampling_params import StructuredOutputsParams

    ours = {"scheduler_cls": "mmengine_vllm.Scheduler"} if is_ours else {}
    llm = LLM(
        model=str(CHECKPOINT),
        dtype="float32",
        max_model_len=480,
        enforce_eager=True,
        max_num_seqs=8,
        block_size=32,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=24,
        seed=0,
        **SETTINGS[setting],
        **ours,
    )
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    todo, answers, step = list(enumerate(workload(number))), dict[str, VllmObject](), 0
    begin = time.process_time()
    while todo or engine.has_unfinished_requests():
        while todo and todo[0][1]["step"] <= step:
            index, request = todo.pop(0)
            content = [{"type": "image"}] * len(request["scenes"]) + [
                {"type": "text", "text": request["text"]}
            ]
            chat = [{"role": "user", "content": content}]
            prompt = {
                "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            }
            if request["scenes"]:
                prompt["multi_modal_data"] = {"image": [scene.draw() for scene in request["scenes"]]}
            form = StructuredOutputsParams(json=FORM) if request["is_form"] else None
            params = SamplingParams(temperature=0, structured_outputs=form, **request["options"])
            extra = {"priority": request["priority"]} if setting == "priority" else {}
            engine.add_request(f"r{index}", prompt, params, **extra)
        if step % 40 == 30:
            engine.abort_request([f"r{step // 3}"])
        for output in engine.step():
            if output.finished:
                (answer,) = output.outputs
                logprobs = len(answer.logprobs) if answer.logprobs else 0
                ends = str(answer.finish_reason), str(answer.stop_reason)
                answers[output.request_id] = [list(answer.token_ids), *ends, logprobs]
        step += 1
    scheduler = engine.engine_core.engine_core.scheduler
    figures = {"steps": step, "cpu_s": time.process_time() - begin}
    if is_ours:
        figures["preemptions"] = scheduler.core.stats().num_preemptions
        scheduler.shutdown()
    out.write_text(json.dumps({"answers": answers, **figures}))


def compare(setting: str, number: int, folder: Path) -> bool:
    """Run both sides, print a line, and return whether all answers are equal and the log verifies."""
    sides = []
    for which in ("vllm", "mmengine"):
        out, log = folder / f"{which}.json", folder / "log"
        env = {
            **os.environ,
            "MMENGINE_LOG": str(log),
            "MMENGINE_COMPAT": "vllm" if setting == "vLLM's rules" else "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **dict.fromkeys(
                ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"
            ),
        }
        command = [sys.executable, "-m", "benchmarks.vllm.equal_tokens", "--side", which, "--out", str(out)]
        command += ["--settings", setting, "--requests", str(number)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            return False
        sides.append(json.loads(out.read_text()))
    theirs, ours = (side["answers"] for side in sides)
    common = theirs.keys() & ours.keys()  # an abort may come before or after the end of its request
    equal, total = sum(theirs[name] == ours[name] for name in common), len(common)
    report = verify(log, invariants=True)
    verdict = "the log verifies" if report.divergence is None else f"DIVERGED: {report.divergence}"
    print(
        f"{setting:16} {equal:4} of {total} answers equal, {sides[1]['preemptions']:3} preemptions, "
        f"{sides[0]['steps']} and {sides[1]['steps']} steps, {sides[0]['cpu_s']:.1f} and "
        f"{sides[1]['cpu_s']:.1f} CPU s; {verdict}",
        flush=True,
    )
    return equal == total and report.divergence is None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--side", choices=("vllm", "mmengine"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run(args.settings[0], args.side == "mmengine", args.requests, args.out)
        return
    is_equal = True
    for setting in args.settings:
        with tempfile.TemporaryDirectory() as folder:
            is_equal &= compare(setting, args.requests, Path(folder))
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
