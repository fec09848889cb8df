"""What the scheduler's policy costs: `python -m bench.engine_cost`, in µs of CPU time per scheduled token.

Drives scheduler.engine alone, with workers that echo (one, where not said otherwise): every plan's steps are reported
at once, and only handle() is on the clock. Each figure is the smallest of several rounds. A token is scheduled when a
step computes it: an output token, or a prompt token that was not cached.

| case | what runs |
|---|---|
| decode | N sequences decode, none begins or ends |
| turnover | N sequences of 128 tokens in and 64 out; one that ends is replaced by an arrival |
| prefill | N sequences at a time of 512 new tokens in, 1 out |
| hit | the same, 480 of the 512 cached; per prompt token, cached ones included |
| backlog | N sequences decode while BACKLOG more, of 256 tenants, wait for a place |
| route | N sequences at a time of 2,000 tokens, 1,920 of them one of 64 prefixes, 1 out, on 16 workers; as hit |
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvstore.prefix_hash import namespace, root_hash
from scheduler.commands import DispatchPlan, FinishRequest
from scheduler.engine import Engine
from scheduler.events import Event, PullReported, Request, RequestArrived, StepReported, WorkerUp
from wire.collector import calm_collector
from wire.config import BatchingConfig
from wire.ids import UNIT_TOKENS, Epoch, Fence, GatewayId, RequestId, SeqId, WorkerId
from wire.plan import ModelCard, Progress, PullReport, Role, StepPlan, StepReport, StepTiming, WorkerInfo
from wire.sampling import FinishReason, SamplingParams

SIZES = (1, 8, 64, 512, 4096)
PAGE_SIZE = 16
MIN_CHUNK = 16
BACKLOG = 4096
TENANTS = 256
ROUTED_TOKENS, ROUTED_SHARED, ROUTED_PREFIXES = 2000, 1920, 64
UNIT_BYTES = 1 << 16
ENDLESS = 1 << 20
"""max_tokens of a sequence that does not end."""
CARD = ModelCard("m", "r", "LlamaForCausalLM", 1 << 16, 1 << 22, (2,), "float32")
ROOT = root_hash(namespace(CARD))


@dataclass(slots=True)
class _Running:
    incarnation: int
    num_computed: int
    left: int
    """Tokens it still samples."""
    granted_slots: int


class EchoWorker:
    """Reports every step of every plan, and every pull, as a worker that computes nothing would."""

    def __init__(self, worker_id: str, num_pages: int) -> None:
        self.info = WorkerInfo(
            WorkerId(worker_id), Epoch(1), Role.BOTH, "127.0.0.1:1", CARD, num_pages, PAGE_SIZE, UNIT_TOKENS, UNIT_BYTES
        )
        self.plans: deque[StepPlan] = deque()
        self.pulled: deque[PullReport] = deque()
        self._running: dict[SeqId, _Running] = {}
        self._members: list[SeqId] = []
        self._step = 0

    @property
    def num_decoding(self) -> int:
        return len(self._members)

    def next_report(self) -> StepReport | None:
        """One step of the oldest plan; None without a plan."""
        if not self.plans:
            return None
        plan = self.plans[0]
        progress = self._first_step(plan) if self._step == 0 else self._decode_all()
        step, self._step = self._step, self._step + 1
        done = self._step >= plan.max_steps or len(self.plans) > 1 or not any(map(self._can_decode, self._members))
        if done:
            self.plans.popleft()
            self._step = 0
        chunks = plan.prefill_chunks if step == 0 else []
        num_prefill = sum(chunk.num_tokens for chunk in chunks)
        timing = StepTiming(0, 0, 1000, 0, num_prefill, len(progress) - len(chunks), 64 * len(progress))
        return StepReport(plan.plan_id, step, done, progress, timing)

    def _first_step(self, plan: StepPlan) -> list[Progress]:
        self.pulled += [PullReport(pull.pull_id, True, len(pull.unit_hashes)) for pull in plan.kv_pulls]
        for release in plan.releases:
            self._running.pop(release.seq_id, None)
        for decode in plan.decodes:
            if decode.grant is not None and decode.seq_id in self._running:
                self._running[decode.seq_id].granted_slots = decode.grant.granted_slots
        self._members = [decode.seq_id for decode in plan.decodes]
        progress = self._decode_all()
        for chunk in plan.prefill_chunks:
            if chunk.start is not None:
                assert chunk.grant is not None
                left, granted = chunk.start.sampling.max_tokens, chunk.grant.granted_slots
                self._running[chunk.seq_id] = _Running(chunk.incarnation, chunk.start_pos, left, granted)
            running = self._running[chunk.seq_id]
            running.num_computed += chunk.num_tokens
            if chunk.children:
                self._members.append(chunk.seq_id)
                progress.append(self._sample(chunk.seq_id, running))
            else:
                progress.append(Progress(chunk.seq_id, running.incarnation, running.num_computed, []))
        return progress

    def _can_decode(self, seq_id: SeqId) -> bool:
        running = self._running.get(seq_id)
        return running is not None and running.num_computed < running.granted_slots

    def _decode_all(self) -> list[Progress]:
        progress = []
        for seq_id in self._members:
            running = self._running.get(seq_id)
            if running is not None and running.num_computed < running.granted_slots:
                running.num_computed += 1
                progress.append(self._sample(seq_id, running))
        return progress

    def _sample(self, seq_id: SeqId, running: _Running) -> Progress:
        running.left -= 1
        progress = Progress(seq_id, running.incarnation, running.num_computed, [7])
        if not running.left:
            progress.finish_reason = FinishReason.LENGTH
            del self._running[seq_id]
        return progress


class Loop:
    """An engine and its workers; `cpu_ns` grows by what handle() takes."""

    def __init__(self, size: int, *, itl_target_ms: float, is_full: bool = False, num_workers: int = 1) -> None:
        """is_full: no more than `size` sequences may run."""
        budget = (size + min(size, MIN_CHUNK)) if is_full else max(2048, 2 * size)
        config = BatchingConfig(step_token_budget=budget, min_chunk_tokens=MIN_CHUNK, itl_target_ms=itl_target_ms)
        self.engine = Engine(config, no_worker_grace_s=4.0, routing_seed=0, fence=Fence(1))
        num_pages = max(1 << 17, 128 * size) // num_workers
        self.workers = {w.info.worker_id: w for w in (EchoWorker(f"w{i}", num_pages) for i in range(num_workers))}
        self.worker = next(iter(self.workers.values()))
        self.cpu_ns = 0
        self.scheduled = 0
        self.finished = 0
        self._numbers = count()
        self._now = 0.0
        for worker in self.workers.values():
            self._handle(WorkerUp(worker.info, []))

    def arrive(self, prompt: list[int], max_tokens: int, tenant: str = "default") -> None:
        request_id = RequestId(f"r{next(self._numbers)}")
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        self._handle(RequestArrived(Request(request_id, GatewayId("g"), prompt, sampling, ROOT, tenant=tenant)))

    def step(self) -> bool:
        """Report one step of every worker, and what was pulled; False when none has a plan."""
        has_stepped = False
        for worker in self.workers.values():
            worker_id, epoch = worker.info.worker_id, worker.info.epoch
            report = worker.next_report()
            while worker.pulled:
                self._handle(PullReported(worker_id, epoch, worker.pulled.popleft()))
            if report is not None:
                has_stepped = True
                if report.timing is not None:
                    self.scheduled += report.timing.prefill_tokens + report.timing.decode_tokens
                self._handle(StepReported(worker_id, epoch, report))
        return has_stepped

    def _handle(self, event: Event) -> None:
        self._now += 1e-3
        began_ns = time.thread_time_ns()
        commands = self.engine.handle(event, self._now)
        self.cpu_ns += time.thread_time_ns() - began_ns
        for command in commands:
            match command:
                case DispatchPlan(worker_id, _, plan):
                    self.workers[worker_id].plans.append(plan)
                case FinishRequest():
                    self.finished += 1
                case _:
                    pass


def prompts(length: int, shared: int = 0) -> Iterator[list[int]]:
    """Prompts of which the first `shared` tokens are those of all others."""
    for number in count():
        own = [10 + (number * 31 + i * i) % 60_000 for i in range(shared, length - 1)]
        yield [5] * shared + own + [number % 60_000]


Round = Callable[[], float]
"""Runs one round; µs per token."""


def _per_scheduled(loop: Loop, tokens: int) -> float:
    before_ns, before = loop.cpu_ns, loop.scheduled
    steps = 0
    while loop.scheduled - before < tokens or steps < 32:
        assert loop.step()
        steps += 1
    return (loop.cpu_ns - before_ns) / 1000 / (loop.scheduled - before)


def decode(size: int, tokens: int, itl_target_ms: float, waiting: int = 0) -> Round:
    loop, fresh = Loop(size, itl_target_ms=itl_target_ms, is_full=waiting > 0), prompts(64)
    for number in range(size):
        loop.arrive(next(fresh)[: 64 - number % PAGE_SIZE], ENDLESS)  # pages fill up at different steps
    while loop.worker.num_decoding < size:
        assert loop.step()
    for number in range(waiting):
        loop.arrive(next(fresh), 8, tenant=f"t{number % TENANTS}")
    return lambda: _per_scheduled(loop, tokens)


def backlog(size: int, tokens: int, itl_target_ms: float) -> Round:
    return decode(size, tokens, itl_target_ms, waiting=BACKLOG)


def turnover(size: int, tokens: int, itl_target_ms: float) -> Round:
    loop, fresh = Loop(size, itl_target_ms=itl_target_ms), prompts(128)
    for number in range(size):
        loop.arrive(next(fresh), 1 + (number * 64) // size)  # ends spread over time
    loop.scheduled = 0

    def run() -> float:
        before_ns, before = loop.cpu_ns, loop.scheduled
        while loop.scheduled - before < tokens:
            ended = loop.finished
            assert loop.step()
            for _ in range(loop.finished - ended):
                loop.arrive(next(fresh), 64)
        return (loop.cpu_ns - before_ns) / 1000 / (loop.scheduled - before)

    return run


def prefill(size: int, tokens: int, itl_target_ms: float, shared: int = 0) -> Round:
    loop, fresh = Loop(size, itl_target_ms=itl_target_ms), prompts(512, shared)

    def run() -> float:
        before_ns, before = loop.cpu_ns, loop.finished
        asked = 0
        while loop.finished - before < max(size, tokens // 512):
            while asked - (loop.finished - before) < size:
                loop.arrive(next(fresh), 1)
                asked += 1
            assert loop.step()
        while loop.step():
            pass
        return (loop.cpu_ns - before_ns) / 1000 / (512 * asked)

    return run


def hit(size: int, tokens: int, itl_target_ms: float) -> Round:
    return prefill(size, tokens, itl_target_ms, shared=480)


def route(size: int, tokens: int, itl_target_ms: float) -> Round:
    loop = Loop(size, itl_target_ms=itl_target_ms, num_workers=16)
    numbers, prefixes = count(), [[5 + which] * ROUTED_SHARED for which in range(ROUTED_PREFIXES)]
    own = ROUTED_TOKENS - ROUTED_SHARED

    def run() -> float:
        before_ns, before, asked = loop.cpu_ns, loop.finished, 0
        while loop.finished - before < max(size, tokens // ROUTED_TOKENS):
            while asked - (loop.finished - before) < size:
                number = next(numbers)
                suffix = [100 + (number * 31 + i * i) % 60_000 for i in range(own - 1)] + [number % 60_000]
                loop.arrive(prefixes[number * 7 % ROUTED_PREFIXES] + suffix, 1)
                asked += 1
            assert loop.step()
        while loop.step():
            pass
        return (loop.cpu_ns - before_ns) / 1000 / (ROUTED_TOKENS * asked)

    return run


CASES = {"decode": decode, "turnover": turnover, "prefill": prefill, "hit": hit, "backlog": backlog, "route": route}


def measure(case: str, size: int, rounds: int, tokens: int, itl_target_ms: float) -> float:
    """µs per token, the smallest of the rounds; the first one warms up."""
    run = CASES[case](size, tokens, itl_target_ms)
    run()
    return min(run() for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="sequences; default: 1 8 64 512 4096")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=20_000, help="of a round, at least; default: %(default)s")
    parser.add_argument("--itl-target-ms", type=float, default=BatchingConfig().itl_target_ms, help="as in service")
    asked = parser.parse_args()
    calm_collector()  # as the service does
    print("µs CPU per token  " + "".join(f"{size:>9}" for size in asked.sizes) + "   sequences")
    for case in asked.cases:
        cells = [measure(case, size, asked.rounds, asked.tokens, asked.itl_target_ms) for size in asked.sizes]
        print(f"{case:<18}" + "".join(f"{cell:9.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
