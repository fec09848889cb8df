"""What the HTTP handlers work with, assembled once at start and kept in the application under one key."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from gateway.api.body import BodyReader
from gateway.auth import ApiKeys
from gateway.cell import CellWatch
from gateway.mesh import Mesh
from gateway.replies import ReplyReader
from gateway.running import Running
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.text.tokenizer_pool import TokenizerPool
from observability.metrics import GatewayMetrics
from observability.tracing import Tracer
from wire.entries import CellCard
from wire.errors import Unavailable
from wire.ids import GatewayId


@dataclass(frozen=True, slots=True)
class TextSide:
    """Everything that sees text."""

    tokenizer: Tokenizer
    pool: TokenizerPool
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Parts:
    gateway_id: GatewayId
    model_name: str
    default_max_tokens: int | None
    started_unix_s: float
    text: TextSide
    mesh: Mesh
    replies: ReplyReader
    cell: CellWatch
    keys: ApiKeys
    bodies: BodyReader
    running: Running
    metrics: GatewayMetrics
    tracer: Tracer

    def not_ready(self) -> str | None:
        """Why new requests are refused; None when they are not."""
        if self.running.draining:
            return "this gateway is stopping"
        return self.cell.problem or (None if self.replies.attached else "the reply stream cannot be read yet")

    def require_cell(self) -> CellCard:
        """The card of the cell that will serve a request. Raises Unavailable saying why none can now."""
        card, problem = self.cell.card, self.not_ready()
        if problem is not None or card is None:
            raise Unavailable(problem or "no scheduler is active")
        return card


PARTS = web.AppKey("parts", Parts)
