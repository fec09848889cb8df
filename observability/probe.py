"""`python -m observability.probe URL`: exit 0 when URL answers 200. The health check of our containers.

Standard library only and quick to import: it runs every few seconds beside a busy service.
"""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def probe(url: str) -> str | None:
    """None when an http:// URL answers 200, else why not. Raises ValueError for what is not such a URL."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r}: not an http:// URL")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=TIMEOUT_S)
    try:
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        response = connection.getresponse()
        if response.status == 200:
            return None
        return f"{url}: {response.status} {response.read(500).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {error!r}"
    finally:
        connection.close()


def main(argv: list[str]) -> int:
    """Exit status: 0 healthy, 1 not, 2 wrong usage."""
    if len(argv) != 1:
        print("usage: python -m observability.probe URL", file=sys.stderr)
        return 2
    try:
        problem = probe(argv[0])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
