"""mmengine's core as vLLM's scheduler: the core decides and writes the log, and vLLM's workers execute.

`scheduler.py` implements vLLM's SchedulerInterface. `settings.py` and `requests.py` translate vLLM's
configuration and requests, `worker_steps.py` translates a step's plan into a SchedulerOutput, and
`step_results.py` the workers' answer into a StepResult and vLLM's outputs.
"""
