"""A debugger for logs. It moves to any position in a log, forward or back, and shows the engine's state
there.

    folder ──► records.py, saved/ ──► navigator.py (a position and its state)
                                            ▲
               debugger.py (goto, step, continue, last write) ──► commands/ ──► a terminal or a page

This package does not depend on HTTP, asyncio or a terminal.
"""

from mmengine.replay.debug.debugger import Debugger, open_debugger

__all__ = ["Debugger", "open_debugger"]
