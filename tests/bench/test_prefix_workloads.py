"""Workloads of shared prefixes and of mixed traffic: seeded, of the promised shape."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.prefix_workloads import MixedShape, PrefixShape, is_long, mixed_traffic, shared_prefixes, unshared
from bench.prompts import PromptRequest, TokenIds

SHAPE = PrefixShape(prefixes=6, requests=200, prefix_tokens=160, zipf_exponent=1.0)


def ids(request: PromptRequest) -> tuple[int, ...]:
    assert isinstance(request.prompt, TokenIds)
    return tuple(request.prompt.token_ids)


def test_every_prefix_is_asked_for_often_enough_and_the_first_most_often() -> None:
    requests = shared_prefixes(SHAPE, 1)
    asked = Counter(ids(request)[:160] for request in requests)
    assert len(requests) == 200 and len(asked) == 6
    assert min(asked.values()) >= 20
    (_, most), (_, second) = asked.most_common(2)
    assert most > second + 5, "1/k: the first has 40 % of what is beyond the least"


def test_requests_of_one_prefix_share_it_and_nothing_beyond() -> None:
    requests = shared_prefixes(SHAPE, 1)
    suffixes = [ids(request)[160:] for request in requests]
    assert len(set(suffixes)) == 200
    assert all(16 <= len(suffix) <= 64 for suffix in suffixes)
    assert {32, 64} <= {request.max_tokens for request in requests} <= set(range(32, 65))


def test_unshared_prompts_have_the_same_lengths_and_no_unit_in_common() -> None:
    requests = unshared(SHAPE, 1)
    assert len({ids(request)[:16] for request in requests}) == 200
    assert all(176 <= len(ids(request)) <= 224 for request in requests)


def test_a_seed_fixes_every_request() -> None:
    for make in (shared_prefixes, unshared):
        assert make(SHAPE, 3) == make(SHAPE, 3) != make(SHAPE, 4)
    mixed = MixedShape(duration_s=10, chats_per_s=3)
    assert mixed_traffic(mixed, 3) == mixed_traffic(mixed, 3) != mixed_traffic(mixed, 4)


def test_too_few_requests_for_the_prefixes_are_refused() -> None:
    with pytest.raises(ValueError, match="requests=100: fewer than 6 prefixes × min_per_prefix=20"):
        PrefixShape(prefixes=6, requests=100)


def test_mixed_traffic_is_the_same_chats_with_long_prompts_and_without() -> None:
    mixed = MixedShape(duration_s=30, chats_per_s=4, long_every_s=5)
    requests = mixed_traffic(mixed, 1)
    longs = [request for request in requests if is_long(request, mixed)]
    assert [request.at_s for request in longs] == [2.5, 7.5, 12.5, 17.5, 22.5, 27.5]
    alone = mixed_traffic(MixedShape(duration_s=30, chats_per_s=4, long_every_s=0), 1)
    assert alone == [request for request in requests if not is_long(request, mixed)]
    times_s = [request.at_s for request in requests if request.at_s is not None]
    assert times_s == sorted(times_s) and len(times_s) == len(requests)
    assert 80 <= len(alone) <= 160
