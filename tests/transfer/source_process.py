"""`python -m tests.transfer.source_process [DIES_AFTER]`: a worker that has computed PROMPT, and says where in a line.

DIES_AFTER: it kills itself between its first read of that layer and the check. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from gpu_worker.transfer.transports import GRPC, SHM
from tests.transfer.peers import peer


async def serve(dies_after: int | None) -> None:
    def after_read(layer: int) -> None:
        if layer == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    transports = (SHM, GRPC) if dies_after is None else (GRPC,)
    async with peer(worker_id="source", transports=transports, after_read=after_read) as source:
        await source.compute()
        print(json.dumps({"address": source.worker.address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else None))
