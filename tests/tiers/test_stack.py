"""From a page down and back: what is saved, where it goes, what is told."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from redis import Redis

from gpu_worker.tiers.open_tiers import open_codec, open_tiers, shared_tier
from gpu_worker.tiers.unit_codec import LowerTierDtype
from gpu_worker.transfer.port import Bytes
from observability.metrics import WorkerMetrics
from tests.tiers.stacks import NAMESPACE, TIMEOUT_S, UNIT_BYTES, disk_below, fake_codec, open_opened, redis_below
from tests.tiers.units import a_cell, a_hash, hashes
from tests.worker.fake_runner import FakeRunner
from wire import keys
from wire.config import CellConfig, TierConfig
from wire.errors import ConfigInvalid
from wire.ids import PageId, UnitHash
from wire.plan import PageUnits, SharedTier, Tier, TierUnits


def page(number: int, *unit_numbers: int) -> PageUnits:
    return PageUnits(PageId(number), [a_hash(unit) for unit in unit_numbers])


def same(unit: Bytes | None, expected: Bytes) -> bool:
    return unit is not None and unit.tobytes() == expected.tobytes()


def test_a_saved_unit_comes_back_bit_for_bit() -> None:
    with open_opened(runner=FakeRunner(page_size=32)) as opened:
        units = [opened.fill(3, 1), opened.fill(3, 2, index=1)]
        opened.stack.save([page(3, 1, 2)])
        opened.fill(3, 9)
        assert opened.stack.find(hashes(3, 1)) == [Tier.HOST, Tier.HOST]
        assert same(opened.stack.read(a_hash(1)), units[0])
        assert same(opened.stack.read(a_hash(2)), units[1])
        assert opened.stack.read(a_hash(3)) is None
        assert opened.count("reads_total", Tier.HOST, result="hit") == 2
        assert opened.count("reads_total", Tier.HOST, result="miss") == 1
        assert (opened.count("units", Tier.HOST), opened.count("saved_units_total", Tier.HOST)) == (2, 2)


def test_what_the_host_has_is_not_copied_again() -> None:
    with open_opened() as opened:
        opened.fill(1, 1)
        opened.stack.save([page(1, 1)])
        opened.stack.save([page(1, 1), page(1, 1)])
        assert opened.count("saved_units_total", Tier.HOST) == 1


def test_more_units_than_are_read_at_once_are_all_saved() -> None:
    with open_opened(host_units=64, runner=FakeRunner(page_size=1024, num_pages=2)) as opened:
        units = [opened.fill(1, number, index=number) for number in range(50)]
        opened.stack.save([page(1, *range(50))])
        for number, unit in enumerate(units):
            assert same(opened.stack.read(a_hash(number)), unit)


def test_of_a_long_chain_the_head_stays() -> None:
    with open_opened(host_units=4, runner=FakeRunner(page_size=96)) as opened:
        for index in range(6):
            opened.fill(1, index, index)
        opened.stack.save([page(1, *range(6))])
        assert len(opened.stack.find(hashes(6))) == 4


def test_a_unit_that_a_pull_looked_for_goes_after_others() -> None:
    with open_opened(host_units=2) as opened:
        for number in (1, 2):
            opened.fill(number, number)
            opened.stack.save([page(number, number)])
        opened.stack.find([a_hash(1)])
        opened.fill(3, 3)
        opened.stack.save([page(3, 3)])
        assert opened.stack.find([a_hash(1)]) == [Tier.HOST]
        assert opened.stack.find([a_hash(2)]) == []


def test_what_the_host_evicts_comes_back_from_disk_and_from_redis(tmp_path: Path, redis_url: str) -> None:
    lower = {Tier.DISK: disk_below(tmp_path), Tier.REDIS: redis_below(redis_url, a_cell())}
    with open_opened(lower, host_units=2) as opened:
        units = {}
        for number in range(6):
            units[number] = opened.fill(number, number)
            opened.stack.save([page(number, number)])
            assert opened.stack.flush(TIMEOUT_S)
        assert opened.stack.find(hashes(6)) == [Tier.DISK] * 4 + [Tier.HOST] * 2
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        for number in range(6):
            assert same(opened.stack.read(a_hash(number)), units[number])
        assert opened.stack.find(hashes(6)) == [Tier.REDIS] * 4 + [Tier.HOST] * 2
        assert opened.count("reads_total", Tier.REDIS, result="hit") == 4


def test_a_damaged_unit_is_read_from_the_next_tier_and_dropped(tmp_path: Path, redis_url: str) -> None:
    cell = a_cell()
    lower = {Tier.DISK: disk_below(tmp_path), Tier.REDIS: redis_below(redis_url, cell)}
    with open_opened(lower, host_units=1) as opened:
        unit = opened.fill(1, 1)
        opened.stack.save([page(1, 1)])
        opened.stack.save([page(2, 2)])
        assert opened.stack.flush(TIMEOUT_S)
        (path,) = tmp_path.rglob("*.kv")
        stored = bytearray(path.read_bytes())
        stored[-1] ^= 1
        path.write_bytes(stored)
        assert same(opened.stack.read(a_hash(1)), unit)
        assert opened.count("reads_total", Tier.DISK, result="damaged") == 1
        assert list(tmp_path.rglob("*.kv")) == []
        with Redis.from_url(redis_url) as redis:
            redis.setrange(keys.kv_unit(cell, f"{fake_codec().tag}:{a_hash(1).hex()}"), 200, b"\xff\x01")
        assert opened.stack.read(a_hash(1)) is None
        assert opened.count("reads_total", Tier.REDIS, result="damaged") == 1
        assert opened.stack.find([a_hash(1)]) == []


def test_a_damaged_unit_in_host_memory_is_a_miss() -> None:
    with open_opened() as opened:
        opened.fill(1, 1)
        opened.stack.save([page(1, 1)])
        stored = opened.stack._host.get(a_hash(1))
        assert stored is not None
        stored.encoded[150] ^= 4
        stored.release()
        assert opened.stack.read(a_hash(1)) is None
        assert opened.stack.find([a_hash(1)]) == []


def test_after_a_failed_step_nothing_is_left(tmp_path: Path, redis_url: str) -> None:
    lower = {Tier.DISK: disk_below(tmp_path), Tier.REDIS: redis_below(redis_url, a_cell())}
    with open_opened(lower, host_units=2) as opened:
        for number in range(4):
            opened.fill(number, number)
            opened.stack.save([page(number, number)])
            assert opened.stack.flush(TIMEOUT_S)
        opened.stack.clear()
        assert opened.stack.subscribe(lambda units: None) == []
        assert [opened.stack.read(unit_hash) for unit_hash in hashes(4)] == [None] * 4
        assert opened.stack.find(hashes(4)) == []


def test_a_session_hears_what_is_there_and_then_what_changes(tmp_path: Path) -> None:
    with open_opened({Tier.DISK: disk_below(tmp_path)}, host_units=1) as opened:
        opened.stack.save([page(1, 1)])
        heard: list[TierUnits] = []
        assert opened.stack.subscribe(heard.append) == [TierUnits(Tier.HOST, [a_hash(1)])]
        opened.stack.save([page(2, 2)])
        assert opened.stack.flush(TIMEOUT_S)
        opened.stack._changes.flush()
        host = [units for units in heard if units.tier is Tier.HOST]
        assert [h for units in host for h in units.stored] == [a_hash(2)]
        assert [h for units in host for h in units.dropped] == [a_hash(1)]
        assert [units for units in heard if units.tier is Tier.DISK] == [TierUnits(Tier.DISK, [a_hash(1)])]


class StackMachine(RuleBasedStateMachine):
    """Random saves, reads, damage and failures over small tiers: what is told is what is there, and what is read is
    what was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.context = open_opened(
            {Tier.DISK: disk_below(Path(self.directory.name), units=3)}, host_units=3, spare_units=1
        )
        self.opened = self.context.__enter__()
        self.twin: dict[Tier, set[UnitHash]] = {}
        self.subscribe()

    def changed(self, units: TierUnits) -> None:
        here = self.twin.setdefault(units.tier, set())
        assert here.issuperset(units.dropped)
        here.difference_update(units.dropped)
        assert here.isdisjoint(units.stored)
        here.update(units.stored)

    @rule()
    def subscribe(self) -> None:
        self.twin = {}
        for units in self.opened.stack.subscribe(self.changed):
            self.changed(units)

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    def save(self, numbers: list[int]) -> None:
        for number in numbers:
            self.opened.fill(number, number)
        self.opened.stack.save([page(number, number) for number in numbers])

    @rule(number=st.integers(0, 9))
    def read(self, number: int) -> None:
        unit = self.opened.stack.read(a_hash(number))
        assert unit is None or same(unit, self.opened.fill(number, number))

    @rule()
    def damage_files(self) -> None:
        for path in Path(self.directory.name).rglob("*.kv"):
            path.write_bytes(bytes(path.stat().st_size))

    @rule()
    def fail(self) -> None:
        self.opened.stack.clear()

    @rule()
    def check(self) -> None:
        stack = self.opened.stack
        assert stack.flush(TIMEOUT_S)
        stack._changes.flush()
        for store in stack._stores:
            assert self.twin.get(store.tier, set()) == set(store.contents())

    def teardown(self) -> None:
        self.check()
        self.context.__exit__(None, None, None)
        self.directory.cleanup()


