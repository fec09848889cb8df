"""Tokenizes one text after the other in a process of its own: `python -m gateway.text.tokenizer_process MODEL_DIR`.

Frames over stdin and stdout, little-endian; whoever closes a pipe ends the conversation:

    request   REQUEST header (text bytes, limit_tokens, add_special_tokens), then the text in UTF-8
    reply     REPLY header (number of tokens), then, unless they are more than limit_tokens, the packed ids
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import BinaryIO

from gateway.text.tokenizer import Tokenizer, load_tokenizer
from wire.child import die_with_parent
from wire.entries import pack_tokens

REQUEST = struct.Struct("<QQ?")
REPLY = struct.Struct("<Q")


def serve(tokenizer: Tokenizer, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the requests end, also in the middle of one."""
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        num_bytes, limit_tokens, add_special_tokens = REQUEST.unpack(header)
        text = requests.read(num_bytes)
        if len(text) < num_bytes:
            return
        token_ids = tokenizer.encode(text.decode(), add_special_tokens)
        replies.write(REPLY.pack(len(token_ids)))
        if len(token_ids) <= limit_tokens:
            replies.write(pack_tokens(token_ids))
        replies.flush()


if __name__ == "__main__":
    die_with_parent()  # even in the middle of a text; elsewhere than on Linux, the end of stdin must do
    serve(load_tokenizer(Path(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
