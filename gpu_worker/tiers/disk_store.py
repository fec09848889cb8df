"""Units on disk: a file each, in a directory that one worker at a time owns.

    <PHASEMESH_DISK_KV_DIR>/0/lock                       held (flock) as long as the worker lives
                            0/<layout>-<dtype>/ab/ab12….kv    an encoded unit; written as ab12….tmp, then renamed
                            1/…                          the next worker's on this host

A worker takes the first numbered directory that nobody holds, so a restart finds what an earlier life stored, whatever
the worker's name. Nothing is synced: after a loss of power a file may be torn, which its checksum tells. Files that are
not named as ours are never touched.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpu_worker.tiers.port import OnChange, StoredUnit, ignore_change
from wire.errors import ConfigInvalid
from wire.ids import UnitHash
from wire.plan import Tier

log = logging.getLogger("gpu_worker.tiers.disk")

MAX_WORKERS = 256
"""Numbered directories tried, so workers of a host that may share PHASEMESH_DISK_KV_DIR."""
_TAG = re.compile(r"[0-9a-f]{32}-[a-z0-9]+")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_UNIT_FILE = re.compile(r"[0-9a-f]{64}\.(kv|tmp)")


class DiskStore:
    """Implements port.LowerStore: at most budget_bytes of unit files, the least recently used removed first, each
    ttl_s after it was stored at the latest.

    tag: codec's; files of any other are of no use to this worker and are removed at start.
    clock: unix time in seconds, compared with the files' own.
    Raises ConfigInvalid when the directory cannot be had.
    """

    tier = Tier.DISK

    def __init__(
        self,
        directory: Path,
        *,
        tag: str,
        encoded_bytes: int,
        budget_bytes: int,
        ttl_s: float,
        on_change: OnChange = ignore_change,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own, self._lock_fd = _own_directory(directory)
        self._files = self._own / tag
        self._encoded_bytes = encoded_bytes
        self._capacity = budget_bytes // encoded_bytes
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._used: OrderedDict[UnitHash, None] = OrderedDict()  # least recently used first
        self._stored_s: OrderedDict[UnitHash, float] = OrderedDict()  # oldest first
        self._unwanted: list[UnitHash] = []
        try:
            self._files.mkdir(exist_ok=True)
            self._adopt()
        except OSError as error:
            self.close()
            raise _unusable(directory, error) from error

    def put(self, unit_hash: UnitHash, encoded: memoryview) -> bool:
        """Called by one thread at a time."""
        self._remove_unwanted()
        with self._lock:
            if self._capacity < 1:
                return False
            if unit_hash in self._used:
                self._used.move_to_end(unit_hash)
                return True
            while len(self._used) >= self._capacity:
                self._remove(next(iter(self._used)))
        try:
            self._write(unit_hash, encoded)
        except OSError as error:
            log.warning("a unit was not stored", extra={"directory": str(self._own), "error": repr(error)})
            return False
        with self._lock:
            self._hold(unit_hash, self._clock())
        return True

    def get(self, unit_hash: UnitHash) -> StoredUnit | None:
        with self._lock:
            stored_s = self._stored_s.get(unit_hash)
            if stored_s is None:
                return None
            if stored_s <= self._clock() - self._ttl_s:
                self._remove(unit_hash)
                return None
            self._used.move_to_end(unit_hash)
        try:
            return StoredUnit(memoryview(self._path(unit_hash).read_bytes()))
        except OSError:  # removed meanwhile, by us or by somebody else
            self.drop(unit_hash)
            return None

    def holds(self, unit_hashes: Sequence[UnitHash]) -> list[bool]:
        with self._lock:
            return [unit_hash in self._used for unit_hash in unit_hashes]

    def drop(self, unit_hash: UnitHash) -> None:
        with self._lock:
            if unit_hash in self._used:
                self._remove(unit_hash)

    def clear(self) -> None:
        with self._lock:
            self._unwanted.extend(self._used)
            for unit_hash in self._used:
                self._on_change(unit_hash, False)
            self._used.clear()
            self._stored_s.clear()

    def upkeep(self) -> None:
        self._remove_unwanted()
        with self._lock:
            latest_s = self._clock() - self._ttl_s
            while self._stored_s and next(iter(self._stored_s.values())) <= latest_s:
                self._remove(next(iter(self._stored_s)))

    def contents(self) -> list[UnitHash]:
        """Least recently used first."""
        with self._lock:
            return list(self._used)

    @property
    def num_units(self) -> int:
        return len(self._used)

    @property
    def num_bytes(self) -> int:
        return len(self._used) * self._encoded_bytes

    def close(self) -> None:
        """Another worker may take the directory from now on. What it holds stays."""
        os.close(self._lock_fd)

    def _path(self, unit_hash: UnitHash) -> Path:
        name = unit_hash.hex()
        return self._files / name[:2] / f"{name}.kv"

    def _write(self, unit_hash: UnitHash, encoded: memoryview) -> None:
        path = self._path(unit_hash)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        try:
            with unfinished.open("wb") as file:
                file.write(encoded)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _hold(self, unit_hash: UnitHash, stored_s: float) -> None:
        self._used[unit_hash] = None
        self._stored_s[unit_hash] = stored_s
        self._on_change(unit_hash, True)

    def _remove(self, unit_hash: UnitHash) -> None:
        del self._used[unit_hash], self._stored_s[unit_hash]
        self._on_change(unit_hash, False)
        self._unlink(unit_hash)

    def _remove_unwanted(self) -> None:
        """The files of what clear() forgot: by the thread that writes files, so before it writes such a one again."""
        with self._lock:
            unwanted, self._unwanted = self._unwanted, []
        for unit_hash in unwanted:
            self._unlink(unit_hash)

    def _unlink(self, unit_hash: UnitHash) -> None:
        try:
            self._path(unit_hash).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a unit was not removed", extra={"directory": str(self._own), "error": repr(error)})

    def _adopt(self) -> None:
        """Index what an earlier life left; remove of ours what is unfinished, of another layout, or over the budget."""
        found: list[tuple[float, UnitHash]] = []
        for path in _unit_files(self._own):
            stat = path.stat()
            is_usable = path.suffix == ".kv" and path.parents[1] == self._files and stat.st_size == self._encoded_bytes
            if is_usable:
                found.append((stat.st_mtime, UnitHash(bytes.fromhex(path.stem))))
            else:
                path.unlink()
        for stored_s, unit_hash in sorted(found):
            self._hold(unit_hash, stored_s)
        self.upkeep()
        while len(self._used) > self._capacity:
            self._remove(next(iter(self._used)))


def _own_directory(directory: Path) -> tuple[Path, int]:
    """The first numbered directory that no living process holds, and the descriptor that holds it."""
    for number in range(MAX_WORKERS):
        own = directory / str(number)
        try:
            own.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            if error.errno != errno.EWOULDBLOCK:
                raise _unusable(directory, error) from error
        else:
            return own, lock_fd
    raise ConfigInvalid(
        f"PHASEMESH_DISK_KV_DIR={str(directory)!r}: {MAX_WORKERS} workers use it already", param="PHASEMESH_DISK_KV_DIR"
    )


def _unusable(directory: Path, error: OSError) -> ConfigInvalid:
    return ConfigInvalid(f"PHASEMESH_DISK_KV_DIR={str(directory)!r}: {error}", param="PHASEMESH_DISK_KV_DIR")


def _unit_files(own: Path) -> Iterator[Path]:
    """Unit files of every layout, finished or not."""
    for tag in _directories(own, _TAG):
        for fan_out in _directories(tag, _FAN_OUT):
            with os.scandir(fan_out) as entries:
                yield from [
                    fan_out / e.name
                    for e in entries
                    if _UNIT_FILE.fullmatch(e.name) and e.is_file(follow_symlinks=False)
                ]


def _directories(parent: Path, name: re.Pattern[str]) -> list[Path]:
    with os.scandir(parent) as entries:
        return [parent / e.name for e in entries if name.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
