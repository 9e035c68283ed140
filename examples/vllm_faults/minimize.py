"""Minimizes a recorded log by serving fewer and smaller requests on the scheduler class that wrote the log.

    python -m examples.vllm_faults.minimize LOG examples.vllm_faults.priority_victim:PreemptsTheNewest OUT

`mmengine log minimize` leaves requests out of the recorded decisions, which only keeps broken invariants.
Here each candidate is served on vLLM's scheduler without a model, recorded, and verified. So a wrong choice
among valid ones remains, too. OUT gets the smallest log and a pytest file that needs vLLM, but no model.
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path

from examples.vllm_faults.served_script import serve
from mmengine.replay import verify
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.minimize.failures import Failure
from mmengine.replay.minimize.minimize import Minimizer
from mmengine.replay.minimize.probe import TestParts
from mmengine.replay.minimize.reproduction import refuse_used, reproduce
from mmengine.replay.rerun.script import read_script

SECONDS = 60
MAX_STEPS = 2000


class VllmProbe:
    """Looks for a difference between the decisions of a scheduler class and the rules of its version.

    `name`: module and class, such as "vllm.v1.core.sched.scheduler:Scheduler".
    """

    def __init__(self, name):
        module, _, attribute = name.partition(":")
        self.name, self._class = name, getattr(import_module(module), attribute)

    def of_script(self, script, max_steps=MAX_STEPS):
        with tempfile.TemporaryDirectory() as folder:
            serve(script, self._class, Path(folder) / "log", min(max_steps, MAX_STEPS))
            return self.of_log(Path(folder) / "log")

    def write(self, script, folder):
        serve(script, self._class, folder, MAX_STEPS)

    def of_log(self, folder):
        report = verify(folder)
        if (found := report.divergence) is not None:
            return Failure("divergence", f"{found.field}: {found.rule}", found.step)
        if report.left_over:
            return Failure("stalled", "the rules schedule requests that the log leaves waiting", report.steps)
        return None

    def replay(self, log):
        """Serve a log's requests again and return the failure, or None."""
        return self.of_script(read_script(Path(log)))

    def test(self, failure):
        body = f'    failure = VllmProbe("{self.name}").replay(log)\n    assert failure is None, failure'
        title = "vLLM's scheduler decides these requests unlike the rules of its version."
        return TestParts(failure.kind, title, f"from {__spec__.name} import VllmProbe\n", body)


def main(log, name, out):
    deadline, probe = Deadline(SECONDS), VllmProbe(name)
    refuse_used(out)
    script = read_script(log)
    minimizer = Minimizer(script, probe.of_script, deadline=deadline)
    print(f"the log fails: {minimizer.failure}")
    small = minimizer.minimize()
    test = reproduce(small, minimizer.failure, probe, out, len(script.requests))
    print(f"{len(script.requests)} requests became {len(small.requests)}")
    print(f"the failure is now {minimizer.failure}")
    print(f"{minimizer.tried} candidates in {deadline.passed():.1f} s")
    print(f"wrote {test.with_name('log')} and {test}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
