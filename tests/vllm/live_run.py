"""Runs vLLM with the included checkpoint, few KV blocks, images and aborted requests.

    build/vllm/bin/python -m tests.vllm.live_run SCHEDULER_CLASS [--num 20]

Prints a line with ANSWERS and the answers as JSON.
"""

import argparse
import json
import os
import random
import signal

from vllm import LLM, SamplingParams

from mmengine_shapes import checkpoint_path
from mmengine_shapes.scenes import random_scene


def prompts(tokenizer, count, rng):
    """Yield (prompt, sampling) for each request. Some images occur several times."""
    shared = [random_scene(rng, side=side) for side in (128, 256)]
    for number in range(count):
        kinds = [], [rng.choice(shared)], [random_scene(rng, side=192)], [], [shared[0], shared[1]]
        scenes = kinds[number % 5]
        text = " ".join(["How many circles are there?"] * rng.randint(1, 6))
        content = [{"type": "image"}] * len(scenes) + [{"type": "text", "text": text}]
        message = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = {"prompt": text}
        if scenes:
            prompt["multi_modal_data"] = {"image": [scene.draw() for scene in scenes]}
        length = rng.randint(24, 90)
        yield prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=rng.random() < 0.7)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("scheduler")
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--dump", action="store_true", help="send SIGUSR1 to this process in the middle")
    args = parser.parse_args()
    llm = LLM(
        model=str(checkpoint_path()),
        dtype="float32",
        max_model_len=480,
        enforce_eager=True,
        max_num_seqs=8,
        block_size=32,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=20,
        seed=0,
        scheduler_cls=args.scheduler,
    )
    engine, answers, step = llm.llm_engine, {}, 0
    todo = list(enumerate(prompts(llm.get_tokenizer(), args.num, random.Random(3))))
    while todo or engine.has_unfinished_requests():
        while todo and 2 * todo[0][0] <= step:
            number, (prompt, sampling) = todo.pop(0)
            engine.add_request(f"r{number}", prompt, sampling)
        if step in (40, 55):
            engine.abort_request([f"r{step // 5}"])
        if args.dump and step == 60:
            os.kill(os.getpid(), signal.SIGUSR1)
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    engine.engine_core.shutdown()
    print("ANSWERS", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
