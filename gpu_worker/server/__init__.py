"""The worker's gRPC server: one scheduler session at a time."""

from gpu_worker.server.service import WorkerService, bind_server, serving

__all__ = ["WorkerService", "bind_server", "serving"]
