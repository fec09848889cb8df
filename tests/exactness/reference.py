"""What transformers says: greedy tokens, and how far each was from the runner-up.

Committed for SmolLM2, computed live for the tiny families.

The rule (design §6): every emitted token, scored by one teacher-forced reference pass over the emitted sequence,
lies within LOGIT_TOLERANCE of that step's maximum logit; those that are not the maximum itself are counted.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.exactness.prompts import PROMPTS, Prompt

LOGIT_TOLERANCE = 1e-3
LOGPROB_TOLERANCE = 1e-3
MAX_DIFFERENT_SHARE = 0.005
DATA = Path(__file__).parent / "data" / "smollm2_reference.json"


@dataclass(frozen=True)
class Reference:
    """Greedy continuation of one prompt, per output token."""

    prompt_digest: int
    """CRC-32 of the prompt's token ids: the committed tokens belong to these."""
    tokens: list[int]
    gaps: list[float]
    """Maximum logit − second largest."""
    logprobs: list[float]
    """Of the tokens."""


@dataclass
class Tally:
    """Counted over a run of many prompts."""

    tokens: int = 0
    different: int = 0

    @property
    def share(self) -> float:
        return self.different / max(1, self.tokens)

    def __str__(self) -> str:
        return f"{self.different} of {self.tokens} tokens are not the reference's"


class TransformersModel:
    """The reference implementation, fp32 on CPU."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], output_tokens: int) -> list[int]:
        """transformers' own greedy `generate`."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=output_tokens
        )
        return [int(t) for t in out[0, len(prompt) :]]

    @torch.inference_mode()
    def output_logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """[len(output), vocab]: the logits each output token was drawn from, in one teacher-forced pass."""
        ids = torch.tensor([prompt + output[:-1]])
        logits: torch.Tensor = self.model(ids, logits_to_keep=len(output)).logits[0]
        return logits.float()

    def reference(self, prompt: list[int], output_tokens: int) -> Reference:
        tokens = self.generate(prompt, output_tokens)
        logits = self.output_logits(prompt, tokens)
        top = logits.topk(2).values
        chosen = logits.log_softmax(-1)[range(len(tokens)), tokens]
        return Reference(
            prompt_digest(prompt),
            tokens,
            [round(float(g), 5) for g in top[:, 0] - top[:, 1]],
            [round(float(p), 5) for p in chosen],
        )


@lru_cache(maxsize=1)
def smollm2_model(directory: Path) -> TransformersModel:
    return TransformersModel(directory)


def prompt_digest(token_ids: list[int]) -> int:
    return zlib.crc32(",".join(map(str, token_ids)).encode())


def encode_prompt(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt; `tokenizer` is a tokenizers.Tokenizer."""
    ids: list[int] = tokenizer.encode(prompt.text, add_special_tokens=False).ids
    if prompt.length is None:
        return ids
    assert len(ids) >= prompt.length, prompt.name
    return ids[: prompt.length]


def committed() -> dict[str, Reference]:
    return {name: Reference(**fields) for name, fields in json.loads(DATA.read_text()).items()}


def check(
    name: str, prompt: list[int], output: list[int], reference: Reference, model: TransformersModel | None, tally: Tally
) -> None:
    """Hold one greedy output against the rule. `model` None: an output that differs has no second chance."""
    assert prompt_digest(prompt) == reference.prompt_digest, f"{name}: the reference is of another prompt"
    tally.tokens += len(output)
    if output == reference.tokens:
        return
    assert model is not None, f"{name}: {output} is not the reference {reference.tokens}"
    logits = model.output_logits(prompt, output)
    best = logits.max(-1)
    for index, token in enumerate(output):
        behind = float(best.values[index] - logits[index, token])
        assert behind <= LOGIT_TOLERANCE, f"{name}: token {index} ({token}) is {behind:.4f} below the maximum logit"
    tally.different += sum(int(best.indices[i]) != t for i, t in enumerate(output))
    ended_alike = len(output) == len(reference.tokens) or output[-1] != reference.tokens[len(output) - 1]
    assert ended_alike, f"{name}: {len(output)} tokens, the reference has {len(reference.tokens)}"


def check_logprobs(name: str, output: list[int], logprobs: list[float], reference: Reference) -> None:
    """Log-probabilities of the tokens up to the first difference."""
    assert len(logprobs) == len(output), name
    for index, (token, expected) in enumerate(zip(reference.tokens, reference.logprobs, strict=True)):
        if index >= len(output) or output[index] != token:
            return
        assert abs(logprobs[index] - expected) <= LOGPROB_TOLERANCE, f"{name}: logprob {index}"


def regenerate(model_dir: Path) -> None:
    """Bring the committed file up to date with the prompts; what is there already stays."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    model = TransformersModel(model_dir)
    known = committed() if DATA.exists() else {}
    table = {}
    for prompt in PROMPTS:
        ids = encode_prompt(prompt, tokenizer)
        kept = known.get(prompt.name)
        if kept is None or kept.prompt_digest != prompt_digest(ids):
            kept = model.reference(ids, prompt.output_tokens)
            print(prompt.name, len(ids), min(kept.gaps), flush=True)
        table[prompt.name] = asdict(kept)
    rows = [f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in table.items()]
    DATA.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    import sys

    regenerate(Path(sys.argv[1]))
