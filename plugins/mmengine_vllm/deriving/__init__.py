"""Lets vLLM's own scheduler derive a recorded log's decisions, or serve the log's requests, without a model.
Imports vLLM.

`scheduler_alone` builds vLLM's objects and imports nothing of mmengine. `settings` reads vLLM's settings from
a log. `own_scheduler` makes the decisions for `mmengine log verify --with vllm`.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # otherwise vLLM prints its settings to stdout
