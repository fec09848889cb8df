"""`python -m phasemesh.convert GGUF DIR`: a quantized GGUF file → a Hugging Face directory in float32.

transformers reads and dequantizes the GGUF. It marks that model as quantized and then refuses to save it, so the
weights go into a plain model of the same config, which saves like any other.

Float32 because nothing less holds the values: of Q4_1's `scale * q + minimum`, both factors float16, bfloat16 holds one
in five exactly. Whoever wants fewer bytes says so to the worker (PHASEMESH_WEIGHT_DTYPE), and sees what it costs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PRE_TOKENIZERS = {
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]),
}
"""What the GGUF field tokenizer.ggml.pre means; transformers ignores it and takes byte level alone."""


def convert(gguf: Path, target: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer files and chat template."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**source)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(target)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    kind = GGUFReader(gguf).fields["tokenizer.ggml.pre"].contents()
    if kind not in PRE_TOKENIZERS:
        raise SystemExit(f"ERROR: no pre-tokenizer known for tokenizer.ggml.pre={kind!r}")
    tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]
    tokenizer.save_pretrained(target)

    if model.generation_config.eos_token_id != tokenizer.eos_token_id:
        raise SystemExit(
            f"ERROR: generation_config ends at token {model.generation_config.eos_token_id}, "
            f"the tokenizer at {tokenizer.eos_token_id}"
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
