"""Workers that leave and join all the while: `python -m bench.churn`.

A stack of simulated workers serves requests that share prefixes, while one worker after the other is killed (SIGKILL)
or told to go (SIGTERM) and started again. What has to be true at the end, or the exit status is 1:

    every request ended once, with the tokens predicted        each answer is read to its end and compared
    no KV page is in use or retiring, no sequence is left       the scheduler's and the workers' metrics
    no request is admitted or queued in Redis                   {cell}:live, the lanes
    the prefix index has no drift                               the scheduler's audits, once traffic has ended

A simulated worker's pages hold digests of their prefixes (gpu_worker/simulated_kv.py): a page reused, copied or pulled
wrongly would end its request in an error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis
import uvloop

from bench.openai_stream import BenchFailed
from bench.predicted_client import Answers, PredictedRequest, ask_all
from bench.prefix_workloads import PrefixShape, shared_prefixes
from bench.prompts import TokenIds
from bench.simulated_cost import simulated_variables
from bench.stack import Stack, model_facts, running_stack, samples
from bench.worker_processes import WorkerProcess, open_workers
from gpu_worker.step_cost import PullCost, StepCost
from observability import names
from wire import keys
from wire.plan import Role

CELL = "default"
COST = StepCost(fixed_us=15_000, prefill_token_us=20)
"""Long steps, so that two cores serve 16 workers and what goes wrong between two steps has time to."""
PULL_COST = PullCost(fixed_us=2_000, unit_us=200)
PAGES, PAGE_SIZE = 160, 64
AUDIT_S = 2.0
SETTLED_TIMEOUT_S = 20.0
POLL_S = 0.1
SHOWN = 10
"""Of wrong answers."""


@dataclass(frozen=True, slots=True)
class Churn:
    """What is asked, and how restless it is."""

    workers: int
    """One of them is the stack's own and stays, so that no request waits for long without any."""
    shape: PrefixShape
    concurrency: int
    every_s: float
    """A worker leaves this often; it joins again after about as long."""
    roles: tuple[Role, ...] = (Role.BOTH,)
    """Of those that come and go, in turn."""
    seed: int = 0


@dataclass(slots=True)
class ChurnResult:
    answers: Answers
    duration_s: float
    leaves: Counter[str] = field(default_factory=Counter)
    """killed, stopped."""
    left_over: dict[str, float] = field(default_factory=dict)
    """What should be 0 at the end, and is not."""
    displaced: float = 0.0
    pulls: float = 0.0
    repairs: float = 0.0
    """Units of the prefix index that audits found wrong and set right on the way."""

    @property
    def is_sound(self) -> bool:
        return not self.left_over and not self.answers.wrong


def run_churn(churn: Churn) -> ChurnResult:
    """Raises BenchFailed when the stack does not start."""
    variables = {
        "KV_PAGES": str(PAGES),
        "KV_PAGE_SIZE": str(PAGE_SIZE),
        "STEP_TOKEN_BUDGET": "512",
        "NO_WORKER_GRACE_S": "30",
        "INDEX_AUDIT_S": str(AUDIT_S),
        **simulated_variables(COST, PULL_COST),
    }
    with running_stack(["--simulate", "--workers", "1"], variables) as stack:
        environ = {f"PHASEMESH_{name}": value for name, value in variables.items()}
        environ |= {"PHASEMESH_REDIS_URL": stack.health_url("redis"), "PHASEMESH_SIMULATE": "on"}
        wanted = [(f"comes-and-goes-{n}", churn.roles[n % len(churn.roles)]) for n in range(1, churn.workers)]
        with open_workers(wanted, environ, stack.state_dir) as workers:
            return uvloop.run(_run(stack, churn, workers))


async def _run(stack: Stack, churn: Churn, workers: Sequence[WorkerProcess]) -> ChurnResult:
    await asyncio.gather(*(worker.until_healthy() for worker in workers))
    requests = [
        PredictedRequest(seed, list(request.prompt.token_ids), request.max_tokens)
        for seed, request in enumerate(shared_prefixes(churn.shape, churn.seed), 1)
        if isinstance(request.prompt, TokenIds)
    ]
    leaves: Counter[str] = Counter()
    began_s = time.monotonic()
    restless = asyncio.create_task(_come_and_go(workers, churn, leaves))
    answers = await ask_all(stack.url, model_facts(), requests, concurrency=churn.concurrency)
    duration_s = time.monotonic() - began_s
    restless.cancel()
    await asyncio.gather(restless, return_exceptions=True)
    for worker in workers:
        worker.start()
    await asyncio.gather(*(worker.until_healthy() for worker in workers))
    result = ChurnResult(answers, duration_s, leaves)
    result.left_over = await asyncio.to_thread(_until_settled, stack, workers)
    result.displaced = stack.metric("scheduler", f"{names.SCHEDULER_DISPLACED}_total")
    result.repairs = stack.metric("scheduler", f"{names.PREFIX_INDEX_REPAIRS}_total")
    result.pulls = stack.metric("scheduler", f"{names.SCHEDULER_PULLS}_total")
    return result