TestStackMachine = StackMachine.TestCase
TestStackMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def opens(**config: object) -> None:
    with open_tiers(
        TierConfig(**config),  # type: ignore[arg-type]
        CellConfig(),
        FakeRunner().kv,
        namespace=NAMESPACE,
        metrics=WorkerMetrics().tiers,
    ) as stack:
        assert (stack is None) == (config.get("host_mb", 0) == 0)


def test_tiers_are_off_unless_asked_for(tmp_path: Path) -> None:
    opens()
    opens(host_mb=1)
    opens(host_mb=1, disk_mb=1, disk_dir=str(tmp_path), redis_mb=1)


def test_the_redis_tiers_of_workers_are_one_where_units_mean_the_same() -> None:
    kv = FakeRunner().kv
    assert kv is not None
    one, other = (open_codec(kv.format, name, LowerTierDtype.AUTO) for name in (NAMESPACE, "another model"))
    config = TierConfig(host_mb=1, redis_mb=2, redis_ttl_s=1.5)
    shared = shared_tier(config, one)
    assert shared == SharedTier(one.tag, (2 << 20) // one.encoded_bytes, 1500)
    assert shared_tier(config, other) != shared
    assert shared_tier(TierConfig(host_mb=1), one) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"disk_mb": 1, "disk_dir": "/x"}, "PHASEMESH_DISK_KV_MB=1.*PHASEMESH_HOST_KV_MB"),
        ({"redis_mb": 1}, "PHASEMESH_REDIS_KV_MB=1.*PHASEMESH_HOST_KV_MB"),
        ({"host_mb": 1, "disk_mb": 1}, "PHASEMESH_DISK_KV_DIR is unset"),
        ({"host_mb": 1, "dtype": "int8"}, "PHASEMESH_LOWER_TIER_DTYPE=int8: KV pages of int64"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(config: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named):
        opens(**config)


def test_a_unit_of_the_fake_has_its_bytes() -> None:
    assert fake_codec().layout.unit_bytes == UNIT_BYTES
