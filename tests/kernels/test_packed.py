"""Packed weights: one mapped file for a checkpoint and type, made once, remade when the checkpoint changes."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.kernels import packed
from gpu_worker.kernels.library import PANEL_DTYPES, Kernels, PackedLinear, pack, pack_dots, pack_scales
from gpu_worker.kernels.packed import load_packed, packed_linear
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import load_decoder_config
from gpu_worker.weight_dtype import rounded
from gpu_worker.weights import EMBEDDING, HEAD, SINGLE_FILE
from tests.kernels.test_build import start
from tests.model.checkpoints import FAMILIES, make_checkpoint
from tests.model.conftest import checkpoint  # noqa: F401  # a fixture
from tests.model.paged import PagedSequences, open_runner

PROMPT = [5, 17, 200, 3, 77]


@pytest.fixture
def cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with nothing but the library, in which even the smallest model is kept as a file."""
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    shutil.copy(built, tmp_path / "cache" / "kernels")
    monkeypatch.setattr(packed, "SMALL_MODEL_BYTES", 0)
    return tmp_path / "cache"


def logits(directory: Path, cache_dir: Path | None, weight_dtype: str = "auto", **changes: str) -> torch.Tensor:
    runner = open_runner(directory, kernels_dir=cache_dir, weight_dtype=weight_dtype, **changes)
    return PagedSequences(runner, [PROMPT], random.Random(0)).step({0: len(PROMPT)})[0][1]


def files(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "packed").glob("*.safetensors"))


