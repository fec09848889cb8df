"""What both generation endpoints take, validated before anything is tokenized or allocated."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.api.fields import Fields, check_integer, check_number, kind_of
from wire.entries import CellCard
from wire.errors import ContextLengthExceeded, InvalidRequest, KVCapacityExceeded
from wire.sampling import SamplingParams

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_TOKEN_COUNT = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_NAME_CHARS = 512
GREEDY_BELOW = 1e-5
"""A smaller temperature is argmax: dividing by it would overflow, and nothing else would be drawn anyway."""

COMMON = frozenset(
    {
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "n",
        "best_of",
        "stream",
        "stream_options",
        "return_token_ids",
        "include_stop_str_in_output",
        "add_special_tokens",
        "priority",
        "service_tier",
        "cache_salt",
    }
)
HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
"""OpenAI's fields that change nothing about the tokens: accepted and ignored."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "audio": (),
    "web_search_options": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "top_logprobs": (),
}
"""Fields that would change the result and are not supported (here): only values that ask for nothing pass."""


@dataclass(frozen=True, slots=True)
class Options:
    """One request's settings, the prompt aside."""

    model: str
    sampling: SamplingParams
    """All but max_tokens, which `fitted` sets once the prompt's length is known."""
    max_tokens: int | None
    max_tokens_field: str
    """The name the client used for it."""
    stops: tuple[str, ...]
    include_stop: bool
    num_choices: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    add_special_tokens: bool
    priority: int
    batch_lane: bool
    cache_salt: str

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a stop or biased token that the model does not have."""
        for token_id in self.sampling.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0, vocab_size - 1)
        for token_id, _ in self.sampling.logit_bias:
            check_integer("logit_bias", token_id, 0, vocab_size - 1)

    def fitted(self, prompt_tokens: int, card: CellCard, default_max_tokens: int | None) -> SamplingParams:
        """Sampling with max_tokens set, for a prompt that fits by itself.

            [0, prompt_tokens) prompt | [prompt_tokens, + max_tokens) output | usable_tokens(card)

        Raises ContextLengthExceeded or KVCapacityExceeded with the numbers when the output does not fit.
        """
        limit = usable_tokens(card)
        left = limit - prompt_tokens
        wanted = self.max_tokens
        if wanted is None:
            wanted = min(left, default_max_tokens or left)
        elif wanted > left:
            is_context = limit == card.max_model_len
            raise (ContextLengthExceeded if is_context else KVCapacityExceeded)(
                f"{self.max_tokens_field}: {prompt_tokens} prompt tokens and {wanted} output tokens are "
                f"{prompt_tokens + wanted}, but {'the context' if is_context else 'the KV cache'} holds {limit}",
                param=self.max_tokens_field,
            )
        if self.sampling.min_tokens > wanted:
            raise InvalidRequest(
                f"min_tokens: {self.sampling.min_tokens} is more than the {wanted} tokens of output allowed",
                param="min_tokens",
            )
        return replace(self.sampling, max_tokens=wanted)


def usable_tokens(card: CellCard) -> int:
    """Prompt and output tokens that one sequence may have."""
    return min(card.max_model_len, card.max_request_tokens)


def read_options(fields: Fields, known: Collection[str], *, logprobs: int | None, add_special_tokens: bool) -> Options:
    """Read every common field; `known` are the endpoint's own, `add_special_tokens` its default.

    Raises InvalidRequest naming the first wrong field.
    """
    _refuse_unsupported(fields, known)
    fields.refuse_others({*COMMON, *HARMLESS, *NEUTRAL, *known})
    model = fields.string("model", max_chars=MAX_NAME_CHARS)
    if not model:
        fields.fail("model", "is required")
    num_choices = fields.integer("n", 1, MAX_CHOICES) or 1
    if (best_of := fields.integer("best_of", 1, MAX_CHOICES)) is not None and best_of != num_choices:
        fields.fail("best_of", f"must equal n ({num_choices}): choices are not ranked")
    max_tokens_field, max_tokens = _max_tokens(fields)
    stream = fields.boolean("stream")
    return Options(
        model=model,
        sampling=_sampling(fields, logprobs),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        stops=_stops(fields),
        include_stop=fields.boolean("include_stop_str_in_output"),
        num_choices=num_choices,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        return_token_ids=fields.boolean("return_token_ids"),
        add_special_tokens=fields.boolean("add_special_tokens", add_special_tokens),
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
        batch_lane=fields.choice("service_tier", "auto", ("auto", "default", "flex", "priority")) == "flex",
        cache_salt=fields.string("cache_salt", max_chars=MAX_NAME_CHARS) or "",
    )


def _refuse_unsupported(fields: Fields, known: Collection[str]) -> None:
    tools_off = fields.raw("tool_choice") == "none"
    for name, neutral in NEUTRAL.items():
        value = fields.raw(name)
        if name in known or value is None or (name == "tools" and tools_off):
            continue
        # `in` alone would take 0 for False and 1 for True.
        if not any(type(value) is type(harmless) and value == harmless for harmless in neutral):
            fields.fail(name, "is not supported")


def _max_tokens(fields: Fields) -> tuple[str, int | None]:
    older = fields.integer("max_tokens", 1, MAX_TOKEN_COUNT)
    newer = fields.integer("max_completion_tokens", 1, MAX_TOKEN_COUNT)
    if older is not None and newer is not None and older != newer:
        fields.fail("max_completion_tokens", f"{newer} contradicts max_tokens, which is {older}")
    return ("max_tokens", older) if newer is None else ("max_completion_tokens", newer)


def _sampling(fields: Fields, logprobs: int | None) -> SamplingParams:
    temperature = fields.number("temperature", 1.0, 0.0)
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    top_k = fields.integer("top_k", -1, MAX_TOKEN_COUNT) or 0
    return SamplingParams(
        max_tokens=1,
        min_tokens=fields.integer("min_tokens", 0, MAX_TOKEN_COUNT) or 0,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(top_k, 0),  # -1 is the field's other word for "all"
        top_p=_top_p(fields),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields),
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )


def _top_p(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        fields.fail("top_p", "must be more than 0 and at most 1")
    return top_p


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias")
    if biases is None:
        return ()
    items = biases.items()
    if len(items) > MAX_BIASES:
        fields.fail("logit_bias", f"has {len(items)} entries, at most {MAX_BIASES} are allowed")
    found: dict[int, float] = {}
    for name, bias in items:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            fields.fail("logit_bias", f"{name[:32]!r} is not a token id")
        token_id = int(name)
        if token_id in found:
            fields.fail("logit_bias", f"token id {token_id} is given twice")
        found[token_id] = check_number(f"logit_bias.{name}", bias, -100.0, 100.0)
    return tuple(found.items())


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    items = fields.array("stop_token_ids", max_items=MAX_STOP_TOKEN_IDS)
    return tuple(check_integer("stop_token_ids", item, 0, MAX_TOKEN_ID) for item in items)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list):
        fields.fail("stop", f"must be a string or an array of strings, not {kind_of(value)}")
    if len(stops) > MAX_STOPS:
        fields.fail("stop", f"has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not isinstance(stop, str):
            fields.fail("stop", f"must hold strings, not {kind_of(stop)}")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            fields.fail("stop", f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    return tuple(stops)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        fields.fail("stream_options", "is only allowed with stream: true")
    options.refuse_others({"include_usage", "include_obfuscation"})
    options.boolean("include_obfuscation")
    return options.boolean("include_usage")
