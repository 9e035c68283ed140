"""Runs the calls in transformers' documentation with transformers' pipeline and with ours.
docs/reference/pipeline.md lists the results.
"""

from contextlib import closing

import pytest

from tests.serve.pipeline_calls import CALLS
from tests.serve.pipeline_page import PAGE, WORDS, page
from tests.serve.pipeline_record import both_sides, read, versions
from tests.serve.pipeline_sides import Sides, outcome_of, transformers_can_run

SAMPLE = (
    "pipe(images=[picture, second_picture, picture], text=[prompt_of_two, prompt], max_new_tokens=12)",
    "pipe(images=base64, text=prompt)",
    "pipe(text=asked({'type': 'image', 'image': turned}))",
    "tokens(asked({'type': 'video_url', 'video_url': {'url': clip}}))",
    "pipe(chat, return_type=1)",
    "streamed(pipe, TextStreamer, chat, skip_prompt=True)",
    "streamed(pipe, TextIteratorStreamer, chat)",
    "streamed(pipe, Recorder, [chat, plain])",
    "tokens(seen, min_pixels=64 * 64, max_pixels=96 * 96)",
    "tokens(filmed, processor_kwargs={'fps': 1})",
    "tokens(filmed, do_sample_frames=False)",
    "pipe(chat, tools=[get_weather])",
    "pipe(chat, tools=tools, chat_template=tool_template)",
    "pipe(chat, add_generation_prompt=False)",
    "list(pipe(text=KeyDataset(listed([{'chat': chat}, {'chat': plain}]), 'chat')))",
    "list(pipe(generated([chat, plain])))",
    "pipe(chat, min_new_tokens=20)",
    "pipe(chat, max_new_tokens=12, stop_sequence='minus', generate_kwargs=dict(min_new_tokens=8))",
    "generate(max_length=20)",
    "generate(no_repeat_ngram_size=2, max_new_tokens=40)",
    "generate(bad_words_ids=[words('pink star'), words('large pink'), [star_id]])",
    "generate(sequence_bias=[[[pink_id, star_id], -20.0], [[pink_id], 8.0]])",
    "configured(max_length=24)",
    "generate(num_beams=4)",
)
RECORD_AGAIN = "python -m tests.serve.pipeline_record"


def assert_outcomes(calls):
    """Run the calls with both pipelines in another process, and check the outcomes.

    Returns transformers' results.
    """
    if not transformers_can_run():
        pytest.skip("transformers' pipeline needs build/torchvision, which make test could not get")
    found = both_sides([call.code for call in calls])
    wrong = {call.code: found[call.code][:3] for call in calls if found[call.code][0] != call.outcome}
    assert not wrong, wrong
    return {code: theirs for code, (*_, theirs) in found.items()}


def test_the_page_says_what_the_table_says():
    # docs/reference/pipeline.md is generated from CALLS.
    assert PAGE.read_text() == page()
    assert len(CALLS) >= 190 and len({call.code for call in CALLS}) == len(CALLS)
    assert all(call.outcome in WORDS for call in CALLS)
    assert all(call.note for call in CALLS if call.outcome in ("differs", "refused"))


def test_the_record_has_each_call():
    assert read()["calls"].keys() == {call.code for call in CALLS}, RECORD_AGAIN
    assert len(set(read()["calls"].values())) > 100


def test_a_sample_of_the_calls(tmp_path):
    """Run a sample of the calls with our pipeline, and compare with transformers' recorded results.

    If an outcome differs from CALLS, or the record was made with other library versions, transformers runs
    too.
    """
    sample = [call for call in CALLS if call.code in SAMPLE]
    assert len(sample) == len(SAMPLE)
    others = [call for call in CALLS if call.code not in SAMPLE and "ReturnType" not in call.code]
    asked = [*sample, *others[::5]]
    assert {call.group for call in asked} == {call.group for call in CALLS}
    record = read()
    theirs = record["calls"]
    with closing(Sides(tmp_path, ours_alone=True)) as sides:
        wrong = [
            call for call in asked if outcome_of(theirs[call.code], sides.ours(call.code)) != call.outcome
        ]
    if wrong:
        assert transformers_can_run(), (wrong, RECORD_AGAIN)
        assert_outcomes(asked)
    elif record["versions"] != versions() and transformers_can_run():
        assert_outcomes(sample)


@pytest.mark.soak
def test_every_call():
    assert assert_outcomes(CALLS) == read()["calls"], RECORD_AGAIN
    assert versions() == read()["versions"], RECORD_AGAIN
