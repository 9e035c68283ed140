"""Measures how many tokens a target pass yields with a draft head, on held-out items. Prints a table with a
row per task and a column per draft count.

    python -m mmengine_shapes.training.head_evaluate [--head FOLDER] [--items 200] [--tasks json describe]

Target and head are both greedy, so an engine's passes can be computed exactly (`head_simulate`). A pass
without accepted drafts yields 1 token.
"""

import argparse
import pathlib

from mmengine_shapes import checkpoint_path, draft_head_path
from mmengine_shapes.training.head_export import read_hub
from mmengine_shapes.training.head_simulate import acceptance, held_out_samples
from mmengine_shapes.training.head_target import Target
from mmengine_shapes.training.held_out import TASKS


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=pathlib.Path, default=draft_head_path())
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 4, 5, 7], help="drafts a pass")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    head, vocabulary = read_hub(options.head)
    target = Target(checkpoint_path(), head.shape.levels)
    print("| task | tokens per answer | " + " | ".join(f"K={k}" for k in options.drafts) + " |")
    print("|---" * (2 + len(options.drafts)) + "|", flush=True)
    for task in options.tasks:
        samples = held_out_samples(target, (task,), options.items, options.seed)
        mean = sum(len(sample.ids) - sample.num_prompt for sample in samples) / len(samples)
        cells = [f"{acceptance(head, vocabulary, samples, k):.2f}" for k in options.drafts]
        print(f"| {task} | {mean:.1f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
