"""The way both generation endpoints go: check, tokenize, submit, and answer whole or as server-sent events."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web

from gateway.api.chat import read_chat
from gateway.api.completions import read_completion
from gateway.api.form import Asked, ChoiceText, Form, Head, encode
from gateway.api.options import Options, usable_tokens
from gateway.auth import Tenant
from gateway.errors import CLIENT_LEFT, ERROR_CODE, as_mesh_error, error_body
from gateway.generation import Generation, TextRules, open_generation
from gateway.parts import PARTS, Parts
from gateway.telemetry import Telemetry
from observability import names
from wire.entries import CellCard, RequestEntry, RequestStats
from wire.errors import ModelNotFound
from wire.ids import RequestId

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = web.RequestKey("request_id", str)
"""What the client calls the request, else what we call it."""
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

SSE_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What differs between the two."""

    operation: str
    id_prefix: str
    read: Callable[[dict[str, Any]], Asked]


COMPLETIONS = Endpoint(names.OPERATION_TEXT_COMPLETION, "cmpl", read_completion)
CHAT = Endpoint(names.OPERATION_CHAT, "chatcmpl", read_chat)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, COMPLETIONS)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, CHAT)


async def _generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    parts = request.app[PARTS]
    response_id = RequestId(f"{endpoint.id_prefix}-{secrets.token_hex(16)}")
    client_id = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = client_id if _CLIENT_REQUEST_ID.fullmatch(client_id) else response_id
    telemetry = Telemetry(
        parts.tracer,
        parts.metrics,
        operation=endpoint.operation,
        model=parts.model_name,
        route=request.path,
        request_id=response_id,
        traceparent=request.headers.get("traceparent", ""),
    )
    with telemetry, parts.running.request():
        tenant = parts.keys.tenant_of(request)
        asked = endpoint.read(await parts.bodies.read_object(request))
        options = asked.options
        telemetry.asked(options, tenant.name)
        check_model(options.model, parts)
        card = parts.require_cell()
        options.check_token_ids(card.vocab_size)
        # One token of output at least has to fit as well.
        prompts = await asked.tokenize(parts.text, usable_tokens(card) - 1, card.vocab_size)
        entries = _entries(parts, card, options, prompts, response_id, tenant, telemetry.traceparent)
        head = Head(response_id, int(time.time()), parts.model_name, f"fp_{card.model_revision[:12]}")
        form = asked.form(head, parts.text, prompts)
        async with open_generation(
            entries,
            _text_rules(options, card),
            lane="batch" if options.batch_lane or options.priority < 0 else "interactive",
            predicted_drain_s=card.predicted_drain_s,
            tokenizer=parts.text.tokenizer,
            mesh=parts.mesh,
            replies=parts.replies,
        ) as generation:
            telemetry.admitted(sum(map(len, prompts)), entries[0].sampling.max_tokens)
            if options.stream:
                return await _stream(request, generation, form, telemetry, options.include_usage)
            return await _whole(generation, form, telemetry, len(prompts) * options.num_choices)


def check_model(model: str, parts: Parts) -> None:
    """Raises ModelNotFound."""
    if model != parts.model_name:
        raise ModelNotFound(f"model {model[:64]!r} does not exist; this server has {parts.model_name!r}", param="model")


def _text_rules(options: Options, card: CellCard) -> TextRules:
    eos_ids = () if options.sampling.ignore_eos else card.eos_token_ids
    return TextRules(options.stops, options.include_stop, frozenset((*options.sampling.stop_token_ids, *eos_ids)))


def _entries(
    parts: Parts,
    card: CellCard,
    options: Options,
    prompts: Sequence[list[int]],
    response_id: RequestId,
    tenant: Tenant,
    traceparent: str,
) -> list[RequestEntry]:
    """One mesh request per prompt. Raises InvalidRequest for output that does not fit beside its prompt."""
    parts.mesh.check_size(len(prompts))
    arrived_unix_s = time.time()
    return [
        RequestEntry(
            request_id=RequestId(f"{response_id}-{number}") if len(prompts) > 1 else response_id,
            gateway_id=parts.gateway_id,
            prompt=prompt,
            sampling=options.fitted(len(prompt), card, parts.default_max_tokens),
            num_choices=options.num_choices,
            tenant=tenant.name,
            priority=options.priority,
            arrived_unix_s=arrived_unix_s,
            salt=tenant.cache_salt(options.cache_salt),
            traceparent=traceparent,
        )
        for number, prompt in enumerate(prompts)
    ]


async def _whole(generation: Generation, form: Form, telemetry: Telemetry, num_choices: int) -> web.Response:
    choices = [ChoiceText() for _ in range(num_choices)]
    while not generation.done:
        for piece in await generation.take(telemetry):
            choices[piece.index].add(piece)
    telemetry.answered(generation.stats)
    response = web.json_response(form.whole(choices, generation.usage), dumps=encode)
    if (timing := _server_timing(generation.stats)) is not None:
        response.headers["Server-Timing"] = timing
    return response


def _server_timing(stats: Sequence[RequestStats | None]) -> str | None:
    """Where the time went, of the prompt that took longest in each phase; None when the mesh did not say."""
    known = [s for s in stats if s is not None]
    if not known:
        return None
    phases = {
        "queue": max(s.queue_s for s in known),
        "prefill": max(s.prefill_s for s in known),
        "transfer": max(s.transfer_s for s in known),
        "decode": max(s.decode_s for s in known),
        "stall": max(s.stall_s for s in known),
    }
    return ", ".join(f"{phase};dur={1000 * seconds:.1f}" for phase, seconds in phases.items())


async def _stream(
    request: web.Request, generation: Generation, form: Form, telemetry: Telemetry, include_usage: bool
) -> web.StreamResponse:
    """Server-sent events: one per token, one write per wake-up; a slow reader holds up only itself.

    The status line waits for the first token, so a request that the mesh refuses is still answered with a status.
    """
    pieces = await generation.take(telemetry)
    response = web.StreamResponse(headers=SSE_HEADERS)
    try:
        await response.prepare(request)
        with request.app[PARTS].metrics.live_streams.track_inprogress():
            try:
                await _write(response, form.opening() + [form.chunk(piece) for piece in pieces])
                while not generation.done:
                    await _write(response, [form.chunk(piece) for piece in await generation.take(telemetry)])
                closing = [form.usage_chunk(generation.usage)] if include_usage else []
                await _write(response, [*closing, "[DONE]"])
                await response.write_eof()
                telemetry.answered(generation.stats)
            except ConnectionError:
                raise
            except Exception as error:
                known = as_mesh_error(error, request)
                request[ERROR_CODE] = known.code
                telemetry.failed(known)
                await _write(response, [encode(error_body(known))])
    except ConnectionError:  # may come before the cancellation that a client's leaving causes
        request[CLIENT_LEFT] = True
        telemetry.client_left()
    return response


async def _write(response: web.StreamResponse, events: Sequence[str]) -> None:
    if events:
        await response.write("".join([f"data: {event}\n\n" for event in events]).encode())