async def _come_and_go(workers: Sequence[WorkerProcess], churn: Churn, leaves: Counter[str]) -> None:
    """One leaves; the one that left before it joins again."""
    rng = random.Random(f"churn {churn.seed}")
    away: WorkerProcess | None = None
    while True:
        await asyncio.sleep(churn.every_s)
        present = [worker for worker in workers if worker.is_running]
        leaving = rng.choice(present)
        if rng.random() < 0.5:
            leaving.kill()
            leaves["killed"] += 1
        else:
            leaving.stop()
            leaves["stopped"] += 1
        if away is not None:
            away.start()
        away = leaving


def _until_settled(stack: Stack, workers: Sequence[WorkerProcess]) -> dict[str, float]:
    """What is left over when it stops changing for the better: nothing, if all is well."""
    left = _until_none(lambda: _left_over(stack, workers))
    time.sleep(2 * AUDIT_S)  # what differs from a worker is drift if it does in two audits in a row
    return left | _until_none(lambda: _drift(stack, 1 + len(workers)))


def _until_none(left_over: Callable[[], dict[str, float]]) -> dict[str, float]:
    deadline_s = time.monotonic() + SETTLED_TIMEOUT_S
    while (left := {name: value for name, value in left_over().items() if value}) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left


def _drift(stack: Stack, num_workers: int) -> dict[str, float]:
    found = samples(stack.health_url("scheduler"), names.PREFIX_INDEX_DRIFT)
    audited = sum("twin-worker" in labels for labels in found)
    return {"units of drift": sum(found.values()), "workers not audited": num_workers - audited}


def _left_over(stack: Stack, workers: Sequence[WorkerProcess]) -> dict[str, float]:
    pages = {
        f"pages {state}": stack.metric("scheduler", names.SCHEDULER_KV_PAGES, f'state="{state}"')
        for state in ("in_use", "retiring")
    }
    sequences = sum(worker.metric(names.WORKER_SEQUENCES) for worker in workers)
    sequences += stack.metric("worker-1", names.WORKER_SEQUENCES)
    with redis.Redis.from_url(stack.health_url("redis")) as client:
        live = int(client.scard(keys.live(CELL)))
        queued = sum(int(client.xlen(keys.requests(CELL, lane))) for lane in keys.LANES)
    return {**pages, "sequences on workers": sequences, "admitted in Redis": live, "entries in lanes": queued}


def report(result: ChurnResult) -> str:
    answers = result.answers
    total = len(answers.requests)
    lines = [
        f"{total - len(answers.wrong)} of {total} requests ended once with the tokens predicted, "
        f"{answers.tokens} tokens in {result.duration_s:.1f} s",
        f"{result.leaves['killed']} workers killed and {result.leaves['stopped']} stopped; "
        f"{result.displaced:.0f} sequences displaced, {result.pulls:.0f} pulls of KV, "
        f"{result.repairs:.0f} units of the prefix index repaired",
    ]
    lines += [f"wrong: {text}" for text in answers.wrong[:SHOWN]]
    lines += [f"left over: {name}: {value:g}" for name, value in result.left_over.items()]
    lines.append("sound" if result.is_sound else "NOT SOUND")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=96, help="clients; default: %(default)s")
    parser.add_argument("--every-s", type=float, default=2.0, help="a worker leaves this often; default: %(default)s")
    parser.add_argument("--split", action="store_true", help="those that come and go only prefill, or only decode")
    parser.add_argument("--seed", type=int, default=0, help="of requests and of who leaves; default: %(default)s")
    asked = parser.parse_args()
    if asked.workers < 3:
        parser.error(f"--workers {asked.workers}: at least 3: one that stays and two that come and go")
    churn = Churn(
        asked.workers,
        shape_of(asked.requests),
        asked.concurrency,
        asked.every_s,
        roles=(Role.PREFILL, Role.DECODE) if asked.split else (Role.BOTH,),
        seed=asked.seed,
    )
    try:
        result = run_churn(churn)
    except BenchFailed as error:
        raise SystemExit(f"bench.churn: {error.message}") from None
    print(report(result))
    raise SystemExit(0 if result.is_sound else 1)


def shape_of(requests: int) -> PrefixShape:
    """Prefixes such that a worker cannot keep all it ever saw."""
    prefixes = max(4, min(60, requests // 20))
    return PrefixShape(
        prefixes, requests, prefix_tokens=512, output_tokens=(8, 24), min_per_prefix=requests // prefixes
    )


if __name__ == "__main__":
    main()
