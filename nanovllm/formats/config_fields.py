"""Every field that is read of config.json and generation_config.json: its type and its range.

And the fields without effect: a field of config.json that a family does not read, and that is not one of them, may
change the network and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.data.json_fields import FLAG, NULL, OBJECT, TEXT, Field, integer, list_of, number

MAX_LAYERS = 1024  # more than any network has; a layer takes memory even without weights
MAX_EXPERTS = 1024  # of a layer; each takes memory even without weights
MAX_HEAD_DIM = 1 << 16  # RoPE allocates a frequency per pair
MAX_CONV_KERNEL = 64  # tokens that a short convolution sees
LAYER_TYPES = list_of(TEXT, MAX_LAYERS) | NULL
EXPERT_COUNT = integer(0, MAX_EXPERTS)
THETA = number(1, 1e15, above=True) | NULL
_POSITIVE = number(1e-6, 1e6) | NULL  # powers and logarithms of these, and of theta, are finite
_COUNT = integer(1) | NULL
_SHARE = number(0, 1) | NULL
_FACTORS = list_of(number(1e-6, 1e6), MAX_HEAD_DIM) | NULL
_TOKEN_IDS = integer(0) | list_of(integer(0), 1024) | NULL

# Fields of the network that several families have. `models/families.py` has those of one.
NETWORK_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "vocab_size": integer(1),
        "hidden_size": integer(1),
        "intermediate_size": integer(1),
        "num_hidden_layers": integer(1, MAX_LAYERS),
        "num_attention_heads": integer(1),
        "num_key_value_heads": _COUNT,
        "head_dim": integer(1, MAX_HEAD_DIM) | NULL,
        "max_position_embeddings": integer(1),
        "hidden_act": TEXT,
        "rms_norm_eps": number(0, 1),
        "tie_word_embeddings": FLAG,
        "attention_bias": FLAG,
        "mlp_bias": FLAG,
        "use_sliding_window": FLAG,
        "sliding_window": integer(0) | NULL,  # 0 is allowed if no layer has a window
        "max_window_layers": integer(0),
        "layer_types": LAYER_TYPES,
        "num_experts": EXPERT_COUNT,
        "num_experts_per_tok": integer(1),
        "moe_intermediate_size": integer(1),
        "norm_topk_prob": FLAG,
        "dtype": TEXT | NULL,
        "torch_dtype": TEXT | NULL,
        "eos_token_id": _TOKEN_IDS,
    }
)

# The family, and RoPE in both of the forms that configs use.
OTHER_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "architectures": list_of(TEXT, 16) | NULL,
        "model_type": TEXT,
        "quantization_config": OBJECT | NULL,
        "rope_parameters": OBJECT | NULL,
        "rope_scaling": OBJECT | NULL,
        "rope_theta": THETA,
        "rope_local_base_freq": THETA,
        "partial_rotary_factor": _SHARE,
        "original_max_position_embeddings": _COUNT,
    }
)
# Fields that every family reads, besides its own and those for which it has a default.
READ_BY_ALL = frozenset({"dtype", "torch_dtype", *OTHER_FIELDS} - {"rope_local_base_freq"})

# Fields that describe a checkpoint or say how to train it, to export it or to sample from it. None changes the logits.
FIELDS_WITHOUT_EFFECT = frozenset(
    {
        # where it comes from
        *("_name_or_path", "_model_name_or_path", "_commit_hash", "name_or_path", "transformers_version"),
        *("transformers.js_config", "auto_map", "custom_pipelines", "unsloth_version", "unsloth_fixed"),
        *("is_llama_config", "model_name", "quantization", "_pre_quantization_dtype"),
        # tokens and their texts
        *("bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("decoder_start_token_id", "tokenizer_class", "prefix"),
        # how long sequences were in training; the positions are max_position_embeddings
        *("max_sequence_length", "max_seq_len", "max_length", "model_max_length", "seq_length"),
        "initial_context_length",
        # training
        *("initializer_range", "attention_dropout", "hidden_dropout", "resid_dropout", "resid_pdrop", "embd_pdrop"),
        *("attn_pdrop", "dropout", "use_cache", "cache_implementation", "_sliding_window_pattern"),
        *("gradient_checkpointing", "pretraining_tp", "output_router_logits", "router_aux_loss_coef"),
        *("router_jitter_noise", "is_decoder", "tie_encoder_decoder", "residual_dropout"),
        # layers for multi-token prediction, which are not computed
        *("use_mtp", "mtp_transformer_layers"),
        # layers of MiniMax's earlier models
        *("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode"),
        # how Transformers runs it
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_attn_implementation_internal", "_output_attentions", "_post_init_done", "base_model_ep_plan"),
        *("base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "keys_to_ignore_at_inference"),
        *("use_return_dict", "_flash_attn_2_enabled", "output_attentions", "output_hidden_states", "output_scores"),
        "mamba_ssm_dtype",  # of recurrent states, which are fp32
        *("return_dict", "return_dict_in_generate", "torchscript", "use_bfloat16", "tf_legacy_loss"),
        "chunk_size_feed_forward",
        # heads that predict further tokens, which are not read
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        # classification
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        # sampling, which generation_config.json recommends now
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences"),
        *("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens"),
    }
)

# Values with which a field that a family does not read is off.
OFF_VALUES: Mapping[str, object] = MappingProxyType(
    {
        **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "lm_head_bias", "use_qk_norm", "use_mrope"), False),
        **dict.fromkeys(("use_sliding_window", "rope_interleaved", "use_bidirectional_attention"), False),
        **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "is_heterogeneous"), False),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1),
        **dict.fromkeys(("interpolate_factor", "full_attn_mod"), 1),
        "pruned_heads": {},
        "mlp_only_layers": [],
    }
)

ROPE_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "rope_type": TEXT,
        "type": TEXT,
        "rope_theta": THETA,
        "factor": _POSITIVE,
        "low_freq_factor": _POSITIVE,
        "high_freq_factor": _POSITIVE,
        "original_max_position_embeddings": _COUNT,
        "attention_factor": _POSITIVE,
        "beta_fast": _POSITIVE,
        "beta_slow": _POSITIVE,
        "mscale": number(0, 1e6) | NULL,
        "mscale_all_dim": number(0, 1e6) | NULL,
        "truncate": FLAG | NULL,
        "partial_rotary_factor": _SHARE,
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
        "llama_4_scaling_beta": number(0, 1e3) | NULL,
    }
)

GENERATION_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "eos_token_id": _TOKEN_IDS,
        "temperature": number(0) | NULL,
        "top_p": number(0, 1, above=True) | NULL,
        "top_k": integer(-1) | NULL,
        "min_p": number(0, 1) | NULL,
        "repetition_penalty": number(0, above=True) | NULL,
        "max_new_tokens": integer(1) | NULL,
    }
)
