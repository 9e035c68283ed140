"""Tests vLLM's rules that differ from ours. Each test runs a small scenario under vLLM's rules and under
ours.
"""

from pathlib import Path

import pytest
from simulated import request, run, write_scenario

from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.simulation import first_difference, read_records

THEIRS = sorted((Path(__file__).parent / "scenarios" / "vllm").glob("*.json"))
GRAMMAR = {"ranges": [[2000, 2010]]}


def both(folder, requests, **more):
    """Return the records under compat="vllm" and under our rules. All requests must end in both runs."""
    path = write_scenario(folder, requests, **more)
    runs = [run(path, compat=compat) for compat in ("vllm", "")]
    assert not any(report.unfinished for report, _, _ in runs)
    return [records for _, records, _ in runs]


def first(records, field):
    """Return the first record that has the field."""
    return next(record for record in records if record.get(field))


def test_a_preempted_request_goes_to_the_front_of_the_queue(tmp_path):
    """`a` needs a block for its 17th token, so `b` is preempted. `g` arrived before `b` and still waits."""
    requests = [request("g", grammar=GRAMMAR), request("a", 12, out=12), request("b", 12, out=12)]
    events = [{"step": 8, "op": "grammar_ready", "id": "g"}]
    config = {"num_blocks": 4, "max_model_len": 32}
    theirs, ours = both(tmp_path, requests, config=config, events=events)
    assert first(theirs, "preempt")["preempt"] == first(ours, "preempt")["preempt"] == ["b"]
    assert first(theirs, "preempt")["waiting"] == ["b", "g"]
    assert first(ours, "preempt")["waiting"] == ["g", "b"]


def test_a_chunk_stays_as_it_was_cut_before_someone_gave_way(tmp_path):
    """In a step with 32 tokens, `v` gets one token, and `a` gets a chunk with 31. `a` lacks blocks, so the
    less important `v` is preempted. vLLM keeps the chunk's length. Our rules decide all rows again.
    """
    requests = [request("v", 30, out=5, priority=5), request("a", 80, at=1)]
    config = {"policy": "priority", "num_blocks": 11, "max_model_len": 88, "reserve_full_prompt": False}
    theirs, ours = both(tmp_path, requests, config=config)
    assert first(theirs, "preempt")["preempt"] == first(ours, "preempt")["preempt"] == ["v"]
    assert first(theirs, "preempt")["sched"] == [["a", 31]]
    assert first(ours, "preempt")["sched"] == [["a", 32]]


@pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
def test_decisions_are_vllms(path, tmp_path):
    """The expected decisions were checked by hand against vLLM 0.33's behaviour in similar scenarios."""
    _, records, _ = run(path, compat="vllm", log=LogWriter(tmp_path / "log"))
    assert first_difference(read_records(path), records, soft=True) == ""
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived and not report.unfinished


def test_a_row_that_preempts_itself_lets_later_rows_run(tmp_path):
    """`x` needs a block and is the least important request. `y` needs no block."""
    requests = [request("x", 14, out=8, priority=9), request("y", 12, out=8, at=1)]
    config = {"policy": "priority", "num_blocks": 4, "max_model_len": 32}
    for records in both(tmp_path, requests, config=config):
        assert first(records, "preempt")["preempt"] == ["x"]
        assert first(records, "preempt")["sched"] == [["y", 1]]


def test_an_eviction_stands_though_the_blocks_do_not_fit(tmp_path):
    """`b` needs encoder cache space for its picture, and blocks that `a` holds. vLLM evicts `old` before
    checking the free blocks.
    """
    image = {"prompt": [["img", 16], ["gen", "b", 40, 0]], "images": [[0, 16, "new"]]}
    requests = [
        request("a", 20, out=10),
        request("r", out=1, at=1, prompt=[["img", 16], ["gen", "r", 4, 0]], images=[[0, 16, "old"]]),
        request("b", at=3, **image),
    ]
    config = {"num_blocks": 8, "max_model_len": 64, "encoder_cache_size": 16}
    theirs, ours = both(tmp_path, requests, config=config)
    assert first(theirs, "enc_evict")["step"] == 3 and "admit" not in first(theirs, "enc_evict")
    assert first(ours, "enc_evict")["step"] > 3 and first(ours, "enc_evict")["admit"] == {"b": 0}


