"""The Llama family's forward pass over the CPU kernels: gpu_worker/llama.py's CausalLM with packed weights.

A step is one call (src/decoder.h); here its arguments are put together without torch's operators: a step of one token
takes a few milliseconds, an operator a hundredth of one, and most let go of the GIL: the event loop, which has the last
step's report to send, would take it, and the cores wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from gpu_worker.attention.cpu_backend import CpuAttention, attention_plan
from gpu_worker.kernels import structs
from gpu_worker.kernels.drawing import draw_scratch
from gpu_worker.kernels.library import FoundLargest, Kernels, linear_scratch, rounded_rows
from gpu_worker.kernels.packed import Packed, packed_linear
from gpu_worker.kernels.structs import address, integers, made, place
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import DecoderConfig
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.rope import RotaryEmbedding, RotaryTable
from gpu_worker.sampler import DrawnRow
from gpu_worker.step_batch import StepBatch
from wire.plan import ModelCard


class KernelModelRunner(PagedModelRunner):
    def __init__(
        self,
        card: ModelCard,
        config: DecoderConfig,
        packed: Packed,
        kernels: Kernels,
        kv_cache: KVCache,
        *,
        threads: int | None = None,
    ) -> None:
        super().__init__(card, kv_cache, attention_backend=CpuAttention.name, threads=threads)
        self._config = config
        self._kernels = kernels
        self._packed = packed
        self._model = _model(config, packed, kv_cache)
        self._rotary = RotaryTable(RotaryEmbedding(config.rope, config.head_dim, self.device))
        self._is_dots = packed_linear(packed, "head", config.vocab_size).is_dots
        self._workspace = _Workspace(config, rows=0, is_dots=self._is_dots)
        self._largest = FoundLargest(0, config.vocab_size)
        self._logits = _Logits(config.vocab_size)
        self._attention_scratch = self._draw_scratch = torch.empty(0)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """As PagedModelRunner's."""
        rows, num_logit_rows = len(batch.token_ids), len(batch.logit_rows)
        if not self._workspace.serves(rows):
            self._workspace = _Workspace(self._config, rows=rows, is_dots=self._is_dots)
        heads, head_dim = self._config.num_heads, self._config.head_dim
        logits = self._logits.of(num_logit_rows)
        self._largest = FoundLargest(num_logit_rows, self._config.vocab_size)
        plan = attention_plan(batch)
        self._attention_scratch = _with_room(self._attention_scratch, plan.scratch_floats(heads, head_dim))
        lists = batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows
        token_ids, positions, slots, logit_rows = (integers(values) for values in lists)
        cos, sin = self._rotary.reach(max(batch.context_lens, default=0))
        step = made(
            structs.Step,
            rows=rows,
            token_ids=place(token_ids),
            positions=place(positions),
            slots=place(slots),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            attention=plan.struct(self._attention_scratch),
            logit_rows=place(logit_rows),
            num_logit_rows=num_logit_rows,
            logits=logits.data_ptr(),
            parts=ctypes.addressof(self._largest.parts),
            largest=ctypes.addressof(self._largest.rows),
            workspace=self._workspace.struct,
        )
        self._kernels.decode(self._model, step)
        return logits

    def _find_largest(self, logits: torch.Tensor) -> tuple[list[float], list[int]]:
        """The step's threads have found them already."""
        assert len(logits) == len(self._largest.rows)
        return self._largest.lists()

    def _draw(self, rows: Sequence[DrawnRow]) -> list[int | None]:
        """As PagedModelRunner's, by our kernel."""
        if len(self._draw_scratch) < torch.get_num_threads():
            self._draw_scratch = draw_scratch(self._config.vocab_size)
        return self._kernels.draw(rows, self._draw_scratch)


def _with_room(scratch: torch.Tensor, num_floats: int) -> torch.Tensor:
    """Scratch for so many: this, or a new one with some to spare."""
    return scratch if scratch.numel() >= num_floats else torch.empty(num_floats * 5 // 4)


class _Logits:
    """One memory for the logits of every step, as many rows as it has."""

    def __init__(self, vocab_size: int) -> None:
        self._by_rows = {0: torch.empty(0, vocab_size)}

    def of(self, rows: int) -> torch.Tensor:
        """[rows, vocab_size], not initialized."""
        found = self._by_rows.get(rows)
        if found is None:
            most = self._by_rows[max(self._by_rows)]
            if rows > len(most):
                most = torch.empty(rows * 5 // 4 + 4, most.shape[1])  # more sequences come one by one
                self._by_rows = {len(most): most}
            found = self._by_rows[rows] = most[:rows]
        return found


class _Workspace:
    """Activations of a step of up to `rows` rows: kept, since new memory costs more than it holds."""

    def __init__(self, config: DecoderConfig, rows: int, *, is_dots: bool) -> None:
        self._rows = rows
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._tensors = {
            "x": torch.empty(rows, config.hidden_size),
            "normed": torch.empty(rows, config.hidden_size),
            "qkv": torch.empty(rows, (heads + 2 * kv_heads) * head_dim),
            "attended": torch.empty(rows, heads * head_dim),
            "inner": torch.empty(rows, config.intermediate_size),
            "scratch": linear_scratch(rows),
            "rounded": rounded_rows(rows, max(config.linear_depths)) if is_dots else None,
        }
        self._threads = torch.get_num_threads()
        pointers = {name: address(tensor) for name, tensor in self._tensors.items()}
        self.struct = made(structs.Workspace, **pointers)

    def serves(self, rows: int) -> bool:
        return rows <= self._rows and torch.get_num_threads() <= self._threads


def _model(config: DecoderConfig, packed: Packed, kv_cache: KVCache) -> Any:
    """Lives as long as `packed` and `kv_cache`, whose addresses it holds."""
    embedding = packed.get("embedding")
    return made(
        structs.Model,
        layers=(structs.Layer * config.num_layers)(
            *(_layer(config, packed, kv_cache, index) for index in range(config.num_layers))
        ),
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=kv_cache.layout.page_size,
        eps=config.rms_norm_eps,
        norm=packed["norm"].data_ptr(),
        head=packed_linear(packed, "head", config.vocab_size).struct(),
        embedding=address(embedding),
        embedding_stored=0 if embedding is None else structs.STORED[embedding.dtype],
    )


def _layer(config: DecoderConfig, packed: Packed, kv_cache: KVCache, index: int) -> Any:
    def linear(name: str, columns: int) -> Any:
        return packed_linear(packed, f"{index}.{name}", columns).struct()

    keys, values = kv_cache.pages(index)
    return made(
        structs.Layer,
        attention_norm=packed[f"{index}.attention_norm"].data_ptr(),
        mlp_norm=packed[f"{index}.mlp_norm"].data_ptr(),
        q_norm=address(packed.get(f"{index}.q_norm")),
        k_norm=address(packed.get(f"{index}.k_norm")),
        qkv=linear("qkv", (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
        output=linear("output", config.hidden_size),
        gate=linear("gate", config.intermediate_size),
        up=linear("up", config.intermediate_size),
        down=linear("down", config.hidden_size),
        window=config.layer_windows[index] or 0,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )
