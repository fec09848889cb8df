"""`python tiny_service.py PORT [--grandchild PIDFILE] [--deaf] [--not-ready] …`: a service small enough to kill often.

Answers 200 at /health on 127.0.0.1:PORT and ends on SIGTERM; GET /crash makes it exit with status 3. When FILE is
there, `--not-ready-if FILE` answers 503, and `--dies-late-if FILE` exits with status 4 after DIES_AFTER_S.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

DIES_AFTER_S = 0.3


def asked(flag: str) -> bool:
    """The file that follows the flag is there."""
    return flag in sys.argv and Path(sys.argv[sys.argv.index(flag) + 1]).exists()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/crash":
            print("about to crash", flush=True)
            os._exit(3)
        self.send_response(503 if "--not-ready" in sys.argv or asked("--not-ready-if") else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if "--grandchild" in sys.argv:
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        pidfile = Path(sys.argv[sys.argv.index("--grandchild") + 1])
        temporary = pidfile.with_suffix(".tmp")
        temporary.write_text(f"{os.getpid()} {grandchild.pid}")
        temporary.replace(pidfile)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--deaf" in sys.argv else lambda *_: sys.exit(0))
    if asked("--dies-late-if"):
        time.sleep(DIES_AFTER_S)
        sys.exit(4)
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print("2026-01-01T00:00:00.000Z WARNING tiny tiny.service: serving", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
