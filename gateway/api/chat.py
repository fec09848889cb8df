"""/v1/chat/completions: the request's strict reading, and what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.fields import Fields, invalid
from gateway.api.form import ChoiceText, ChunkWriter, Head, encode, encode_text, usage_object
from gateway.api.options import MAX_LOGPROBS, Options, read_options
from gateway.generation import Piece, Usage
from gateway.parts import TextSide
from gateway.text.output import TokenEvent
from gateway.text.tokenizer import Tokenizer
from wire.sampling import TokenLogprobs

KNOWN = frozenset({"messages", "top_logprobs", "chat_template_kwargs", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class AskedChat:
    options: Options
    messages: Any
    """As they came: rendering checks them."""
    add_generation_prompt: bool
    template_variables: dict[str, Any]

    async def tokenize(self, text: TextSide, limit_tokens: int, vocab_size: int) -> list[list[int]]:
        prompt = await text.template.render(
            self.messages, add_generation_prompt=self.add_generation_prompt, variables=self.template_variables
        )
        # The template writes the special tokens itself; add_special_tokens asks for more on top.
        token_ids = await text.pool.encode(prompt, self.options.add_special_tokens, limit_tokens, param="messages")
        if not token_ids:
            raise invalid("messages", "the chat template made an empty prompt of them")
        return [token_ids]

    def form(self, head: Head, text: TextSide, prompts: Sequence[Sequence[int]]) -> ChatForm:
        return ChatForm(self.options, head, text.tokenizer, prompts[0])


def read_chat(body: dict[str, Any]) -> AskedChat:
    """Raises InvalidRequest naming the first wrong field."""
    fields = Fields(body)
    options = read_options(fields, KNOWN, logprobs=_logprobs(fields), add_special_tokens=False)
    if fields.raw("messages") is None:
        fields.fail("messages", "is required")
    variables = fields.object("chat_template_kwargs")
    return AskedChat(
        options,
        fields.raw("messages"),
        fields.boolean("add_generation_prompt", True),
        dict(variables.items()) if variables else {},
    )


def _logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.boolean("logprobs"):
        return top or 0
    if top:
        fields.fail("top_logprobs", "needs logprobs: true")
    return None


class ChatForm:
    """`chat.completion` objects and `chat.completion.chunk`s."""

    def __init__(self, options: Options, head: Head, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._options = options
        self._wants_logprobs = options.sampling.logprobs is not None
        self._head = head
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._chunks = ChunkWriter(head.fields("chat.completion.chunk"), include_usage=options.include_usage)

    def opening(self) -> list[str]:
        """The role, for each choice."""
        body = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        extra = ""
        if self._options.return_token_ids:
            body += ',"token_ids":[]'
            extra = f',"prompt_token_ids":{encode(list(self._prompt))}'
        return [self._chunks.chunk(index, body, extra) for index in range(self._options.num_choices)]

    def chunk(self, piece: Piece) -> str:
        logprobs = "null"
        if self._wants_logprobs and piece.token is not None:
            logprobs = encode(self._logprobs([piece.token]))
        # OpenAI's last chunk has an empty delta; ours has one unless text was still held back.
        delta = "" if piece.finish_reason is not None and not piece.text else f'"content":{encode_text(piece.text)}'
        reason = "null" if piece.finish_reason is None else encode_text(piece.finish_reason)
        body = f'"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{reason}'
        if self._options.return_token_ids:
            body += f',"token_ids":[{"" if piece.token is None else piece.token.token_id}]'
        return self._chunks.chunk(piece.index, body)

    def usage_chunk(self, usage: Usage) -> str:
        return self._chunks.usage_chunk(usage)

    def whole(self, choices: Sequence[ChoiceText], usage: Usage) -> dict[str, Any]:
        found: dict[str, Any] = {
            **self._head.fields("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }
        if self._options.return_token_ids:
            found["prompt_token_ids"] = list(self._prompt)
        return found

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if self._options.sampling.logprobs is None else self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
        }
        if self._options.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        return {"content": [self._token_logprobs(token.token_id, token.logprobs) for token in tokens], "refusal": None}

    def _token_logprobs(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        assert logprobs is not None
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return {
            **self._token(token_id, logprobs.logprob),
            "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
