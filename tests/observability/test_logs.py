"""One record, one line, whatever is logged."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from observability.logs import LineFormatter


def line(message: str, *args: object, multiline: bool = False, exc_info: bool = False, **extra: object) -> str:
    """What a service's handler would write for one call."""
    formatter = LineFormatter("gateway", multiline_tracebacks=multiline)
    logger = logging.Logger("gateway.http")
    written: list[str] = []

    class Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler = Capture()
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.warning(message, *args, exc_info=exc_info, extra=extra)
    (text,) = written
    return text


def after_time(text: str) -> str:
    return text.split(" ", 1)[1]


def test_a_record_is_time_level_service_logger_message() -> None:
    text = line("request %s finished", "r1")
    assert after_time(text) == "WARNING gateway gateway.http: request r1 finished"
    assert len(text.split(" ")[0]) == len("2026-03-04T05:06:07.089Z")
    assert text.split(" ")[0].endswith("Z")


def test_extras_are_shown_as_key_value_and_quoted_when_needed() -> None:
    text = line("finished", status=200, reason='client "left"', empty="", path="/v1", n=None)
    assert after_time(text) == (
        'WARNING gateway gateway.http: finished status=200 reason="client \\"left\\"" empty="" path=/v1 n=None'
    )


def test_a_traceparent_is_shown_as_its_trace_id() -> None:
    traced = line("finished", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    assert traced.endswith("finished trace_id=0af7651916cd43dd8448eb211c80319c")
    assert line("finished", traceparent="").endswith("finished")


@pytest.mark.parametrize("hostile", ["a\nERROR forged", "a\r\nb", "\n"])
def test_no_input_can_forge_a_second_line(hostile: str) -> None:
    for text in (line(hostile), line("x", prompt=hostile), line("%s", hostile, multiline=True)):
        assert len(text.splitlines()) == 1


def test_terminal_control_sequences_are_escaped() -> None:
    assert line("\x1b[2J").endswith("\\x1b[2J")
    assert 'user="\\u001b[2J"' in line("x", user="\x1b[2J")


def test_a_traceback_keeps_its_lines_only_where_asked_for() -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        single, multi = line("failed", exc_info=True), line("failed", exc_info=True, multiline=True)
    assert len(single.splitlines()) == 1
    assert single.endswith("RuntimeError: boom")
    assert len(multi.splitlines()) > 3
    assert multi.splitlines()[0].endswith("gateway.http: failed")


def test_setup_sends_records_and_warnings_to_standard_error_at_the_level() -> None:
    code = (
        "import logging, warnings; from observability.logs import setup_logging\n"
        "setup_logging('worker', 'debug'); setup_logging('worker', 'info')\n"
        "log = logging.getLogger('gpu_worker.main')\n"
        "log.debug('hidden'); log.info('shown', extra={'port': 1}); warnings.warn('careful')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=30, capture_output=True, text=True)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert after_time(first) == "INFO worker gpu_worker.main: shown port=1"
    assert after_time(second).startswith("WARNING worker py.warnings: ")
    assert "UserWarning: careful" in second
