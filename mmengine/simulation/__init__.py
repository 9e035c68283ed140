"""Simulation: the engine's own loop on a workload from a file, with an arithmetic model.

    workload (scenario, requests, trace) ──► Driver ──► EngineCore ──► FakeExecutor
                                               │                          │
                                               └──► Recorder (decisions)  └──► Meter (latencies)

The simulation needs no torch. A cost model's clock gives the time in integer ns, so a run is the same on any
machine.
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
