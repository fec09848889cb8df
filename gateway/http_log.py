"""aiohttp's server log without what any client can flood it with: bad HTTP, and connections that end early."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import PayloadAccessError, RequestPayloadError

log = logging.getLogger("gateway.http")

_CLIENT_ERRORS = (HttpProcessingError, RequestPayloadError, PayloadAccessError, ConnectionError)


def quiet_server_log() -> logging.Logger:
    """aiohttp's own logger; what clients got wrong leaves a line at level debug instead of a traceback as an error."""
    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(_not_by_a_client)
    return logger


def _not_by_a_client(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, _CLIENT_ERRORS):
        return True
    log.debug("bad HTTP: %s", repr(error)[:200])
    return False
