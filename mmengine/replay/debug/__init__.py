"""The debugger of logs: moves to any point of a log, forward and back, and shows the state there.

    folder ──► records.py, saved_states.py ──► navigator.py (a position and its state)
                                                   ▲
               debugger.py (goto, step, continue, last write) ──► commands/ ──► a terminal or a page

The package knows neither HTTP, asyncio nor a terminal.
"""

from mmengine.replay.debug.debugger import Debugger, open_debugger

__all__ = ["Debugger", "open_debugger"]
