"""Writes docs/reference/pipeline.md from the table of calls: python -m tests.serve.pipeline_page"""

from collections import Counter
from pathlib import Path

from tests.serve.pipeline_calls import CALLS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "pipeline.md"
WORDS = {
    "agrees": "agrees",
    "differs": "differs on purpose",
    "refused": "refused",
    "more": "accepted only here",
}
HEAD = """# transformers' pipeline, call by call

`mmengine.pipeline` is transformers' image-text-to-text pipeline on this engine:

```python
import mmengine

pipe = mmengine.pipeline("image-text-to-text")  # the included checkpoint; or model= a folder or a hub id
messages = [{{"role": "user", "content": "What is a triangle?"}}]
print(pipe(text=messages, max_new_tokens=16, return_full_text=False)[0]["generated_text"])
pipe.close()
```

The table has {count} calls that transformers 5.23 documents. Each call was made to both pipelines with the
included checkpoint, and the results were compared, including every token and every piece of streamed text.
`make soak` repeats this comparison. `make test` calls only mmengine and compares with recorded results from
transformers (`python -m tests.serve.pipeline_record`). `python -m tests.serve.pipeline_page` writes this page
from the same table, and a test keeps both equal.

| outcome | calls | meaning |
|---|---|---|
| agrees | {agrees} | both give the same result, or both refuse |
| accepted only here | {more} | transformers raises, although the meaning is clear |
| differs on purpose | {differs} | listed below, with the reason |
| refused | {refused} | listed below, with a replacement |

## Differences on purpose

{differences}

## Refused calls

Each call is refused, and the error names the keyword and a replacement. Such a keyword is also refused
when the pipeline is created.

{refusals}

## Details

* **Generation options.** As in transformers, generation options go into `generate_kwargs`, or are set when
  the pipeline is created. Only `max_new_tokens` and `stop_sequence` may also be keywords of a call; mmengine
  adds `streamer`, `seed` and `logprobs`. Other options among a call's keywords, such as `min_new_tokens` and
  `generation_config`, are ignored with a warning.
* **Arguments of the constructor.** `revision`, `dtype`, `device` and a `device_map` with one device are
  honoured, also in `model_kwargs`; engine settings are keywords (`max_model_len=4096`). Other arguments, such
  as `token` and `quantization_config`, are refused by name with a replacement. `trust_remote_code` is
  accepted, and no code from a checkpoint is run. If `model=` is a loaded transformers model, mmengine loads
  the same files again: from the model's folder, or from its hub id at its commit.
* **Attributes.** `pipe.model.config`, `pipe.processor`, `pipe.tokenizer` and `pipe.device` are those of
  transformers. `pipe.model` computes nothing.
* **Return type.** As in transformers, a `return_type` that is not a member of `ReturnType`, such as 1 or
  "new_text", gives prompt and answer as one text.
* **`video_url`.** As in transformers, a message part of this type is ignored. mmengine gives a warning.
* **Streamers.** A streamer gets the prompt's tokens first, then each token. Several prompts are then answered
  one after another.
* **Iterators.** A generator or dataset returns an iterator; prompts are prepared and answered in advance.
  `batch_size` and `num_workers` are accepted and ignored, because all prompts of a call form a batch.
* **Outputs.** `return_dict_in_generate` and `output_scores` are accepted and, as in transformers' pipeline,
  change no record. `logprobs=5` adds the five most likely tokens at each position, with log-probabilities.
* **Time.** The time of `max_time` starts when the engine accepts the prompt. When it has passed, the text
  so far is the answer.
* **Structured output.** `suppress_tokens`, `bad_words_ids` and `no_repeat_ngram_size` cannot be combined with
  `response_format=` or `grammar=`: they could exclude required tokens.
* **Special tokens.** If a message contains the name of a special token, mmengine treats the name as text, and
  transformers as the token.
* **URLs.** transformers fetches every URL. mmengine refuses URLs unless `processor_kwargs`, of the call or of
  the pipeline, has the option `urls`. `{{"urls": True}}` allows `https://` URLs of all hosts, and a list such
  as `["images.example.org", "*.example.net"]` only these hosts. A
  `mmengine.MediaFetcher(mmengine.FetchLimits(…))` as the option's value has its own limits. mmengine never
  connects to a private address, and limits time, bytes and redirects ([rules](http.md#media-by-url)).

## All calls

`generate(…)` means `pipe(hello, generate_kwargs={{…}})`, with `max_new_tokens` 16 unless a length is given.
`configured(…)` is the same with a `GenerationConfig(…)`, `made(…)` is a pipeline created with these options,
`streamed(…)` is a call with a streamer of the given class, and `tokens(…)` is a call with
`return_tensors=True`. The other names are defined in `tests/serve/pipeline_names.py`.
"""


def page():
    """Return the page's text."""
    counts = Counter(call.outcome for call in CALLS)
    text = HEAD.format(
        count=len(CALLS),
        **{name: counts[name] for name in WORDS},
        differences=_rows("differs", "why"),
        refusals=_rows("refused", "use"),
    )
    for group in dict.fromkeys(call.group for call in CALLS):
        rows = [f"| `{_cell(call.code)}` | {WORDS[call.outcome]} |" for call in CALLS if call.group == group]
        text += "\n".join([f"\n### {group}\n", "| call | outcome |", "|---|---|", *rows]) + "\n"
    return text


def _rows(outcome, heading):
    rows = [f"| `{_cell(call.code)}` | {call.note} |" for call in CALLS if call.outcome == outcome]
    return "\n".join([f"| call | {heading} |", "|---|---|", *rows])


def _cell(code):
    return code.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
