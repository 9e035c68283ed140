"""Programs that measure mmengine; `python -m benchmarks` lists them. They are not part of the wheel."""
