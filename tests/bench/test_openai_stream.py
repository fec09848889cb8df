"""The client against a real HTTP server that streams what each test scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from bench import openai_stream
from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed, StreamClient, Target, open_client, parse_target
from bench.prompts import Messages, PromptRequest, Text, TokenIds
from phasemesh.ports import free_port
from tests.bench.sse_server import ANSWER, DONE, Cut, Refuse, Send, Step, Wait, delta, event, serve, token
from wire.errors import ConfigInvalid

HELLO = PromptRequest(Text("hello"), 3)
TURN = {"role": "user", "content": "hi"}


@pytest.fixture
async def client() -> AsyncIterator[StreamClient]:
    async with open_client(timeout_s=10.0) as client:
        yield client


async def outcome_of(client: StreamClient, *steps: Step, request: PromptRequest = HELLO) -> Outcome:
    async with serve(lambda body: steps) as server:
        return await client.send(Target(server.url, model="m"), request)


async def test_an_answer_is_timed_and_counted(client: StreamClient) -> None:
    outcome = await outcome_of(client, *ANSWER)
    assert (outcome.result, outcome.reason) == (Result.OK, "")
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (10, 3, 4)
    times_s = [outcome.due_s, outcome.sent_s, *outcome.token_event_times_s, outcome.end_s]
    assert times_s == sorted(times_s) and len(outcome.token_event_times_s) == 3


async def test_a_token_is_timed_when_it_comes_not_when_the_stream_ends(
    client: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last, received = asyncio.Event(), asyncio.Event(), asyncio.Event()
    take_all = openai_stream._take_all

    def noticed(lines: Sequence[bytes], outcome: Outcome) -> bool:
        finished = take_all(lines, outcome)
        if outcome.token_event_times_s:
            received.set()
        return finished

    monkeypatch.setattr(openai_stream, "_take_all", noticed)
    async with serve(lambda body: [Wait(first), token("a"), Wait(last), token("b", "stop"), DONE]) as server:
        sending = asyncio.create_task(client.send(Target(server.url, model="m"), HELLO))
        first_s = time.perf_counter()
        first.set()
        async with asyncio.timeout(10):
            await received.wait()
        last_s = time.perf_counter()
        last.set()
        outcome = await sending
    assert first_s <= outcome.token_event_times_s[0] <= last_s <= outcome.token_event_times_s[1] <= outcome.end_s


async def test_without_usage_events_are_counted(client: StreamClient) -> None:
    outcome = await outcome_of(client, token("a"), token("b"), token("", "stop"), DONE)
    assert outcome.completion_tokens is None and outcome.output_tokens == 2


async def test_a_token_without_text_counts_but_the_role_and_the_end_do_not(client: StreamClient) -> None:
    steps = (
        delta(role="assistant", content=""),
        delta(content=""),
        delta(content="é"),
        delta(reasoning_content="hm"),
        delta("stop"),
        DONE,
    )
    outcome = await outcome_of(client, *steps)
    assert outcome.result is Result.OK and len(outcome.token_event_times_s) == 3


async def test_usage_in_every_event_leaves_the_last(client: StreamClient) -> None:
    def counted(number: int) -> Send:
        counts = {"prompt_tokens": 9, "completion_tokens": number}
        return event(choices=[{"text": "x", "finish_reason": None}], usage=counts)

    outcome = await outcome_of(client, counted(1), counted(2), DONE)
    assert outcome.completion_tokens == 2 and outcome.cached_tokens is None


async def test_a_finish_reason_ends_a_stream_that_has_no_done(client: StreamClient) -> None:
    assert (await outcome_of(client, token("a", "length"))).result is Result.OK
    assert (await outcome_of(client, token("a"), Send(b"data: [DONE]"))).result is Result.OK


@pytest.mark.parametrize(
    ("steps", "result", "reason"),
    [
        ([Refuse(429)], Result.REJECTED, "HTTP 429"),
        ([Refuse(503)], Result.REJECTED, "HTTP 503"),
        ([Refuse(400)], Result.ERROR, "HTTP 400"),
        ([Refuse(500, b"<html>")], Result.ERROR, "HTTP 500"),
        ([token("a")], Result.ERROR, "stream cut short"),
        ([token("a"), Cut()], Result.ERROR, "disconnected"),
        ([Cut()], Result.ERROR, "disconnected"),
        ([token("a"), event(error={"message": "worker lost"}), DONE], Result.ERROR, "error in the stream"),
        ([Send(b"data: {\n\n"), DONE], Result.ERROR, "malformed stream"),
        ([Send(b"data: []\n\n"), DONE], Result.ERROR, "malformed stream"),
        ([event(choices=[], usage={"prompt_tokens": "many"}), DONE], Result.ERROR, "malformed stream"),
        ([event(choices=[3]), DONE], Result.ERROR, "malformed stream"),
    ],
)
async def test_what_went_wrong_is_told_apart(
    client: StreamClient, steps: Sequence[Step], result: Result, reason: str
) -> None:
    outcome = await outcome_of(client, *steps)
    assert (outcome.result, outcome.reason) == (result, reason)
    assert outcome.end_s >= outcome.sent_s


async def test_the_servers_own_message_is_kept(client: StreamClient) -> None:
    assert (await outcome_of(client, Refuse(429))).detail == "not now"
    assert (await outcome_of(client, event(error={"message": "worker\nlost"}))).detail == "worker lost"


async def test_a_silent_server_is_a_timeout() -> None:
    async with open_client(timeout_s=0.05) as client:
        gate = asyncio.Event()
        async with serve(lambda body: [token("a"), Wait(gate)]) as server:
            outcome = await client.send(Target(server.url, model="m"), HELLO)
            gate.set()
    assert (outcome.result, outcome.reason) == (Result.ERROR, "timeout")


async def test_nobody_there_is_no_connection(client: StreamClient) -> None:
    target = Target(f"http://127.0.0.1:{free_port(set())}", model="m")
    assert (await client.send(target, HELLO)).reason == "no connection"
    with pytest.raises(BenchFailed, match="nothing listens at"):
        await client.first_model(target)


async def test_a_server_that_closes_a_kept_connection_costs_no_request(client: StreamClient) -> None:
    """It answers once on each connection and closes it, unannounced, when it is used again, as llama.cpp's may."""
    body = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    connections = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        with suppress(asyncio.IncompleteReadError):  # the last one is closed by the client
            await reader.readuntil(b"\r\n\r\n")  # the first request's body, and the next request's head
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
        outcomes = [await client.send(target, HELLO) for _ in range(3)]
        server.close()
    assert [outcome.result for outcome in outcomes] == [Result.OK] * 3
    assert connections == 3


