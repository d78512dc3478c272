"""The package's log lines are seen without any setting up.

The start table is of no use in a logger that nobody listens to, and few training scripts configure logging. So
``hf_memopt`` writes to stderr from level INFO, unless the program has given the root logger handlers of its own: then
the lines go there, once. ``HF_MEMOPT_VERBOSITY`` (debug, info, warning, error, silent) sets the level.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "HF_MEMOPT_VERBOSITY"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "silent": logging.CRITICAL + 1,
}


class _StderrHandler(logging.StreamHandler):
    """Writes to what ``sys.stderr`` is at that moment, unless the root logger has handlers."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    @property
    def stream(self):
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def configure_logging() -> None:
    """Give the logger ``hf_memopt`` its handler and level. May be called any number of times.

    Raises:
        ValueError: ``HF_MEMOPT_VERBOSITY`` is set to something else than a level.
    """
    logger = logging.getLogger("hf_memopt")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
    level = os.environ.get(VARIABLE, "info").strip().lower() or "info"
    if level not in LEVELS:
        raise ValueError(f"{VARIABLE}={level!r} is not a level: choose one of {', '.join(LEVELS)}.")
    logger.setLevel(LEVELS[level])