def test_one_with_one_token_left_is_padded_beside_decodes(tmp_path):
    """All tokens of `b` but the last are prefix cache hits. vLLM schedules a placeholder draft, which is not
    accepted.
    """
    requests = [
        request("a", out=10, prompt=[["gen", "k", 17, 0]]),
        request("b", out=2, at=2, prompt=[["gen", "k", 17, 0]]),
    ]
    theirs, ours = both(tmp_path, requests, config={"num_spec_tokens": 1, "spec_method": "ngram"})
    for records, num_tokens in ((theirs, 2), (ours, 1)):
        record = records[2]
        assert record["admit"] == {"b": 16} and record["sched"][-1] == ["b", num_tokens]
        assert record.get("spec", {}).get("b", 0) == num_tokens - 1 and len(record["out"]["b"]) == 1


def test_one_with_one_token_left_is_padded_when_it_comes_alone(tmp_path):
    """All tokens of `b` but the last are prefix cache hits, and no other row runs. The single-token prompt of
    `c` gets no placeholder draft.
    """
    prompt = [["gen", "k", 17, 0]]
    requests = [request("a", out=1, prompt=prompt), request("b", at=2, prompt=prompt), request("c", 1, at=9)]
    theirs, ours = both(tmp_path, requests, config={"num_spec_tokens": 1, "spec_method": "ngram"})
    assert [record["sched"] for record in theirs if "admit" in record] == [
        [["a", 17]],
        [["b", 2]],
        [["c", 1]],
    ]
    assert [record["sched"] for record in ours if "admit" in record] == [[["a", 17]], [["b", 1]], [["c", 1]]]


def test_blocks_of_a_broken_request_are_kept(tmp_path):
    """vLLM keeps the blocks in the prefix cache, because the KV is right although a token breaks the grammar.
    Our rules drop the blocks, as after NaN logits.
    """
    prompt = [["gen", "k", 17, 0]]
    requests = [
        request("bad", grammar=GRAMMAR, inject_bad_at=0, prompt=prompt),
        request("b", at=2, prompt=prompt),
    ]
    events = [{"step": 0, "op": "grammar_ready", "id": "bad"}]
    theirs, ours = both(tmp_path, requests, events=events)
    assert theirs[-3]["admit"] == {"b": 16} and ours[-3]["admit"] == {"b": 0}


def test_a_prompt_is_admitted_without_slots_for_drafts(tmp_path):
    """The 16 tokens of `b` fit into two blocks; three draft slots would need a third block. vLLM reserves
    draft slots only after the first chunk, which has 8 tokens.
    """
    requests = [request("a", 24, out=8), request("b", 16, out=2, at=1)]
    config = {"num_spec_tokens": 3, "spec_method": "eagle3", "num_blocks": 6, "max_model_len": 40}
    config |= {"max_num_seqs": 2, "long_prefill_token_threshold": 8}
    theirs, ours = both(tmp_path, requests, config=config)
    assert first(theirs[1:], "admit")["step"] < first(ours[1:], "admit")["step"]


@pytest.mark.parametrize("compat", ["", "vllm"])
def test_a_reset_without_running_requests_preempts_none_later(tmp_path, compat):
    events = [{"step": 0, "op": "reset_prefix_cache", "reset_running": True}]
    path = write_scenario(tmp_path, [request("a", at=1)], events=events)
    _, records, _ = run(path, compat=compat)
    assert not any("preempt" in record for record in records)


def picture(name, content, **more):
    return request(name, prompt=[["img", 8], ["gen", name, 10, 0]], images=[[0, 8, content]], **more)


def test_a_leaving_request_releases_its_blocks_before_its_tokens_are_applied(tmp_path):
    """`b` is aborted in step 1. After step 1, both pictures can be evicted. vLLM releases `b`'s picture
    before `a`'s, and therefore evicts `b`'s picture first.
    """
    requests = [picture("a", "first"), picture("b", "second"), picture("c", "third", at=2)]
    events = [{"step": 1, "op": "abort", "id": "b", "when": "before_update"}]
    config = {"long_prefill_token_threshold": 6, "encoder_cache_size": 20}
    theirs, ours = both(tmp_path, requests, config=config, events=events)
    assert first(theirs, "enc_evict")["enc_evict"] == ["second"]
    assert first(ours, "enc_evict")["enc_evict"] == ["first"]
    assert "b" not in theirs[1].get("out", {}) and theirs[1]["free_after"] > theirs[1]["free"]


