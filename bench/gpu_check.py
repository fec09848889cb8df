"""Is the GPU path right, and how near is it to the device's limits? `python -m bench.gpu_check`

Random weights of a Llama's shape, sized to the device; needs this repository, torch and numpy, flash-attn if it is to
be tried. Right first: a wrong result ends it with exit status 1, before anything is timed. Then speed, as ratios to the
bandwidth and the FLOP/s measured in the same run. Under 5 minutes: what does not fit is left out, and said so.
`--device cpu --small` runs the same on a CPU, where a stand-in takes the place of CUDA graphs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.gpu_correctness import Check, Correctness, Sizes
from bench.gpu_model import SMALL, RunnerOptions, fitting_shape, float8_model, make_runner, random_model, shallow
from bench.gpu_speed import Machine, Speed, SpeedRun, measure_machine, speeds
from gpu_worker.float8_linear import ScaledMatmul, choose_matmul, row_scaled
from gpu_worker.kv_format import Float8KV
from gpu_worker.model_config import DecoderConfig
from wire.errors import MeshError

TIME_LIMIT_S = 240.0
"""No measurement begins after this."""
SLACK_TOKENS = 256
"""A sequence's KV is rounded up to a page of at most so many tokens."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is. Lengths in tokens."""

    config: DecoderConfig
    sizes: Sizes
    batches: list[int]
    context: int
    steps: int
    prompt: int
    copied_bytes: int
    side: int


@dataclass(slots=True)
class Report:
    device: str
    torch_version: str
    dtype: str
    notes: list[str]
    checks: list[Check] = field(default_factory=list)
    machine: Machine | None = None
    speeds: list[Speed] = field(default_factory=list)
    cut_short: bool = False
    """There was no time for all measurements."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_json(self) -> str:
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        measured = [asdict(speed) | {"ratio": speed.ratio} for speed in self.speeds]
        return json.dumps(asdict(self) | {"passed": self.passed, "checks": checks, "speeds": measured}, indent=2)


def small_scale() -> Scale:
    return Scale(SMALL, Sizes(prompt=40, chunk=16, decode=6), [1, 4], 64, 4, 64, 1 << 22, 128)


def full_scale(free_bytes: int) -> Scale:
    """For so much free device memory: about a third for weights, a quarter for KV."""
    config, context, steps = fitting_shape(free_bytes), 1024, 32
    kv_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * (context + steps + SLACK_TOKENS)
    batches = [num_seqs for num_seqs in (1, 8, 32, 128) if num_seqs * kv_bytes <= free_bytes // 4]
    return Scale(config, Sizes(prompt=700, chunk=256, decode=24), batches, context, steps, 2048, 1 << 30, 8192)


def float8_matmul(device: torch.device, notes: list[str]) -> ScaledMatmul | None:
    if device.type != "cuda":
        return row_scaled  # torch multiplies FP8 on CPUs too: slowly, and the worker does not offer it
    try:
        return choose_matmul(device, torch.cuda.get_device_capability(device))
    except MeshError as error:
        notes.append(f"FP8 weights not run: {error.message}")
        return None


def notes_on(device: torch.device) -> list[str]:
    notes = []
    if device.type != "cuda":
        notes.append("no GPU: CUDA graphs, flash-attn, pinned memory and side streams did not run; stand-ins did")
    if importlib.util.find_spec("flash_attn") is None:
        notes.append("flash-attn is not installed: attention is torch's")
    return notes


def speed_runs(
    scale: Scale, device: torch.device, dtype: torch.dtype, matmul: ScaledMatmul | None, machine: Machine
) -> Iterator[tuple[SpeedRun, list[int], int]]:
    """Each run with its batches and its prompt; a model is made when its turn comes and dropped after it."""
    kv_tokens = max(max(scale.batches) * (scale.context + scale.steps + SLACK_TOKENS), scale.prompt)
    config = scale.config
    model = random_model(config, dtype, device)
    for name, options, batches, prompt in (
        ("eager", RunnerOptions(dtype), scale.batches[:2], scale.prompt),
        ("graphs", RunnerOptions(dtype, graphs=True), scale.batches, 0),
        ("FP8 KV, graphs", RunnerOptions(dtype, "torch", True, Float8KV(dtype)), scale.batches[-2:], 0),
    ):
        runner = make_runner(config, model, device, kv_tokens, options)
        yield SpeedRun(f"{name}, {runner.attention_backend}", config, model, runner, machine), batches, prompt
        del runner
    del model
    if matmul is not None:
        model = float8_model(config, dtype, device, matmul)
        runner = make_runner(config, model, device, kv_tokens, RunnerOptions(dtype, graphs=True))
        name = f"FP8 weights, graphs, {runner.attention_backend}"
        yield SpeedRun(name, config, model, runner, machine), scale.batches, scale.prompt


def run_checks(
    report: Report, scale: Scale, device: torch.device, dtype: torch.dtype, matmul: ScaledMatmul | None
) -> None:
    print(f"{'correct?':<70} {'error':>10} {'limit':>10}")
    for check in Correctness(shallow(scale.config), device, dtype, matmul, scale.sizes).checks():
        report.checks.append(check)
        print(
            f"{check.name:<70} {check.error:10.2g} {check.limit:10.2g}{'' if check.passed else '  WRONG'}", flush=True
        )


def run_speeds(
    report: Report,
    scale: Scale,
    device: torch.device,
    dtype: torch.dtype,
    matmul: ScaledMatmul | None,
    deadline_s: float,
) -> None:
    """deadline_s: by time.monotonic; no measurement begins after it."""
    machine = report.machine = measure_machine(device, dtype, copied_bytes=scale.copied_bytes, side=scale.side)
    print(f"\n{machine.bytes_per_s / 1e9:.0f} GB/s copied, {machine.flop_per_s / 1e12:.2f} TFLOP/s multiplied")
    print(f"{'speed':<52} {'ms':>9} {'tok/s':>9} {'floor ms':>9} {'÷ floor':>8}")
    for run, batches, prompt in speed_runs(scale, device, dtype, matmul, machine):
        for measure in speeds(run, batches, scale.context, scale.steps, prompt):
            if time.monotonic() > deadline_s:
                report.cut_short = True
                print("no time left for the rest")
                return
            speed = measure()
            report.speeds.append(speed)
            print(
                f"{speed.name:<52} {1e3 * speed.step_s:9.3f} {speed.tokens_per_s:9.0f} "
                f"{1e3 * speed.floor_s:9.3f} {speed.ratio:8.2f}",
                flush=True,
            )
        del run  # and with it the runner's KV, before the next one's is made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a torch device; default: cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parsed = parser.parse_args(arguments)
    if parsed.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --small runs what can be run without one")
    if not parsed.device.startswith("cuda") and not parsed.small:
        parser.error(f"--device {parsed.device} needs --small")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """0: everything right; 1: something wrong, and nothing was timed."""
    parsed = parse(arguments)
    started_s = time.monotonic()
    device = torch.device(parsed.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    notes = notes_on(device)
    matmul = float8_matmul(device, notes)
    scale = small_scale() if parsed.small else full_scale(torch.cuda.mem_get_info(device)[0])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report = Report(name, torch.__version__, str(dtype).removeprefix("torch."), notes)
    print(f"{name}, torch {torch.__version__}, {report.dtype}", *notes, sep="\n")
    with torch.no_grad():
        run_checks(report, scale, device, dtype, matmul)
        if report.passed:
            run_speeds(report, scale, device, dtype, matmul, started_s + TIME_LIMIT_S)
    report.seconds = round(time.monotonic() - started_s, 1)
    if parsed.json is not None:
        parsed.json.write_text(report.as_json() + "\n")
    print(f"\n{'all right' if report.passed else 'WRONG RESULTS'}, {report.seconds} s")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