@pytest.mark.parametrize("stored", PANEL_DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapped_file_serves_like_memory_and_like_torch(
    family: str,
    stored: torch.dtype,
    checkpoint: Callable[[str], Path],  # noqa: F811
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight_dtype = str(stored).removeprefix("torch.")
    first = logits(checkpoint(family), cache, weight_dtype)
    [file] = files(cache)
    assert file.stem.endswith(weight_dtype)
    written_ns = file.stat().st_mtime_ns
    assert torch.equal(logits(checkpoint(family), cache, weight_dtype), first)
    assert [f.stat().st_mtime_ns for f in files(cache)] == [written_ns]
    monkeypatch.undo()
    assert torch.equal(logits(checkpoint(family), cache, weight_dtype), first)
    torch.testing.assert_close(first, logits(checkpoint(family), None, weight_dtype), rtol=1e-4, atol=2e-4)


def test_auto_packs_what_holds_the_checkpoint(cache: Path, tmp_path: Path) -> None:
    """bfloat16 stays bfloat16 where the kernels read it; the values are the same in float32."""
    directory = make_checkpoint(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    actual = logits(directory, cache)
    [file] = files(cache)
    assert file.stem.endswith("bfloat16")
    torch.testing.assert_close(actual, logits(directory, cache, "float32"), rtol=1e-4, atol=2e-4)


def test_a_changed_checkpoint_replaces_its_file(
    checkpoint: Callable[[str], Path],  # noqa: F811
    cache: Path,
    tmp_path: Path,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama_gqa_tied"), directory)
    before = logits(directory, cache)
    tensors = load_file(directory / SINGLE_FILE)
    # One value that the revision does not sample; the file's time tells.
    tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[1000] += 1.0
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    after = logits(directory, cache)
    assert not torch.equal(before, after)
    assert len(files(cache)) == 1


def test_a_broken_file_is_made_anew_and_an_unwritable_cache_is_no_obstacle(
    checkpoint: Callable[[str], Path],  # noqa: F811
    cache: Path,
) -> None:
    expected = logits(checkpoint("qwen2"), cache)
    [file] = files(cache)
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(logits(checkpoint("qwen2"), cache), expected)
    shutil.rmtree(cache / "packed")
    (cache / "packed").write_text("in the way")
    assert torch.equal(logits(checkpoint("qwen2"), cache), expected)


def unpacked(layer: PackedLinear) -> torch.Tensor:
    """[columns, depth]: what the documented layout says the kernels multiply."""
    panels = layer.panels
    if layer.is_dots:
        panels = panels.transpose(2, 3).flatten(1, 2)
    weight = panels.float() - (128 if panels.dtype is torch.uint8 else 0)
    if layer.scales is not None:
        weight = weight * layer.scales.repeat_interleave(64, dim=1)[:, : layer.depth]
    return weight.transpose(1, 2).flatten(0, 1)[: layer.columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (16, 64), (19, 65), (40, 200)])
def test_panels_hold_the_rounded_weights_and_zeros(columns: int, depth: int, dtype: torch.dtype) -> None:
    weight = torch.randn(columns, depth)
    scales = pack_scales(weight) if dtype is torch.int8 else None
    layer = PackedLinear(pack(weight, dtype), None, columns, scales)
    num_panels = -(-columns // 16)
    assert (layer.panels.dtype, layer.panels.shape) == (dtype, (num_panels, depth, 16))
    assert scales is None or scales.shape == (num_panels, -(-depth // 64), 16)
    assert torch.equal(unpacked(layer), rounded(weight, dtype))
    assert not layer.panels.transpose(1, 2).flatten(0, 1)[columns:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("columns", "depth"), [(1, 64), (16, 64), (19, 128), (40, 576)])
def test_panels_of_dots_hold_the_rounded_weights_and_zeros(columns: int, depth: int, dtype: torch.dtype) -> None:
    weight = torch.randn(columns, depth)
    scales = pack_scales(weight) if dtype is torch.int8 else None
    layer = PackedLinear(pack_dots(weight, dtype), None, columns, scales)
    side_by_side = 4 if dtype is torch.int8 else 2
    assert layer.panels.shape == (-(-columns // 16), depth // side_by_side, 16, side_by_side)
    assert layer.panels.dtype is (torch.uint8 if dtype is torch.int8 else dtype)
    assert layer.depth == depth
    assert torch.equal(unpacked(layer), rounded(weight, dtype))
    zero = 128 if dtype is torch.int8 else 0
    assert bool((layer.panels.transpose(1, 2).flatten(0, 1)[columns:] == zero).all())


def pack_with(directory: Path, stored: torch.dtype, cache_dir: Path, *, dots: bool = False) -> packed.Packed:
    config = load_decoder_config(directory)
    with torch.device("meta"):
        model = CausalLM(config)
    return load_packed(model, config, directory, stored, cache_dir, dots=dots)


@pytest.mark.parametrize("family", ["llama_biases", "qwen3"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
def test_a_file_holds_its_types_rounded_weights_and_the_rest_in_float32(
    stored: torch.dtype,
    family: str,
    checkpoint: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = load_file(checkpoint(family) / SINGLE_FILE)
    in_memory = pack_with(checkpoint(family), stored, tmp_path)
    assert files(tmp_path) == []
    monkeypatch.setattr(packed, "SMALL_MODEL_BYTES", 0)
    mapped = pack_with(checkpoint(family), stored, tmp_path)
    assert mapped.keys() == in_memory.keys()
    assert all(torch.equal(mapped[name], tensor) for name, tensor in in_memory.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in mapped.values())

    layer = "model.layers.1."
    qkv = torch.cat([tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(unpacked(packed_linear(mapped, "1.qkv", len(qkv))), rounded(qkv, stored))
    head = tensors.get(HEAD, tensors[EMBEDDING])
    assert torch.equal(unpacked(packed_linear(mapped, "head", len(head))), rounded(head, stored))
    assert ("embedding" in mapped) == (HEAD in tensors)
    if HEAD in tensors:
        held = torch.float32 if stored is torch.float32 else torch.bfloat16
        assert torch.equal(mapped["embedding"], tensors[EMBEDDING].to(held))
        assert torch.equal(mapped["1.down.bias"], tensors[f"{layer}mlp.down_proj.bias"])
    assert torch.equal(mapped["1.mlp_norm"], tensors[f"{layer}post_attention_layernorm.weight"])
    assert ("1.qkv.scales" in mapped) == (stored is torch.int8)


@pytest.mark.parametrize("family", ["llama_biases", "qwen3"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8])
def test_a_file_of_dots_holds_the_same_in_its_own_panels(
    stored: torch.dtype, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path / "model", family, intermediate_size=128)
    plain, in_memory = (pack_with(directory, stored, tmp_path, dots=dots) for dots in (False, True))
    monkeypatch.setattr(packed, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(packed, "_HEAD_PIECE_ROWS", 48)
    mapped = pack_with(directory, stored, tmp_path, dots=True)
    assert mapped.keys() == in_memory.keys() == plain.keys()
    config = load_decoder_config(directory)
    for name, tensor in mapped.items():
        assert torch.equal(tensor, in_memory[name]) and tensor.data_ptr() % 64 == 0
        if plain[name].dim() == 3 and not name.endswith(".scales"):
            columns = config.vocab_size if name == "head" else 16 * len(tensor)
            assert packed_linear(mapped, name, columns).is_dots
            assert torch.equal(
                unpacked(packed_linear(mapped, name, columns)), unpacked(packed_linear(plain, name, columns))
            )
        else:
            assert torch.equal(tensor, plain[name])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8])
def test_a_mapped_file_of_dots_serves_like_memory(
    stored: torch.dtype, built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stored not in Kernels(built).dots:
        pytest.skip(f"this CPU has no dot products of {stored}")
    directory = make_checkpoint(tmp_path / "model", "llama_gqa_tied", intermediate_size=128)
    dtype = str(stored).removeprefix("torch.")
    mapped = logits(directory, cache, dtype, activation_dtype=dtype)
    assert [file.stem.endswith(f"-{dtype}-dots") for file in files(cache)] == [True]
    assert torch.equal(logits(directory, cache, dtype, activation_dtype=dtype), mapped)
    monkeypatch.undo()
    assert torch.equal(logits(directory, cache, dtype, activation_dtype=dtype), mapped)
    assert not torch.equal(logits(directory, cache, dtype), mapped)


def test_a_directory_of_links_is_the_checkpoint_it_links_to(
    checkpoint: Callable[[str], Path],  # noqa: F811
    cache: Path,
    tmp_path: Path,
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for file in checkpoint("qwen2").iterdir():
        (links / file.name).symlink_to(file)
    for directory in (checkpoint("qwen2"), links):
        pack_with(directory, torch.float32, cache)
    assert len(files(cache)) == 1


def test_each_layout_has_its_own_file(cache: Path, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen2", intermediate_size=128)
    layouts = [(torch.float32, False), *((t, dots) for t in (torch.bfloat16, torch.int8) for dots in (False, True))]
    for stored, dots in (*layouts, layouts[1]):
        pack_with(directory, stored, cache, dots=dots)
    sizes = {re.sub(r"^.*-[0-9a-f]{12}-", "", file.stem): file.stat().st_size for file in files(cache)}
    assert sizes.keys() == {"float32", "bfloat16", "bfloat16-dots", "int8", "int8-dots"}
    assert sizes["int8"] < sizes["bfloat16"] < sizes["float32"]
    assert sizes["int8-dots"] < sizes["bfloat16-dots"] < sizes["float32"]


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
    kv_memory_bytes=0, max_model_len=None, name="smollm2", kernels_dir=Path(sys.argv[2]),
)
runner.forward(StepBatch([1], [0], [0], [1], [1], [[0]], [0]))
assert "sympy" not in sys.modules, "torch's compiler was imported: 1 s and 70 MB"
print(runner.attention_backend, memory("VmHWM") - peak, memory("RssAnon") - anonymous, memory("RssFile"))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_real_model_is_packed_once_by_two_workers_and_resident_once_in_each(smollm2_dir: Path, cache: Path) -> None:
    workers = [start(["-c", _MEASURE, str(smollm2_dir), str(cache)], OMP_NUM_THREADS="1") for _ in range(2)]
    file_bytes = (smollm2_dir / SINGLE_FILE).stat().st_size
    for worker in workers:
        output, _ = worker.communicate(timeout=100)
        assert worker.returncode == 0, output
        backend, peak, anonymous, resident_file = output.split()
        assert backend == "cpu"
        assert int(peak) < 1.3 * file_bytes
        assert int(anonymous) < 0.3 * file_bytes
        assert int(resident_file) < 1.8 * file_bytes
    assert len(list((cache / "packed").iterdir())) == 2  # the file and its lock
