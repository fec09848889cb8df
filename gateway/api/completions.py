"""/v1/completions: the request's strict reading, and what its answers look like."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway.api.fields import Fields, invalid, kind_of
from gateway.api.form import ChoiceText, ChunkWriter, Head, encode, encode_text, usage_object
from gateway.api.options import MAX_LOGPROBS, Options, read_options
from gateway.generation import Piece, Usage
from gateway.parts import TextSide
from gateway.text.output import TokenEvent
from gateway.text.tokenizer import Tokenizer
from gateway.text.tokenizer_pool import prompt_too_long

MAX_PROMPTS = 128
KNOWN = frozenset({"prompt", "echo"})

Prompt: TypeAlias = "str | list[int] | array.array[int]"


@dataclass(frozen=True, slots=True)
class AskedCompletion:
    options: Options
    prompts: list[Prompt]
    echo: bool

    async def tokenize(self, text: TextSide, limit_tokens: int, vocab_size: int) -> list[list[int]]:
        found = []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                token_ids = await text.pool.encode(prompt, self.options.add_special_tokens, limit_tokens)
                if not token_ids:
                    raise invalid("prompt", "has no tokens")
            else:
                token_ids = _check_token_ids(prompt, limit_tokens, vocab_size)
                await asyncio.sleep(0)  # 128 long prompts are checked with the event loop turning in between
            found.append(token_ids)
        return found

    def form(self, head: Head, text: TextSide, prompts: Sequence[Sequence[int]]) -> CompletionForm:
        return CompletionForm(self, head, text.tokenizer, prompts)


def read_completion(body: dict[str, Any]) -> AskedCompletion:
    """Raises InvalidRequest naming the first wrong field."""
    fields = Fields(body)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    options = read_options(fields, KNOWN, logprobs=logprobs, add_special_tokens=True)
    echo = fields.boolean("echo")
    if echo and logprobs is not None:
        fields.fail("echo", "with logprobs is not supported: log-probabilities of a prompt are not computed")
    return AskedCompletion(options, _prompts(fields.raw("prompt")), echo)


def _prompts(value: Any) -> list[Prompt]:
    """`prompt` in its four shapes, as a list of prompts."""
    if value is None:
        raise invalid("prompt", "is required")
    if isinstance(value, (str, array.array)):
        value = [value]
    elif not isinstance(value, list):
        raise invalid("prompt", f"must be a string, token ids, or an array of either, not {kind_of(value)}")
    elif value and isinstance(value[0], int):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(value)} prompts, at most {MAX_PROMPTS} are allowed")
    for prompt in value:
        if not isinstance(prompt, (str, list, array.array)):
            raise invalid("prompt", f"a prompt must be a string or token ids, not {kind_of(prompt)}")
        if type(prompt) is not type(value[0]) and (isinstance(prompt, str) or isinstance(value[0], str)):
            raise invalid("prompt", "must not mix strings and token ids")
    if not value or not all(map(len, value)):
        raise invalid("prompt", "must not be empty")
    return list(value)


def _check_token_ids(prompt: list[int] | array.array[int], limit_tokens: int, vocab_size: int) -> list[int]:
    if len(prompt) > limit_tokens:
        raise prompt_too_long(len(prompt), limit_tokens)
    if isinstance(prompt, list):
        for token_id in prompt:
            if type(token_id) is not int:
                raise invalid("prompt", f"a token id must be an integer, not {kind_of(token_id)}")
    for extreme in (min(prompt), max(prompt)):
        if not 0 <= extreme < vocab_size:
            shown = extreme if abs(extreme) < 10**20 else "of more than 20 digits"
            raise invalid("prompt", f"token id {shown} is not in [0, {vocab_size})")
    return list(prompt)


class CompletionForm:
    """`text_completion` objects, whole and as chunks."""

    def __init__(
        self, asked: AskedCompletion, head: Head, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._asked = asked
        self._options = asked.options
        self._wants_logprobs = asked.options.sampling.logprobs is not None
        self._head = head.fields("text_completion")
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._chunks = ChunkWriter(self._head, include_usage=asked.options.include_usage)

    def opening(self) -> list[str]:
        """The prompts, where they were asked for."""
        if not (self._asked.echo or self._options.return_token_ids):
            return []
        chunks = []
        for index in range(len(self._prompts) * self._options.num_choices):
            body = f'"text":{encode(self._echoed(index))},"logprobs":null,"finish_reason":null'
            if self._options.return_token_ids:
                body += f',"prompt_token_ids":{encode(list(self._prompt(index)))},"token_ids":[]'
            chunks.append(self._chunks.chunk(index, body))
        return chunks

    def chunk(self, piece: Piece) -> str:
        logprobs = "null"
        if self._wants_logprobs and piece.token is not None:
            logprobs = encode(self._logprobs([piece.token]))
        reason = "null" if piece.finish_reason is None else encode_text(piece.finish_reason)
        body = f'"text":{encode_text(piece.text)},"logprobs":{logprobs},"finish_reason":{reason}'
        if self._options.return_token_ids:
            body += f',"token_ids":[{"" if piece.token is None else piece.token.token_id}]'
        return self._chunks.chunk(piece.index, body)

    def usage_chunk(self, usage: Usage) -> str:
        return self._chunks.usage_chunk(usage)

    def whole(self, choices: Sequence[ChoiceText], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "text": self._echoed(index) + choice.text,
            "logprobs": None if self._options.sampling.logprobs is None else self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
        }
        if self._options.return_token_ids:
            found |= {"prompt_token_ids": list(self._prompt(index)), "token_ids": choice.token_ids}
        return found

    def _prompt(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._options.num_choices]

    def _echoed(self, index: int) -> str:
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompts[index // self._options.num_choices]
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._tokenizer.token_bytes, prompt)).decode(errors="replace")

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        """Per token: its text, its log-probability, those of the likeliest and itself, where its text begins."""
        name = self._tokenizer.token_text
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            assert token.logprobs is not None
            top = dict(zip(map(name, token.logprobs.top_ids), token.logprobs.top_logprobs, strict=True))
            found["tokens"].append(name(token.token_id))
            found["token_logprobs"].append(token.logprobs.logprob)
            found["top_logprobs"].append({**top, name(token.token_id): token.logprobs.logprob})
            found["text_offset"].append(token.text_offset)
        return found
