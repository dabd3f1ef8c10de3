"""Logs as one JSON object a line: what happened, to which path, with which status and how long. Never a payload."""

import json
import logging
import sys
import time
import traceback
from typing import Any

LOGGER = logging.getLogger("rfdlc.serve")
REQUESTS = logging.getLogger("rfdlc.serve.requests")


class JsonLines(logging.Formatter):
    """Fields given as `extra={"fields": {...}}` become the object."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        table = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps({**table, **getattr(record, "fields", {})}, ensure_ascii=False)


def log(event: str, *, level: int = logging.INFO, logger: logging.Logger = LOGGER, **fields: Any) -> None:
    """One line."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})


def log_failure(error: BaseException) -> None:
    """Where it failed and with which kind of error. The message is left out: it may quote what was sent."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames[-6:]]
    log("failure", level=logging.ERROR, error=type(error).__name__, where=where)


def start_logging(quiet: bool) -> None:
    """To standard error; `quiet` leaves out the line of each request that did not fail."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for logger, level in ((LOGGER, logging.INFO), (logging.getLogger("uvicorn.error"), logging.WARNING)):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    REQUESTS.setLevel(logging.ERROR if quiet else logging.INFO)