async def test_more_requests_than_connections_in_a_usual_pool_run_at_once(client: StreamClient) -> None:
    gate = asyncio.Event()
    async with serve(lambda body: [Wait(gate), *ANSWER]) as server, asyncio.TaskGroup() as tasks:
        sending = [tasks.create_task(client.send(Target(server.url, model="m"), HELLO)) for _ in range(150)]
        async with asyncio.timeout(10):
            while server.running < 150:  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.01)
        gate.set()
    assert all(task.result().result is Result.OK for task in sending)


async def test_what_is_sent(client: StreamClient) -> None:
    async with serve() as server:
        target = Target(server.url, model="m", api_key="secret")
        await client.send(target, HELLO)
        await client.send(target, PromptRequest(TokenIds((1, 2)), 5))
        await client.send(replace(target, ignore_eos=False), PromptRequest(Messages((TURN,)), 7))
    assert server.paths == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
    common = {"model": "m", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies == [
        common | {"prompt": "hello", "max_tokens": 3, "ignore_eos": True},
        common | {"prompt": [1, 2], "max_tokens": 5, "ignore_eos": True},
        common | {"messages": [TURN], "max_tokens": 7},
    ]
    assert set(server.keys) == {"Bearer secret"}


async def test_a_named_endpoint_gets_every_prompt(client: StreamClient) -> None:
    async with serve() as server:
        await client.send(parse_target(f"{server.url}/v1/completions", "P"), PromptRequest(Messages((TURN,)), 1))
        await client.send(parse_target(f"{server.url}/v1/chat/completions/", "P"), HELLO)
    assert server.paths == ["/v1/completions", "/v1/chat/completions"]
    assert server.bodies[0]["prompt"] == "user: hi\n\nassistant:"
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "hello"}]


def test_token_ids_do_not_fit_a_chat_endpoint() -> None:
    with pytest.raises(ConfigInvalid, match="takes no prompt_token_ids"):
        parse_target("http://h/v1/chat/completions", "P").check(PromptRequest(TokenIds((1,)), 1))


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_root_may_be_written_as_clients_take_it(url: str) -> None:
    assert parse_target(url, "P") == Target("http://h:1")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:99999", "http://[::1", ""])
def test_what_is_not_a_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse_target(url, "P")
    assert caught.value.param == "P"


async def test_the_first_model_is_asked_for(client: StreamClient) -> None:
    async with serve() as server:
        assert await client.first_model(Target(server.url)) == "scripted"
        with pytest.raises(BenchFailed, match="names no model; name one with --model"):
            await client.first_model(Target(f"{server.url}/nothing"))
