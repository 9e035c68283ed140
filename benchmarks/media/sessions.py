"""Measure the time to the first token of a question about video frames, in a session and as a cold request.

    python -m benchmarks sessions --threads 1                        # the included checkpoint
    python -m benchmarks sessions --threads 2 --half-billion         # 0.4 billion weights, bfloat16

A session gets the frames one after another, as from a camera, and then the question. The cold request has the
same content, without cached frames, features or KV. Each answer has one token. Each round measures a cold
request and then a session. It also checks that their prompts and answers are equal.
"""

import time
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.common.measure import use_threads
from benchmarks.common.report import Table, machine_lines, show

BAR = 0.05  # maximum time to first token in a session, relative to a cold request
QUESTION = "What moved?"
SECONDS = 0.5  # from one frame to the next


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch, and CPUs.")] = 1,
    frames: Annotated[int, typer.Option(min=2, help="Number of frames in the session.")] = 200,
    side: Annotated[int, typer.Option(min=32, help="A frame's width and height in pixels.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Questions, each asked both ways.")] = 5,
    half_billion: Annotated[
        bool, typer.Option("--half-billion", help="Use the model with 0.4 billion weights.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Use eight frames and one round.")] = False,
) -> None:
    """Measure seconds to the first token, in a session and cold."""
    use_threads(threads)
    frames, rounds = (8, 1) if quick else (frames, rounds)
    show([measure(threads, frames, side, rounds, half_billion)], machine_lines(threads))


def measure(threads: int, count: int, side: int, rounds: int, half_billion: bool) -> Table:
    import torch  # imported after the thread environment is set

    from benchmarks.common.half_billion_model import cached_folder
    from mmengine import Engine, EngineConfig, Prompt

    torch.set_num_threads(threads)
    # Per pair of frames: the visual tokens, and 16 tokens for the pair's time stamp and markers.
    length = count // 2 * ((side // 32) ** 2 + 16) + 256
    config = EngineConfig(
        num_threads=threads, max_media_per_request=count, media_cache_bytes=0, max_model_len=length
    )
    with Engine(cached_folder() if half_billion else None, config=config) as engine:
        seen = [(SECONDS * number, picture(number, side)) for number in range(count)]
        sizes = {"min_pixels": side * side, "max_pixels": side * side, "total_pixels": count * side * side}
        metadata = {"fps": 1000.0, "frames_indices": [round(1000 * seconds) for seconds, _ in seen]}
        video = {"type": "video", "video": ([image for _, image in seen], metadata)}
        content = [video, {"type": "text", "text": QUESTION}]
        prompt = Prompt([{"role": "user", "content": content}], media_options=sizes)
        cold, warm, prompts = [], [], []
        with engine.session(media_options=sizes) as session:
            begun = time.monotonic()
            for seconds, image in seen:
                session.frame(image, seconds)
            taken = time.monotonic() - begun
        for _ in range(rounds):
            forget(engine)
            cold.append(clocked(lambda: engine.generate([prompt], max_tokens=1)[0]))
            forget(engine)
            with engine.session(media_options=sizes) as session:
                for seconds, image in seen:
                    session.frame(image, seconds)
                warm.append(clocked(lambda: session.ask(QUESTION, max_tokens=1)))
            prompts.append(same(cold[-1][1], warm[-1][1]))
    table = Table(
        f"A question about {count} frames of {side} x {side}, {threads} threads",
        ["", "seconds to the first token", "of a cold one", "prompt tokens", "found computed"],
    )
    base = median(seconds for seconds, _ in cold)
    for name, found in (("one cold request", cold), ("asked of a session", warm)):
        seconds, last = median(each for each, _ in found), found[-1][1]
        figures = [f"{seconds:.4f}", f"{seconds / base:.4f}"]
        table.rows.append([name, *figures, str(len(last.prompt_token_ids)), str(last.num_cached_tokens)])
    ratio = median(seconds for seconds, _ in warm) / base
    table.notes.append(f"at most {BAR} of a cold one: {'met' if ratio <= BAR else 'missed'}")
    table.notes.append(f"frames: {count / taken:.1f} a second, each computed when its patch is whole")
    table.notes.append(f"prompts and first tokens that differ: {prompts.count(False)} of {rounds}")
    return table


def forget(engine) -> None:
    """Reset the prefix cache."""
    engine._core.reset_prefix_cache()
    engine.generate(["-"], max_tokens=1)


def picture(number: int, side: int):
    """Return a JPEG of noise over a ramp, with the seed `number`."""
    import io

    from PIL import Image

    rng = np.random.default_rng(number)
    ramp = np.broadcast_to(np.linspace(0, 200, side, dtype=np.uint8)[:, None, None], (side, side, 3))
    noisy = np.clip(ramp.astype(np.int16) + rng.integers(0, 55, (side, side, 3)), 0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(noisy).save(data, "JPEG")
    return data.getvalue()


def clocked(run):
    """Return the seconds of a call, and its result."""
    begun = time.monotonic()
    result = run()
    return time.monotonic() - begun, result


def same(one, other) -> bool:
    alike = np.array_equal(one.prompt_token_ids, other.prompt_token_ids)
    return alike and one.choices[0].token_ids == other.choices[0].token_ids


if __name__ == "__main__":
    typer.run(main)
