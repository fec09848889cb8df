"""`python -m tests.deploy.redis_cli -p PORT ping`: what the Redis image's redis-cli does in its health check."""

from __future__ import annotations

import sys

from phasemesh.redis_server import ping

if __name__ == "__main__":
    assert sys.argv[1] == "-p" and sys.argv[3:] == ["ping"]
    sys.exit(ping(f"redis://127.0.0.1:{sys.argv[2]}/0"))
