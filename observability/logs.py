"""Logging of a service: one line per record on standard error, `key=value` for the extras.

    2026-03-04T05:06:07.089Z INFO gateway gateway.http: finished status=200 ms=812 trace_id=0af7651916cd43dd8448eb21…

Extras are whatever a call passes: `log.info("finished", extra={"status": 200, "traceparent": span.traceparent})`.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_NOT_EXTRAS = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}


class LineFormatter(logging.Formatter):
    """One record, one line: newlines and terminal escapes are escaped, so no input can forge a record. UTC.

    Only a traceback keeps its lines, and only where asked for: on a terminal.
    """

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, service: str, *, multiline_tracebacks: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
        self._multiline_tracebacks = multiline_tracebacks

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        lines = [_one_line(" ".join([self.formatMessage(record), *_extras(record)]))]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(self.formatStack(record.stack_info))
        text = "\n".join(lines)
        return text if self._multiline_tracebacks else _one_line(text)


_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\x1b": "\\x1b"})


def _one_line(text: str) -> str:
    return text.translate(_ESCAPES)


def _extras(record: logging.LogRecord) -> list[str]:
    """`key=value` of each extra, in the order given; a traceparent shows as its trace id, absent when empty."""
    shown = []
    for key, value in vars(record).items():
        if key == "traceparent":
            if value:
                shown.append(f"trace_id={_quoted(value[3:35])}")
        elif key not in _NOT_EXTRAS:
            shown.append(f"{key}={_quoted(str(value))}")
    return shown


def _quoted(text: str) -> str:
    plain = text and text.isprintable() and not any(c in text for c in ' ="')
    return text if plain else json.dumps(text, ensure_ascii=False)


def setup_logging(service: str, level: str) -> None:
    """Send every logger's records, and Python's warnings, to standard error.

    level: debug | info | warning | error. Replaces whatever was set up before.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(service, multiline_tracebacks=sys.stderr.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
