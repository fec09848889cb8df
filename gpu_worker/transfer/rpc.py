"""transfer.proto's service, with the parts of a pull as bytes: messages.py copies a chunk's data into a part and out of
it once, protobuf's own code would three times each."""

from __future__ import annotations

from typing import Any

import grpc

from wire import transfer_pb2 as pb
from wire import transfer_pb2_grpc as pb_grpc

_SERVICE: str = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name


def add_source(source: pb_grpc.KvTransferServicer, server: grpc.aio.Server) -> None:
    """Serve it; its Pull writes bytes."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Pull": grpc.unary_stream_rpc_method_handler(source.Pull, request_deserializer=pb.PullRequest.FromString),
        "Confirm": grpc.unary_unary_rpc_method_handler(
            source.Confirm,
            request_deserializer=pb.ConfirmRequest.FromString,
            response_serializer=pb.ConfirmReply.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


class SourceStub:
    """A source, to its puller."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.confirm = pb_grpc.KvTransferStub(channel).Confirm
        self.pull: grpc.UnaryStreamMultiCallable[pb.PullRequest, bytes] = channel.unary_stream(
            f"/{_SERVICE}/Pull", request_serializer=pb.PullRequest.SerializeToString
        )
