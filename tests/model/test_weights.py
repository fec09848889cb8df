"""Safetensors: mapped, checked by name, told apart by revision."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.llama import CausalLM
from gpu_worker.model_config import load_decoder_config
from gpu_worker.weight_dtype import WeightDtype
from gpu_worker.weights import EMBEDDING, HEAD, INDEX_FILE, SINGLE_FILE, load_weights, weights_revision
from tests.model.paged import open_runner
from wire.errors import ModelUnsupported

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Callable[[Tensors], None]], Path]:
    """A family's checkpoint with its tensors changed."""

    def make(family: str, change: Callable[[Tensors], None]) -> Path:
        directory = tmp_path / family
        shutil.copytree(checkpoint(family), directory)
        tensors = load_file(directory / SINGLE_FILE)
        change(tensors)
        save_file(tensors, directory / SINGLE_FILE)
        return directory

    return make


def refusal(directory: Path) -> str:
    with pytest.raises(ModelUnsupported) as refused:
        open_runner(directory)
    return refused.value.message


def test_missing_unexpected_and_misshapen_tensors_are_named(
    copied: Callable[[str, Callable[[Tensors], None]], Path],
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def drop(tensors: Tensors) -> None:
        del tensors[name]

    def add_bias(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)

    def reshape(tensors: Tensors) -> None:
        tensors[name] = tensors[name].T.contiguous()

    def quantize(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    assert f"{name} is missing" in refusal(copied("llama_mha", drop))
    assert "unexpected tensor model.layers.1.self_attn.q_proj.bias" in refusal(copied("mistral", add_bias))
    assert f"{name} has shape (64, 96), not (96, 64)" in refusal(copied("qwen2", reshape))
    assert f"{name} is torch.int8" in refusal(copied("qwen3", quantize))


def test_a_tied_head_may_repeat_the_embedding_but_not_differ(
    copied: Callable[[str, Callable[[Tensors], None]], Path],
) -> None:
    def repeat(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    def differ(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING] + 1

    open_runner(copied("llama_gqa_tied", repeat))
    assert "tie_word_embeddings" in refusal(copied("qwen3", differ))


def test_shards_load_like_one_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    whole = checkpoint("qwen3_biases_yarn")
    sharded = tmp_path / "sharded"
    shutil.copytree(whole, sharded)
    tensors = load_file(sharded / SINGLE_FILE)
    (sharded / SINGLE_FILE).unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, sharded / shard)
    (sharded / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    config = load_decoder_config(whole)
    expected, actual = CausalLM(config), CausalLM(config)
    for model, directory in ((expected, whole), (actual, sharded)):
        load_weights(model, directory, WeightDtype(torch.float32, torch.float32, None), torch.device("cpu"))
    weights = actual.state_dict()
    assert expected.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected.state_dict().items())

    (sharded / "model-1.safetensors").unlink()
    assert "model-1.safetensors" in refusal(sharded)


def test_no_weights_and_broken_weights_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(checkpoint("llama_mha"), directory)
    (directory / SINGLE_FILE).write_bytes(b"\xff" * 100)
    assert SINGLE_FILE in refusal(directory)
    with pytest.raises(ModelUnsupported, match=SINGLE_FILE):
        weights_revision(directory)
    (directory / SINGLE_FILE).unlink()
    assert SINGLE_FILE in refusal(directory)


def test_revision_is_stable_and_sees_every_tensor_and_the_config(
    copied: Callable[[str, Callable[[Tensors], None]], Path],
    checkpoint: Callable[[str], Path],
) -> None:
    original = weights_revision(checkpoint("llama_mha"))
    directory = copied("llama_mha", lambda tensors: None)
    shutil.copy(checkpoint("llama_mha") / SINGLE_FILE, directory / SINGLE_FILE)
    assert weights_revision(directory) == original

    tensors = load_file(directory / SINGLE_FILE)
    for name in tensors:
        changed = tensors | {name: tensors[name] + 0.5}
        save_file(changed, directory / SINGLE_FILE, metadata={"format": "pt"})
        assert weights_revision(directory) != original, name
    shutil.copy(checkpoint("llama_mha") / SINGLE_FILE, directory / SINGLE_FILE)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert weights_revision(directory) != original


_MEASURE = """
import sys
from pathlib import Path
import torch
from gpu_worker.model_runner import load_runner
from gpu_worker.step_batch import StepBatch

def memory(field):  # bytes
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
peak, anonymous = memory("VmHWM"), memory("RssAnon")
runner = load_runner(
    Path(sys.argv[1]), device="cpu", weight_dtype="auto", attention_backend="auto", page_size=16, num_pages=8,
    kv_memory_bytes=0, max_model_len=None, name="smollm2",
)
runner.forward(StepBatch([1], [0], [0], [1], [1], [[0]], [0]))
assert "sympy" not in sys.modules, "torch's compiler was imported: 1 s and 70 MB"
print(memory("VmHWM") - peak, memory("RssAnon") - anonymous)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_the_real_model_takes_no_second_copy(smollm2_dir: Path) -> None:
    """A whole forward runs, so every weight is resident: once, and mapped."""
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(smollm2_dir)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    peak, anonymous = map(int, run.stdout.split())
    file_bytes = (smollm2_dir / SINGLE_FILE).stat().st_size
    assert peak < 1.3 * file_bytes
    assert anonymous < 0.3 * file_bytes
