"""Runs mmengine's core as vLLM's scheduler: the core decides and writes the log, vLLM's workers execute.

`scheduler.py` implements vLLM's SchedulerInterface. `settings.py` and `requests.py` translate vLLM's
configuration and requests. `worker_steps.py` translates a step's plan into a SchedulerOutput.
`step_results.py` translates the workers' results into a StepResult, and `outputs.py` translates the core's
outputs into vLLM's outputs.
"""
