"""Parses one large body in a process of its own: `python -m gateway.api.json_process`.

stdin: the body. stdout: a pickled pair, (object, None) or (None, the InvalidRequest). Ends by itself with its parent:
a closed pipe is the end of the body.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from gateway.api.json_body import parse_compact
from wire.errors import InvalidRequest


def parse(raw: bytes) -> tuple[dict[str, Any] | None, InvalidRequest | None]:
    try:
        return parse_compact(raw), None
    except InvalidRequest as error:
        return None, error.with_traceback(None)


if __name__ == "__main__":
    pickle.dump(parse(sys.stdin.buffer.read()), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
