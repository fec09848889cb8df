"""What a child of ours gets from us. That it dies with us is tested with the launcher and the tokenizer pool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wire.child import importing_as_we_do

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize(("ours", "childs"), [(None, ROOT), ("", ROOT), ("/a:/b", f"{ROOT}:/a:/b")])
def test_a_child_imports_from_where_we_do_and_never_from_its_working_directory_by_an_empty_entry(
    ours: str | None, childs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if ours is not None:
        monkeypatch.setenv("PYTHONPATH", ours)
    environ = importing_as_we_do()
    assert environ["PYTHONPATH"] == childs
    assert environ.keys() - {"PYTHONPATH"} == os.environ.keys() - {"PYTHONPATH"}
