"""vLLM's own scheduler derives a recorded log, or serves its requests, without a model. Imports vLLM.

`scheduler_alone` builds vLLM's objects and imports nothing of mmengine; `settings` reads them from a log.
`own_scheduler` is the decision function of `mmengine log verify --with vllm`.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM prints its settings to stdout otherwise
