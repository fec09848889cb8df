from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.tiers import changes
from gpu_worker.tiers.changes import ChangeLog
from tests.tiers.units import a_hash, hashes
from wire.ids import UnitHash
from wire.plan import Tier, TierUnits


class Twin:
    """What the listener believes: every message must be news."""

    def __init__(self) -> None:
        self.here: dict[Tier, set[UnitHash]] = {Tier.HOST: set(), Tier.DISK: set()}
        self.messages: list[TierUnits] = []

    def __call__(self, units: TierUnits) -> None:
        self.messages.append(units)
        here = self.here[units.tier]
        assert here.issuperset(units.dropped)
        here.difference_update(units.dropped)
        assert here.isdisjoint(units.stored)
        here.update(units.stored)


def a_log() -> ChangeLog:
    return ChangeLog([Tier.HOST, Tier.DISK])


def test_changes_are_told_together_one_message_a_tier() -> None:
    log, twin = a_log(), Twin()
    assert log.subscribe(twin) == []
    for unit_hash in hashes(3):
        log.follower(Tier.HOST)(unit_hash, True)
    log.follower(Tier.DISK)(a_hash(9), True)
    log.flush()
    assert twin.messages == [TierUnits(Tier.HOST, hashes(3)), TierUnits(Tier.DISK, [a_hash(9)])]
    log.flush()
    assert len(twin.messages) == 2


def test_what_came_and_went_in_between_is_not_told() -> None:
    log, twin = a_log(), Twin()
    host = log.follower(Tier.HOST)
    log.subscribe(twin)
    host(a_hash(1), True)
    host(a_hash(1), False)
    log.flush()
    assert twin.messages == []


def test_a_new_listener_starts_from_the_contents_and_the_old_one_hears_no_more() -> None:
    log, old, new = a_log(), Twin(), Twin()
    host = log.follower(Tier.HOST)
    log.subscribe(old)
    host(a_hash(1), True)
    assert log.subscribe(new) == [TierUnits(Tier.HOST, [a_hash(1)])]
    host(a_hash(1), False)
    new.here[Tier.HOST] = {a_hash(1)}
    log.flush()
    assert (old.messages, new.messages) == ([], [TierUnits(Tier.HOST, [], [a_hash(1)])])


def test_without_a_listener_nothing_is_lost() -> None:
    log = a_log()
    log.follower(Tier.HOST)(a_hash(1), True)
    log.flush()
    assert log.contents() == [TierUnits(Tier.HOST, [a_hash(1)])]
    assert log.subscribe(Twin()) == [TierUnits(Tier.HOST, [a_hash(1)])]


def test_a_message_is_of_bounded_length() -> None:
    log, twin = a_log(), Twin()
    host = log.follower(Tier.HOST)
    log.subscribe(twin)
    for number in range(changes.MAX_MESSAGE_UNITS + 1):
        host(UnitHash(number.to_bytes(32, "big")), True)
    log.flush()
    assert [len(message.stored) for message in twin.messages] == [changes.MAX_MESSAGE_UNITS, 1]


CHANGE = st.tuples(st.sampled_from([Tier.HOST, Tier.DISK]), st.integers(0, 5), st.booleans())


@given(st.lists(st.one_of(CHANGE, st.sampled_from(["flush", "subscribe"])), max_size=40))
def test_the_twin_is_exact_after_any_changes(steps: list[tuple[Tier, int, bool] | str]) -> None:
    log, twin = a_log(), Twin()
    log.subscribe(twin)
    truth: dict[Tier, set[UnitHash]] = {Tier.HOST: set(), Tier.DISK: set()}
    for step in [*steps, "flush"]:
        if isinstance(step, tuple):
            tier, number, is_here = step
            log.follower(tier)(a_hash(number), is_here)
            (truth[tier].add if is_here else truth[tier].discard)(a_hash(number))
        elif step == "flush":
            log.flush()
        else:
            twin = Twin()
            for units in log.subscribe(twin):
                twin(units)
    assert twin.here == truth
