"""Records for whoever operates an engine: structlog over the standard logger `mmengine`.

Silent until that logger, or the root one, gets a handler:

    logging.basicConfig(level=logging.INFO)

What a person must see even so, that the CPU kernels are off, goes to `mmengine.native`.
"""

import logging

import structlog

_NAME = "mmengine.operators"
logging.getLogger(_NAME).addHandler(logging.NullHandler())

operator_log = structlog.wrap_logger(
    logging.getLogger(_NAME),
    wrapper_class=structlog.stdlib.BoundLogger,
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
    ],
).bind()  # or each call would make it anew
