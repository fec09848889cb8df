"""Random Llama-shaped models in memory, and runners over them, for bench.gpu_check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gpu_worker.attention.choose import choose, page_size_for
from gpu_worker.attention.port import GraphableAttention
from gpu_worker.cuda.copy_out import HostCopy
from gpu_worker.cuda.decode_graphs import CaptureBudget
from gpu_worker.cuda.open_runner import open_cuda_runner
from gpu_worker.cuda.runner import CudaModelRunner
from gpu_worker.float8_linear import Float8Linear, ScaledMatmul, quantize_linears
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.kv_format import KVFormat, PlainKV
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import DecoderConfig
from gpu_worker.rope_config import DefaultRope
from wire.plan import ModelCard

GIB = 1 << 30


def decoder_config(
    *, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, context: int
) -> DecoderConfig:
    """A Llama with an output head of its own."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=context,
        rope=DefaultRope(theta=500_000.0),
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None,) * layers,
        eos_token_ids=(),
    )


SMALL = decoder_config(vocab=512, hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, context=1024)
SHAPES = {  # free device memory it wants, in GiB → shape of a known model
    56: decoder_config(
        vocab=128_256, hidden=4096, inner=14_336, layers=32, heads=32, kv_heads=8, head_dim=128, context=8192
    ),
    24: decoder_config(
        vocab=128_256, hidden=3072, inner=8192, layers=28, heads=24, kv_heads=8, head_dim=128, context=8192
    ),
    0: decoder_config(
        vocab=128_256, hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, head_dim=64, context=8192
    ),
}
"""Llama 3.1 8B, 3.2 3B and 3.2 1B (whose head is tied, which is left out here)."""


def fitting_shape(free_bytes: int) -> DecoderConfig:
    """The largest shape for so much free memory."""
    return next(config for gib, config in SHAPES.items() if free_bytes >= gib * GIB)


def shallow(config: DecoderConfig) -> DecoderConfig:
    """The same matrices, four layers and a small vocabulary: for checks that also need it in float32."""
    layers = min(4, config.num_layers)
    return replace(
        config, num_layers=layers, layer_windows=config.layer_windows[:layers], vocab_size=min(8192, config.vocab_size)
    )


def random_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> CausalLM:
    """Weights that keep activations near 1 in size: normal, standard deviation fan-in ** -0.5; norms 1.

    The values are those of bfloat16, whatever `dtype`: a model and its float32 twin are the same function.
    """
    with torch.device("meta"):
        model = CausalLM(config)
    generator = torch.Generator(device).manual_seed(seed)
    parameters = {}
    for name, parameter in model.state_dict().items():
        if parameter.dim() == 1:
            parameters[name] = torch.ones(parameter.shape, dtype=dtype, device=device)
            continue
        scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(parameter.shape[1])
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        parameters[name] = (values * scale).to(dtype)
    model.load_state_dict(parameters, assign=True)
    model.requires_grad_(False)
    return model


def float8_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device, matmul: ScaledMatmul) -> CausalLM:
    """random_model with its projections in FP8."""
    model = random_model(config, dtype, device)
    quantize_linears(model, matmul)
    return model


def weight_bytes(model: CausalLM) -> int:
    """Read by every decode step: all but the embedding, of which a step looks up a few rows."""
    buffers = (b for m in model.modules() if isinstance(m, Float8Linear) for b in m.buffers())
    parameters = (p for name, p in model.named_parameters() if "embed_tokens" not in name)
    return sum(t.numel() * t.element_size() for t in (*parameters, *buffers))


def num_multiplied(config: DecoderConfig) -> tuple[int, int]:
    """Weights that multiply each token of a step, and those (the head's) that multiply only rows that are sampled."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return layer * config.num_layers, config.hidden_size * config.vocab_size


class RerunGraph:
    """Stands in for a CUDA graph on a CPU: runs the function again, into the same output."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.output = run()
        self._run = run

    def replay(self) -> None:
        self.output.copy_(self._run())


class RerunRecorder:
    def record(self, run: Callable[[], torch.Tensor]) -> RerunGraph:
        return RerunGraph(run)

    def memory_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What a runner is made of."""

    dtype: torch.dtype
    attention: str = "auto"
    graphs: bool = False
    kv_format: KVFormat | None = None
    """None: plain rows of dtype."""


def make_runner(
    config: DecoderConfig, model: CausalLM, device: torch.device, kv_tokens: int, options: RunnerOptions
) -> CudaModelRunner:
    """The worker's own CUDA runner over pages for kv_tokens tokens; on a CPU its parts for one."""
    kv_format = options.kv_format or PlainKV(options.dtype)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    attention = choose(
        options.attention,
        device,
        options.dtype,
        head_dim=config.head_dim,
        capability=capability,
        kv_format=kv_format,
    )
    page_size = page_size_for(attention, None if device.type == "cuda" else 16)
    layout = KVLayout.sized(
        config, page_size=page_size, kv_format=kv_format, num_pages=max(2, -(-kv_tokens // page_size)), memory_bytes=0
    )
    card = ModelCard(
        "random", "random", config.architecture, config.vocab_size, config.max_position_embeddings, (), kv_format.name
    )
    if device.type == "cuda":
        return open_cuda_runner(card, config, model, attention, layout, device, graphs=options.graphs)
    assert isinstance(attention, GraphableAttention)
    kv_cache = KVCache(replace(layout, num_pages=layout.num_pages + 1), device)
    runner = CudaModelRunner(card, config, model, attention, kv_cache, HostCopy(), threads=torch.get_num_threads())
    if options.graphs:
        runner.capture(RerunRecorder(), CaptureBudget())
    return runner
