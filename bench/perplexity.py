"""What fewer bits cost in quality: `python -m bench.perplexity [--model DIR|NAME] [--text FILE]`.

The text is run through the worker's own model, teacher-forced, once with every weight type, and with inputs of linear
layers rounded to it where that is possible; every token is scored by the logits of the position before it. Perplexity =
exp(mean negative log-likelihood). Against float32 also the mean Kullback-Leibler divergence in nats, and how often both
would pick the same next token.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from gpu_worker.activation_dtype import VARIABLE as ACTIVATION_VARIABLE
from gpu_worker.model_runner import load_runner
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.step_batch import StepBatch
from wire.config import WorkerConfig, load
from wire.errors import ConfigInvalid
from wire.model_path import cache_root, model_path

REFERENCE = "float32"
ARMS = {
    REFERENCE: ("float32", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "int8": ("int8", "float32"),
    "bfloat16, inputs too": ("bfloat16", "bfloat16"),
    "int8, inputs too": ("int8", "int8"),
}
"""Types of weights, and of what the inputs of linear layers are rounded to, by the name of their row."""
TEXT = Path(__file__).parents[1] / "tests" / "data" / "prose.txt"
WINDOW_TOKENS = 2048
"""Longest context of a prediction; a longer text is cut, and each part starts anew."""
CHUNK_TOKENS = 128
"""Tokens of one forward pass: the logits of all types are held at once."""
PAGE_SIZE = 64


@dataclass(slots=True)
class Score:
    """Sums over the tokens scored, in nats."""

    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    same_choice: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """logits, reference: [n, vocab_size]; targets: [n] token ids."""
        logprobs, expected = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
        self.tokens += len(targets)
        self.loss -= float(logprobs.gather(1, targets.unsqueeze(1)).sum())
        self.divergence += float((expected.exp() * (expected - logprobs)).sum())
        self.same_choice += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.loss / self.tokens, dtype=torch.float64).exp())


def window_logits(runner: PagedModelRunner, tokens: list[int]) -> Iterator[torch.Tensor]:
    """Logits [n, vocab_size] of all tokens of a sequence on the runner's first pages, chunk after chunk."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(tokens))
        positions = list(range(start, end))
        block_table = list(range(-(-end // runner.page_size)))
        batch = StepBatch(tokens[start:end], positions, positions, [end - start], [end], [block_table])
        batch.logit_rows = list(range(end - start))
        yield runner.forward(batch)


def score(runners: dict[str, PagedModelRunner], tokens: list[int], window: int) -> dict[str, Score]:
    """Score a text of token ids by every runner, side by side; `window` tokens at most see each other."""
    scores = {name: Score() for name in runners}
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        position = 0
        for chunk in zip(*(window_logits(runner, part) for runner in runners.values()), strict=True):
            logits = dict(zip(runners, chunk, strict=True))
            targets = torch.tensor(part[position + 1 : position + 1 + len(chunk[0])], dtype=torch.int64)
            position += len(chunk[0])
            for name, counted in scores.items():
                counted.add(logits[name][: len(targets)], logits[REFERENCE][: len(targets)], targets)
    return scores


def open_runner(config: WorkerConfig, arm: str, window: int) -> PagedModelRunner:
    """Raises ConfigInvalid where the inputs cannot be rounded to what the arm says."""
    weight_dtype, activation_dtype = ARMS[arm]
    return load_runner(
        model_path(config.model),
        device="cpu",
        weight_dtype=weight_dtype,
        activation_dtype=activation_dtype,
        attention_backend=config.attention_backend,
        page_size=PAGE_SIZE,
        num_pages=max(2, -(-window // PAGE_SIZE)),
        kv_memory_bytes=0,
        max_model_len=None,
        name=arm,
        kernels_dir=cache_root(config.model) if config.cpu_kernels == "auto" else None,
    )


def open_runners(config: WorkerConfig, window: int) -> tuple[dict[str, PagedModelRunner], dict[str, str]]:
    """The arms that are possible here, and why the others are not, by name."""
    runners, obstacles = {}, {}
    for arm in ARMS:
        try:
            runners[arm] = open_runner(config, arm, window)
        except ConfigInvalid as error:
            if error.param != ACTIVATION_VARIABLE:
                raise
            obstacles[arm] = error.message
    return runners, obstacles


def table(scores: dict[str, Score]) -> str:
    reference = scores[REFERENCE]
    lines = [
        "| weights | perplexity | ÷ float32 | mean KL to float32, nats | same most likely token |",
        "|---|---|---|---|---|",
    ]
    for name, counted in scores.items():
        lines.append(
            f"| {name} | {counted.perplexity:.4f} | {counted.perplexity / reference.perplexity:.5f} "
            f"| {counted.divergence / counted.tokens:.2e} | {counted.same_choice / counted.tokens:.2%} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks to be scored, and with what."""

    config: WorkerConfig
    tokens: list[int]
    what: str
    """Of the text and the threads, for the heading."""


def parse_command_line(description: str | None, *, least_tokens: int) -> Asked:
    """--model, --text and --threads; ends the process with a message where they make no sense."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or name; default: PHASEMESH_MODEL")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text; default: the one the tests use")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if not arguments.text.is_file():
        parser.error(f"--text {arguments.text}: no such file")
    torch.set_num_threads(arguments.threads)
    chosen = {"PHASEMESH_MODEL": arguments.model} if arguments.model else {}
    config = load(WorkerConfig, {**os.environ, **chosen})
    tokenizer = Tokenizer.from_file(str(model_path(config.model) / "tokenizer.json"))
    tokens: list[int] = tokenizer.encode(arguments.text.read_text(encoding="utf-8")).ids
    if len(tokens) < least_tokens:
        parser.error(f"--text {arguments.text}: {len(tokens)} tokens; {least_tokens} at least")
    return Asked(config, tokens, f"{arguments.text.name}, {arguments.threads} threads")


def main() -> None:
    asked = parse_command_line(__doc__, least_tokens=2)  # one predicts the next
    runners, obstacles = open_runners(asked.config, WINDOW_TOKENS)
    window = min(WINDOW_TOKENS, *(runner.card.max_model_len for runner in runners.values()))
    print(f"{asked.what}: {len(asked.tokens)} tokens in windows of {window}\n")
    print(table(score(runners, asked.tokens, window)))
    for arm, obstacle in obstacles.items():
        print(f"\nnot run: {arm}: {obstacle}")


if __name__ == "__main__":
    main()