@pytest.mark.parametrize("drafts", [{}, {"num_spec_tokens": 3, "spec_method": "eagle3"}])
def test_a_log_with_leaving_requests_verifies(tmp_path, drafts):
    """`b` is aborted during decoding."""
    requests = [request("a", out=20), request("b", out=20), request("c", at=5, out=4)]
    events = [{"step": 4, "op": "abort", "id": "b", "when": "before_update"}]
    path = write_scenario(tmp_path, requests, config=drafts, events=events)
    sink = LogWriter(tmp_path / "log")
    _, records, _ = run(path, compat="vllm", log=sink)
    sink.close()
    assert [name for name, _ in records[4]["sched"]] == ["a", "b"] and list(records[4]["out"]) == ["a"]
    kinds = [type(record.event).__name__ for record in LogReader(tmp_path / "log")]
    left = kinds.index("Cancelled")
    assert kinds[left : left + 3] == ["Cancelled", "Finished", "Executed"]
    report = verify(tmp_path / "log")
    assert report.ok and not report.unfinished, report.divergence


@pytest.fixture
def equal_blocks(tmp_path):
    """Return requests and settings. `a` and `b` fill equal blocks in the same step. In `a`, a picture
    follows the block. Then `b` ends. `c` hits one of the two blocks.
    """
    prompt = [["gen", "Q", 8, 0], ["img", 6], ["gen", "a", 2, 0]]
    requests = [
        request("a", prompt=prompt, images=[[8, 6, "cat"]], out=9),
        request("b", prompt=[["gen", "Q", 8, 0]], out=1),
        request("c", prompt=[["gen", "Q", 9, 0]], at=4),
    ]
    return requests, {"long_prefill_token_threshold": 5}


def test_of_equal_blocks_that_of_the_row_served_first_is_hit(tmp_path, equal_blocks):
    requests, config = equal_blocks
    theirs, ours = both(tmp_path, requests, config=config)
    assert [records[1]["sched"] for records in (theirs, ours)] == [[["a", 5], ["b", 3]]] * 2
    assert [records[4]["admit"] for records in (theirs, ours)] == [{"c": 8}] * 2
    # vLLM hits the block that `a` still holds; our rules take the free block of `b`
    assert (theirs[4]["free"], ours[4]["free"]) == (60, 59)


def test_a_failed_grammar_ends_its_request_after_the_running_step(tmp_path):
    requests = [request("a", out=9), request("g", grammar=GRAMMAR)]
    events = [{"step": 3, "op": "grammar_error", "id": "g"}]
    theirs, ours = both(tmp_path, requests, events=events)
    assert (theirs[3]["waiting"], ours[3]["waiting"]) == (["g"], [])
    assert theirs[3]["finish"] == ours[3]["finish"] == {"g": "error"}
    alone = write_scenario(tmp_path, requests[1:], events=events)
    for compat in ("vllm", ""):
        _, records, _ = run(alone, compat=compat)
        assert records[-1]["finish"] == {"g": "error"}


def test_the_trace_of_the_docs():
    """A table in docs/explanation/policies.md shows the steps under our rules and under vLLM's."""
    path = Path(__file__).parents[2] / "examples" / "priority_preemption.json"
    table = (path.parents[1] / "docs" / "explanation" / "policies.md").read_text()
    (_, theirs, _), (_, ours, _) = run(path, compat="vllm"), run(path)
    assert f"| | {len(ours)} steps | {len(theirs)} steps | |" in table
    assert first(theirs, "preempt")["preempt"] == first(ours, "preempt")["preempt"] == ["backlog"]
    for step in (2, 3, 4, 5, 6):
        cells = [
            ", ".join(f"{name} {count}" for name, count in decided[step]["sched"])
            for decided in (ours, theirs)
        ]
        assert f"| {step} | {cells[0]} | {cells[1]} |" in table
