"""Records a scheduler of vLLM without a model. Requires the environment of `make vllm`."""

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from vllm.version import __version__

from mmengine_vllm.hooks import RecordsCalls
from tests.vllm.model_free import drive


def recording_class(fault):
    """Return a subclass that records its calls. `fault`: vLLM's scheduler class or a subclass."""
    return type(f"Recorded{fault.__name__}", (RecordsCalls, fault), {"host_version": __version__})


def new_log():
    """Return the folder for the recorder's next log: the script's first argument, or a new folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "vllm.log"
    os.environ["MMENGINE_LOG"] = str(folder)
    return folder


def mmengine_log(verb, folder, *options):
    """Run `mmengine log VERB FOLDER` and return its exit code; the command prints its result."""
    print(f"$ mmengine log {verb} {folder} {' '.join(options)}".rstrip(), flush=True)
    command = [sys.executable, "-m", "mmengine", "log", verb, str(folder), *options]
    return subprocess.run(command, check=False).returncode


def record_random_requests(fault, seed, **settings):
    """Record a scheduler with the random requests of `drive`, and return the log's folder. The recording ends
    early if an assertion in vLLM fails.
    """
    folder = new_log()
    try:
        number, preempted = drive(recording_class(fault), seed, **settings)
        print(f"{number} requests, {preempted} preemptions")
    except AssertionError as error:
        print(f"an assertion of vLLM failed: {traceback.extract_tb(error.__traceback__)[-1].line}")
    return folder
