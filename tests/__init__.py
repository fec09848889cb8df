"""Every test of the project."""

import os

# gRPC's fork handlers crash a child that subprocess forks with a preexec_fn; read when grpc is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
