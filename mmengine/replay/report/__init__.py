"""A log as one page that a browser shows without a network.

log ──► collect.py (columns by step, segments by request) ──► page.py (HTML, one file)
                                                                ▲
                                          page.html, page.css, *.js of this folder
"""

from mmengine.replay.report.page import write_report

__all__ = ["write_report"]
