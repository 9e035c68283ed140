"""Renders a log as a single HTML file, which a browser can show without a network.

log ──► collect.py (columns by step, segments by request) ──► page.py (HTML, a single file)
                                                                ▲
                                    page.html, page.css, *.js in this folder
"""

from mmengine.replay.report.page import write_report

__all__ = ["write_report"]
