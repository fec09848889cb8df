"""Golden vectors of prefix hashes: what any machine and Python must compute, in data/prefix_hash_vectors.json.

The reference below knows hashlib and the documented bytes only. `python tests/kvstore/test_hash_vectors.py` checks the
checked-in file with it, in whatever Python runs that, and from 3.11 on with kvstore/prefix_hash.py, which needs no
package but the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

VECTORS = Path(__file__).parent / "data" / "prefix_hash_vectors.json"
PYTHONS = [f"python3.{minor}" for minor in range(7, 16)]


def reference(namespace: str, salt: str, tokens: list[int]) -> list[str]:
    """SHA-256("phasemesh-kv-1" 0x00 namespace 0x00 salt), then SHA-256(parent, 16 little-endian u32) for each unit."""
    parent = hashlib.sha256(b"phasemesh-kv-1\x00" + namespace.encode("utf-8") + b"\x00" + salt.encode("utf-8")).digest()
    hashes = [parent.hex()]
    for start in range(0, len(tokens) - len(tokens) % 16, 16):
        unit = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 16])
        parent = hashlib.sha256(parent + unit).digest()
        hashes.append(parent.hex())
    return hashes


def check() -> int:
    with VECTORS.open(encoding="utf-8") as file:
        vectors = json.load(file)
    for vector in vectors:
        found = reference(vector["namespace"], vector["salt"], vector["tokens"])
        assert found == [vector["root"], *vector["chain"]], vector["name"]
    return len(vectors)


def test_the_vectors_are_what_the_documented_bytes_give() -> None:
    assert check() >= 8


def check_ours() -> int:
    from kvstore.prefix_hash import chain, root_hash

    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))
    for vector in vectors:
        root = root_hash(vector["namespace"], vector["salt"])
        assert root.hex() == vector["root"], vector["name"]
        assert [h.hex() for h in chain(root, vector["tokens"])] == vector["chain"], vector["name"]
    return len(vectors)


def test_our_hashes_are_the_vectors() -> None:
    assert check_ours() >= 8


def test_every_python_here_computes_the_same() -> None:
    """This one at least, and others that are installed, each with another hash seed."""
    pythons = {sys.executable, *filter(None, map(shutil.which, PYTHONS))}
    num_vectors = len(json.loads(VECTORS.read_text(encoding="utf-8")))
    for seed, python in enumerate(sorted(pythons)):
        starts = subprocess.run([python, "-c", ""], capture_output=True, timeout=30)
        if python != sys.executable and starts.returncode:
            continue  # a shim of a version that is not installed
        done = subprocess.run(
            [python, str(Path(__file__))],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{python}: {done.stderr}"
        told, ours, _ = done.stdout.splitlines()
        assert told == f"{num_vectors} vectors hold", python
        assert ours in (f"{num_vectors} by kvstore/prefix_hash.py", "Python 3.11 is needed for ours"), python
        assert python != sys.executable or ours.startswith(f"{num_vectors} by"), python


if __name__ == "__main__":
    print(f"{check()} vectors hold")
    if sys.version_info >= (3, 11):  # noqa: UP036 # older ones run this file, too
        sys.path.insert(0, str(Path(__file__).parents[2]))
        print(f"{check_ours()} by kvstore/prefix_hash.py")
    else:
        print("Python 3.11 is needed for ours")
    print(sys.version.split()[0])
