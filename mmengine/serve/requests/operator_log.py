"""Logs events for operators with structlog, through the standard logger `mmengine.operators`.

Nothing is printed until this logger or a parent has a handler:

    logging.basicConfig(level=logging.INFO)

Warnings that a user must see in any case, such as disabled CPU kernels, go to the logger `mmengine.native`.
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
).bind()  # without `bind`, each call would create a new logger
