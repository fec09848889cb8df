"""Replies in any order, repeated and overlapping, give each choice its output once."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inbox import Inbox
from wire.entries import ChoiceReply, ReplyItem, RequestEntry, TerminalReply, TokensReply
from wire.errors import Overloaded, Unavailable
from wire.ids import GatewayId, RequestId
from wire.journal import Journal, Output
from wire.sampling import SamplingParams, TokenLogprobs

ID = RequestId("cmpl-1")
OUTPUT = list(range(100, 120))


def entry(num_choices: int = 1, logprobs: int | None = None) -> RequestEntry:
    sampling = SamplingParams(max_tokens=64, logprobs=logprobs)
    return RequestEntry(ID, GatewayId("g"), [1, 2], sampling, num_choices=num_choices)


def new_inbox(num_choices: int = 1, logprobs: int | None = None) -> Inbox:
    return Inbox([entry(num_choices, logprobs)], "interactive", 0.0)


pieces = st.lists(
    st.tuples(st.integers(0, len(OUTPUT) - 1), st.integers(1, len(OUTPUT))).map(
        lambda piece: TokensReply(ID, 0, piece[0], OUTPUT[piece[0] : piece[0] + piece[1]])
    ),
    max_size=20,
)


@given(pieces, st.randoms(use_true_random=False), st.integers(0, 20))
async def test_any_order_of_overlapping_replies_gives_the_output_once(
    some: list[TokensReply], random: Random, take_every: int
) -> None:
    whole = [TokensReply(ID, 0, position, [token]) for position, token in enumerate(OUTPUT)]
    ending: list[ReplyItem] = [ChoiceReply(ID, 0, len(OUTPUT), "stop"), TerminalReply(ID), TerminalReply(ID)]
    replies: list[ReplyItem] = [*some, *whole, *ending]
    random.shuffle(replies)
    inbox = new_inbox()
    (request,) = inbox.requests
    taken: list[int] = []
    reasons: list[str] = []
    for number, reply in enumerate(replies):
        request.put(reply, 0.0)
        if take_every and number % take_every == 0:
            for news in request.take():
                taken += news.tokens
                reasons += [news.finish_reason] if news.finish_reason else []
    while not inbox.done:
        for news in await inbox.take():
            taken += news.tokens
            reasons += [news.finish_reason] if news.finish_reason else []
    assert taken == OUTPUT
    assert reasons == ["stop"]
    assert request.error() is None


async def test_logprobs_stay_with_their_tokens_when_a_reply_is_trimmed() -> None:
    def with_logprobs(position: int, tokens: list[int]) -> TokensReply:
        return TokensReply(ID, 0, position, tokens, [TokenLogprobs(-float(t), [], []) for t in tokens])

    inbox = new_inbox(logprobs=0)
    for reply in (with_logprobs(0, [1, 2]), with_logprobs(3, [4]), with_logprobs(1, [2, 3])):
        inbox.requests[0].put(reply, 0.0)
    (news,) = await inbox.take()
    assert news.tokens == [1, 2, 3, 4]
    assert news.logprobs is not None
    assert [lp.logprob for lp in news.logprobs] == [-1.0, -2.0, -3.0, -4.0]


async def test_a_gap_is_filled_from_the_journal() -> None:
    inbox = new_inbox(num_choices=2)
    (request,) = inbox.requests
    request.put(TokensReply(ID, 1, 2, [12]), 0.0)
    assert request.has_gap
    request.recover(Journal(outputs={1: Output(tokens=[10, 11])}))
    assert not request.has_gap
    (news,) = await inbox.take()
    assert (news.choice, news.tokens, news.finish_reason) == (1, [10, 11, 12], None)


async def test_an_end_beyond_what_came_is_a_gap() -> None:
    inbox = new_inbox()
    (request,) = inbox.requests
    request.put(ChoiceReply(ID, 0, 3, "length"), 0.0)
    assert request.has_gap
    request.recover(Journal(outputs={0: Output([1, 2, 3], 3, "length")}, terminal=TerminalReply(ID)))
    (news,) = await inbox.take()
    assert (news.tokens, news.finish_reason) == ([1, 2, 3], "length")
    assert inbox.done


async def test_a_terminal_without_the_choices_end_is_a_gap() -> None:
    inbox = new_inbox()
    (request,) = inbox.requests
    request.put(TokensReply(ID, 0, 0, [1]), 0.0)
    request.put(TerminalReply(ID), 0.0)
    assert request.has_gap
    request.recover(Journal(outputs={0: Output([1, 2], 2, "stop")}))
    (news,) = await inbox.take()
    assert (news.tokens, news.finish_reason) == ([1, 2], "stop")
    assert inbox.done


async def test_lost_logprobs_are_an_error_not_a_guess() -> None:
    inbox = new_inbox(logprobs=1)
    inbox.requests[0].put(TokensReply(ID, 0, 1, [5], [TokenLogprobs(-1.0, [], [])]), 0.0)
    inbox.requests[0].recover(Journal(outputs={0: Output([4, 5])}))
    with pytest.raises(Unavailable, match="log-probabilities"):
        await inbox.take()


async def test_news_comes_before_the_error_that_followed_it() -> None:
    inbox = new_inbox()
    (request,) = inbox.requests
    request.put(TokensReply(ID, 0, 0, [1]), 0.0)
    request.put(TerminalReply(ID, "overloaded", "too much", 3.0), 0.0)
    assert [news.tokens for news in await inbox.take()] == [[1]]
    with pytest.raises(Overloaded, match="too much") as error:
        await inbox.take()
    assert error.value.retry_after_s == 3.0


async def test_a_cancel_that_the_handler_did_not_ask_for_is_an_error() -> None:
    inbox = new_inbox()
    inbox.requests[0].put(ChoiceReply(ID, 0, 0, "cancelled"), 0.0)
    inbox.requests[0].put(TerminalReply(ID), 0.0)
    with pytest.raises(Unavailable, match="cancelled"):
        await inbox.take()


async def test_after_a_stop_nothing_more_is_waited_for() -> None:
    inbox = new_inbox(num_choices=2)
    (request,) = inbox.requests
    request.put(TokensReply(ID, 0, 0, [1]), 0.0)
    request.stop(0)
    assert not inbox.done
    request.put(TokensReply(ID, 1, 0, [2]), 0.0)
    request.put(ChoiceReply(ID, 1, 1, "stop"), 0.0)
    assert [(news.choice, news.finish_reason) for news in await inbox.take()] == [(1, "stop")]
    assert inbox.done
