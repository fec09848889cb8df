"""Fields of config.json by name: those every family here reads, and those that cannot change the model's output."""

from __future__ import annotations

# fmt: off
COMMON_FIELDS = frozenset({
    "architectures", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings",
    "vocab_size",
})

HARMLESS_FIELDS = frozenset({
    # Where it came from, and how others store or run it.
    "_attn_implementation", "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path",
    "attn_implementation", "cache_implementation", "chunk_size_feed_forward", "dtype", "gradient_checkpointing",
    "is_llama_config", "pretraining_tp", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    # Training.
    "attention_dropout", "initializer_range",
    # Tokens the text side knows about.
    "bos_token_id", "decoder_start_token_id", "pad_token_id", "prefix", "sep_token_id", "tokenizer_class",
    "unk_token_id",
    # Defaults of transformers' own generate; ours come with each request.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    # Heads we do not load.
    "finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
})
# fmt: on
