"""The script that `build_probe.py` runs with another build's Python interpreter. It answers each line of JSON
with a line of JSON.

    {"verify": LOG}              {"step": …, …}: the first decision that differs; {"steps": …} if none differs
    {"serve": FILE, "into": LOG} {}, after it served the file's requests and wrote their log

The first output line identifies the build. `argv[1]`, if given, is the checkout whose mmengine is used. The
other build may be older than this file. Therefore the script uses few names from mmengine, and reports an
error if the other build lacks a name.
"""

import json
import os
import sys
from pathlib import Path
from typing import TextIO

Answer = dict[str, object]


def who() -> Answer:
    from mmengine import version
    from mmengine.core.decide import scheduler as schedule

    place = str(Path(version.__file__).parent)
    return {"version": version.__version__, "rules": schedule.DECISION_VERSION, "place": place}


def parting(log: str) -> Answer:
    """Derive the log's decisions with the build that runs this script, and return the first decision that
    differs from the log. A log that this build cannot read counts as different.
    """
    from mmengine.errors import CorruptLog
    from mmengine.events.codec import Record
    from mmengine.replay.verify import verify

    step = 0

    def follow(record: Record) -> None:
        nonlocal step
        step = record.step

    try:
        report = verify(Path(log), follow)
    except CorruptLog as error:
        return {"step": step, "what": str(error)}
    if not report.rederived:
        version = report.logged_version
        return {"error": f"it cannot derive the decisions of a log with version {version} of the rules"}
    found = report.divergence
    if found is None:
        return {"steps": report.steps}
    sides = (str(found.logged)[:100], str(found.derived)[:100])
    return {"step": found.step, "event": found.event, "field": found.field, "sides": sides}


def serve(path: str, folder: str) -> Answer:
    """Run the requests in the file that `build_probe.py` wrote, and write their log to `folder`."""
    import msgspec
    import numpy as np

    from mmengine.config import EngineConfig
    from mmengine.events import vocabulary
    from mmengine.replay.minimize.failures import write_log
    from mmengine.replay.rerun.script import Answer, Observation, Script

    config, observations, answers, failed_steps = msgspec.msgpack.decode(Path(path).read_bytes())
    script = Script(EngineConfig.from_dict(config))
    for step, landed, kind, event in observations:
        event = msgspec.msgpack.decode(event, type=getattr(vocabulary, kind))
        script.observations.append(Observation(step, landed, 0, event))
    for name, tokens, stop, error, runs in answers:
        runs = np.frombuffer(runs, np.int32).reshape(-1, 3)
        script.answers[name] = Answer(np.frombuffer(tokens, np.int32), stop, error, runs)
    script.failed_steps = dict(failed_steps)
    write_log(script, "stalled", Path(folder))
    return {}


def say(answers: TextIO, answer: Answer) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def in_words(error: Exception) -> Answer:
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _is_editable(finder: object) -> bool:
    return str(getattr(finder, "__module__", "")).startswith("__editable__")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # All printed text goes to stderr, because stdout carries the answers.
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
        # A module that is missing in the checkout must not be imported from a build that is installed here in
        # editable mode.
        sys.meta_path[:] = [each for each in sys.meta_path if not _is_editable(each)]
    try:
        say(answers, who())
    except Exception as error:
        say(answers, in_words(error))
        return
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(
                answers,
                serve(asked["serve"], asked["into"]) if "serve" in asked else parting(asked["verify"]),
            )
        except Exception as error:
            say(answers, in_words(error))


if __name__ == "__main__":
    main()
