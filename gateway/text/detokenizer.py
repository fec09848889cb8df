"""Incremental detokenizer: output tokens in, text out as soon as it cannot change any more."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gateway.text.tokenizer import LeadingSpace, Tokenizer

_MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character that still lacks its last byte


class Detokenizer:
    """Text of one choice, continuing the prompt's text.

    Tokens are bytes, and bytes become text when a UTF-8 character is complete, so a character split over tokens never
    shows as U+FFFD and a prompt that ends inside one is continued, never repeated. Bytes that no continuation can make
    valid become U+FFFD, one for each maximal ill-formed part (Unicode 3.9, table 3-8). A character that the end of the
    output cut short is dropped. Otherwise the text is what the `tokenizers` library decodes of the output after that
    prompt, special tokens skipped (it writes an ill-formed run of byte-fallback tokens as one U+FFFD per byte, which it
    can know only at the run's end). O(1) amortised per token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(self._end_of(prompt_ids))
        prompt_has_text = any(self._bytes_of(token_id) for token_id in prompt_ids)
        self._leading_space = LeadingSpace.KEPT if prompt_has_text else tokenizer.leading_space
        self._is_plain = False
        self._note_state()

    def push_one(self, token_id: int) -> str:
        """As push, of one token: a look-up where it stands between whole characters, as most do."""
        if self._is_plain and (text := self._tokenizer.whole_text(token_id)) is not None:
            return text
        return self.push((token_id,))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        data = b""
        for token_id in token_ids:
            piece = self._bytes_of(token_id)
            if piece and self._leading_space is LeadingSpace.CUT_FROM_FIRST_TOKEN:
                piece = piece.replace(b" ", b"")
                self._leading_space = LeadingSpace.KEPT
            data += piece
        text = self._utf8.decode(data)
        if text and self._leading_space is LeadingSpace.CUT_FROM_TEXT:
            text = text.removeprefix(" ")
            self._leading_space = LeadingSpace.KEPT
        self._note_state()
        return text

    def _note_state(self) -> None:
        """Plain: no character is incomplete, and the leading space is dealt with."""
        self._is_plain = self._leading_space is LeadingSpace.KEPT and not self._utf8.getstate()[0]

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to hold an incomplete character whole."""
        end = b""
        for token_id in reversed(prompt_ids):
            end = self._bytes_of(token_id) + end
            if len(end) >= _MAX_INCOMPLETE_BYTES:
                break
        return end
