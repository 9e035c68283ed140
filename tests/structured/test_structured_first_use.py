"""Test that several threads can decode tool calls at the same time, although no thread in this process has
decoded tool calls before.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = """
import os, sys, threading
from mmengine.structured_output.request import tool_calls

sys.setswitchinterval(1e-6)
source = '{"format": "json", "tools": [{"name": "a", "schema": {}}]}'
died = 0
for _ in range(40):
    if not (pid := os.fork()):
        begin = threading.Barrier(4)

        def read():
            begin.wait()
            tool_calls.read_tool_calls.__wrapped__(source)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    died += os.waitpid(pid, 0)[1] != 0
print(died, "died")
"""


def test_first_use_of_types_by_several_threads():
    ran = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "0 died\n", ran.stderr
