"""Files: who owns a directory, what a restart finds, what a crash leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.tiers.disk_store import DiskStore
from gpu_worker.tiers.unit_codec import LowerTierDtype, UnitInvalid
from tests.tiers.units import CODEC, a_codec, a_hash, encoded, hashes
from wire.child import die_with_parent
from wire.errors import ConfigInvalid

SIZE = CODEC.encoded_bytes


def opened(
    directory: Path,
    *,
    units: int = 8,
    ttl_s: float = 60,
    clock: Callable[[], float] = time.time,
    tag: str = CODEC.tag,
) -> DiskStore:
    return DiskStore(directory, tag=tag, encoded_bytes=SIZE, budget_bytes=units * SIZE, ttl_s=ttl_s, clock=clock)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")


def unit_file(directory: Path, number: int) -> Path:
    return next(directory.rglob(f"{a_hash(number).hex()}.kv"))


def test_a_restart_finds_what_was_stored(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(a_hash(1), encoded(1))
    store.close()
    again = opened(tmp_path)
    unit = again.get(a_hash(1))
    assert unit is not None
    CODEC.decode(a_hash(1), unit.encoded)
    assert again.contents() == [a_hash(1)]
    again.close()


def test_two_workers_never_share_a_directory(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    one.put(a_hash(1), encoded(1))
    two.put(a_hash(2), encoded(2))
    assert (one.contents(), two.contents()) == (hashes(1, 1), hashes(1, 2))
    one.close()
    third = opened(tmp_path)
    assert third.contents() == hashes(1, 1)
    two.close()
    third.close()


def test_a_unit_stored_again_after_clear_stays(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1, 2):
        store.put(a_hash(number), encoded(number))
    store.clear()
    store.put(a_hash(1), encoded(1))
    store.upkeep()
    assert store.get(a_hash(1)) is not None
    assert files(tmp_path) == [unit_file(tmp_path, 1)]
    store.close()


def test_a_file_is_gone_when_its_time_is_up(tmp_path: Path) -> None:
    now_s = tmp_path.stat().st_mtime
    store = opened(tmp_path, ttl_s=10, clock=lambda: now_s)
    store.put(a_hash(1), encoded(1))
    now_s += 6
    store.put(a_hash(2), encoded(2))
    now_s += 4
    assert store.get(a_hash(1)) is None
    assert store.get(a_hash(2)) is not None
    assert len(files(tmp_path)) == 1
    now_s += 6
    store.upkeep()
    assert files(tmp_path) == []
    assert store.num_units == 0
    store.close()


def test_what_is_too_old_or_over_the_budget_is_removed_at_start(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(6):
        store.put(a_hash(number), encoded(number))
        stored_s = 1000.0 + number
        os.utime(unit_file(tmp_path, number), (stored_s, stored_s))
    store.close()
    again = opened(tmp_path, units=3, ttl_s=100, clock=lambda: 1102.0)
    assert again.contents() == hashes(3, 3)
    assert len(files(tmp_path)) == 3
    again.close()


def test_files_of_another_layout_are_removed_and_foreign_ones_left_alone(tmp_path: Path) -> None:
    store = opened(tmp_path, tag=a_codec(LowerTierDtype.INT8).tag)
    store.put(a_hash(1), encoded(1))
    store.close()
    foreign = [tmp_path / "notes.txt", tmp_path / "0" / "x.kv", unit_file(tmp_path, 1).with_name("backup.kv")]
    for path in foreign:
        path.write_text("mine")
    link = unit_file(tmp_path, 1).with_name("f" * 64 + ".kv")
    link.symlink_to(foreign[0])
    again = opened(tmp_path)
    assert again.contents() == []
    assert files(tmp_path) == sorted([*foreign, link])
    again.close()


def test_a_unit_removed_by_somebody_else_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(a_hash(1), encoded(1))
    unit_file(tmp_path, 1).unlink()
    assert store.get(a_hash(1)) is None
    assert store.contents() == []
    store.close()


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    store = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        assert not store.put(a_hash(1), encoded(1))
    assert files(tmp_path) == []
    assert store.contents() == []
    assert store.put(a_hash(1), encoded(1))
    store.close()


def test_a_budget_below_one_unit_holds_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, units=0)
    assert not store.put(a_hash(1), encoded(1))
    store.close()


def test_a_directory_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="PHASEMESH_DISK_KV_DIR"):
        opened(tmp_path / "file")


WRITER = """
import sys
from pathlib import Path
from tests.tiers.test_disk_store import opened
from tests.tiers.units import a_hash, encoded
store = opened(Path(sys.argv[1]), units=50)
values = [encoded(number) for number in range(100)]
print("writing", flush=True)
while True:
    for number, value in enumerate(values):
        store.put(a_hash(number), value)
"""


def test_after_kill_9_while_writing_every_unit_is_whole_or_a_miss(tmp_path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, preexec_fn=die_with_parent
        )
        assert writer.stdout is not None
        with writer.stdout as output:
            assert output.readline() == b"writing\n"
            while not files(tmp_path):
                assert writer.poll() is None
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        (tmp_path / "0" / CODEC.tag / "ab").mkdir(exist_ok=True)
        (tmp_path / "0" / CODEC.tag / "ab" / f"ab{'0' * 62}.tmp").write_bytes(b"half")
        store = opened(tmp_path, units=50)
        assert store.num_units <= 50
        for unit_hash in store.contents():
            unit = store.get(unit_hash)
            assert unit is not None
            CODEC.decode(unit_hash, unit.encoded)
        assert len(files(tmp_path)) == store.num_units
        store.close()


@pytest.mark.parametrize("keep", [0, 1, 100, SIZE // 2, SIZE - 1])
def test_a_file_torn_by_a_loss_of_power_is_a_miss(tmp_path: Path, keep: int) -> None:
    store = opened(tmp_path)
    store.put(a_hash(1), encoded(1))
    path = unit_file(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep] + bytes(SIZE - keep))
    unit = store.get(a_hash(1))
    assert unit is not None
    with pytest.raises(UnitInvalid):
        CODEC.decode(a_hash(1), unit.encoded)
    store.close()
    path.write_bytes(whole[:keep])
    again = opened(tmp_path)
    assert again.contents() == []
    assert files(tmp_path) == []
    again.close()
