"""Simulates an engine: the real engine loop runs a workload file with a fake model.

    workload (scenario, requests, trace) ──► Driver ──► EngineCore ──► FakeExecutor
                                               │                          │
                                               └──► Recorder (decisions)  └──► Meter (latencies)

The simulation does not need torch. A cost model provides the simulated time, in integer ns, so a run gives
the same result on every machine.
"""

from mmengine.simulation.driver import Driver, SimulationReport
from mmengine.simulation.records import first_difference, read_records
from mmengine.simulation.settings import Settings, read_settings
from mmengine.simulation.workload import SimRequest, Workload

__all__ = [
    "Driver",
    "Settings",
    "SimRequest",
    "SimulationReport",
    "Workload",
    "first_difference",
    "read_records",
    "read_settings",
]
