"""Records for whoever operates an engine: structlog over the standard logger `mmengine`.

Silent until that logger, or the root one, gets a handler:

    logging.basicConfig(level=logging.INFO)
"""

import logging

import structlog

logging.getLogger("mmengine").addHandler(logging.NullHandler())

operator_log = structlog.wrap_logger(
    logging.getLogger("mmengine"),
    wrapper_class=structlog.stdlib.BoundLogger,
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
    ],
)
