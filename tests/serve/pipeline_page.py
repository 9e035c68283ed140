"""Writes docs/reference/pipeline.md from the table of calls: python -m tests.serve.pipeline_page"""

from collections import Counter
from pathlib import Path

from tests.serve.pipeline_calls import CALLS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "pipeline.md"
WORDS = {
    "agrees": "agrees",
    "differs": "differs on purpose",
    "refused": "refused",
    "more": "taken here alone",
}
HEAD = """# transformers' pipeline, call by call

`mmengine.pipeline` is transformers' image-text-to-text pipeline on this engine:

```python
import mmengine

pipe = mmengine.pipeline("image-text-to-text")  # the embedded checkpoint; or model= a folder or a hub id
messages = [{{"role": "user", "content": "What is a triangle?"}}]
print(pipe(text=messages, max_new_tokens=16, return_full_text=False)[0]["generated_text"])
pipe.close()
```

The table holds {count} calls that transformers 5.23 documents. Each was made to both pipelines on the
embedded checkpoint, and what came back was compared, to the last token and piece of streamed text. `make
soak` does that again; `make test` asks ours alone, against a record of what transformers' gave (`python -m
tests.serve.pipeline_record`). This page is written from the same table (`python -m
tests.serve.pipeline_page`), and a test holds the two together.

| | calls | |
|---|---|---|
| agrees | {agrees} | both give the same, or both refuse |
| taken here alone | {more} | transformers raises, and what is asked for is clear |
| differs on purpose | {differs} | below, with the reason |
| refused | {refused} | below, with what to use |

## What differs on purpose

{differences}

## What is refused

Each is refused by its name, with what to use. The same holds where such a keyword is given when the
pipeline is made.

{refusals}

## Good to know

* As in transformers, generation options stand in `generate_kwargs`, or are given when the pipeline is made.
  Beside the prompts only `max_new_tokens` and `stop_sequence` hold, and here `streamer`, `seed` and
  `logprobs` too; the others change nothing there, `min_new_tokens` and `generation_config` among them, and
  a warning says so.
* A `return_type` that is no member of transformers' `ReturnType` (1, or "new_text") gives prompt and answer
  as one text, as there. A part of the type `video_url` is not read, as there; a warning says so.
* A streamer hears the prompt's tokens first, then each token; several prompts are then answered one after
  the other.
* A generator or dataset gives an iterator; prompts are prepared and answered ahead of it. `batch_size` and
  `num_workers` are taken, and mean nothing: all prompts of a call are batched as they come.
* `return_dict_in_generate` and `output_scores` are taken and, as in transformers' pipeline, change no
  record. `logprobs=5` gives the five best tokens at each place, with their log-probabilities, in each
  record.
* `max_time` counts from the moment at which the engine takes the prompt. What was said until then is the
  answer.
* Beside `response_format=` or `grammar=` the rules `suppress_tokens`, `bad_words_ids` and
  `no_repeat_ngram_size` are refused: they could exclude what the form asks for.
* Special tokens in a message are text here, and structure in transformers.
* An image by `https://` is fetched where that is asked for: `processor_kwargs={{"urls": True}}`, of a call or
  of the pipeline, or a list of hosts (`["images.example.org", "*.example.net"]`), or a
  `mmengine.MediaFetcher(mmengine.FetchLimits(…))` with limits of its own. Else it is refused. transformers
  fetches whatever a message names; here a URL never leads to an address of this network, and time, bytes
  and redirects are bounded ([how](http.md#media-by-url)).

## The table

`generate(…)` stands for `pipe(hello, generate_kwargs={{…}})`, with `max_new_tokens` 16 where no length is
named, `configured(…)` for the same with a `GenerationConfig(…)`, `made(…)` for a pipeline that was made
with these options, `streamed(…)` for a call with such a streamer, `tokens(…)` for a call with
`return_tensors=True`. The other names are those of `tests/serve/pipeline_names.py`.
"""


def page():
    """The text of the page."""
    counts = Counter(call.outcome for call in CALLS)
    text = HEAD.format(
        count=len(CALLS),
        **{name: counts[name] for name in WORDS},
        differences=_rows("differs", "why"),
        refusals=_rows("refused", "use"),
    )
    for group in dict.fromkeys(call.group for call in CALLS):
        rows = [f"| `{_cell(call.code)}` | {WORDS[call.outcome]} |" for call in CALLS if call.group == group]
        text += "\n".join([f"\n### {group}\n", "| call | |", "|---|---|", *rows]) + "\n"
    return text


def _rows(outcome, heading):
    rows = [f"| `{_cell(call.code)}` | {call.note} |" for call in CALLS if call.outcome == outcome]
    return "\n".join([f"| call | {heading} |", "|---|---|", *rows])


def _cell(code):
    return code.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
