"""Where a model's directory is. A name is looked up among the pulled models; a directory is itself."""

from __future__ import annotations

from pathlib import Path

from wire.config import ModelConfig
from wire.errors import ConfigInvalid


def cache_root(config: ModelConfig) -> Path:
    """Directory of everything fetched or built once: pulled models under models/."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else Path.home() / ".cache" / "phasemesh"


def model_path(config: ModelConfig) -> Path:
    """Directory with config.json, tokenizer.json and *.safetensors. Raises ConfigInvalid when there is none."""
    given = Path(config.model).expanduser()
    candidates = [given] if given.is_absolute() else [given, cache_root(config) / "models" / config.model]
    for path in candidates:
        if (path / "config.json").is_file():
            return path
    raise ConfigInvalid(
        f"PHASEMESH_MODEL={config.model!r}: no directory with a config.json; `phasemesh models pull` fetches one",
        param="PHASEMESH_MODEL",
    )


def served_name(config: ModelConfig) -> str:
    """The name clients use for the model."""
    return config.model_name or model_path(config).resolve().name
