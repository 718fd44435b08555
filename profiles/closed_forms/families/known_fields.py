"""The fields that transformers knows of each model here, and what it calls them.

As the signatures of the configuration classes of transformers 5.23 have them: with these a config
is checked in the same way, and as strictly, whether transformers is imported or not.
"""

from __future__ import annotations

from collections.abc import Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON = _words(
    "architectures chunk_size_feed_forward dtype id2label is_encoder_decoder label2id "
    "output_hidden_states problem_type return_dict transformers_version"
)
_DECODER = _words(
    "attention_dropout bos_token_id eos_token_id hidden_act hidden_size initializer_range "
    "intermediate_size max_position_embeddings num_attention_heads num_hidden_layers "
    "num_key_value_heads pad_token_id rms_norm_eps rope_parameters tie_word_embeddings use_cache "
    "vocab_size"
)
_ENCODER = _words(
    "add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout "
    "eos_token_id hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size "
    "is_decoder layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers "
    "pad_token_id tie_word_embeddings type_vocab_size use_cache vocab_size"
)
FIELDS: Mapping[str, frozenset[str]] = {
    "bert": _COMMON | _ENCODER,
    "deepseek_v3": _COMMON
    | _DECODER
    | _words(
        "attention_bias first_k_dense_replace kv_lora_rank moe_intermediate_size n_group "
        "n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_mtp_layers "
        "output_router_logits pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "rope_interleave routed_scaling_factor topk_group v_head_dim"
    ),
    "distilbert": _COMMON
    | _words(
        "activation attention_dropout bos_token_id dim dropout eos_token_id hidden_dim "
        "initializer_range max_position_embeddings n_heads n_layers pad_token_id qa_dropout "
        "seq_classif_dropout sinusoidal_pos_embds tie_word_embeddings vocab_size"
    ),
    "gemma": _COMMON | _DECODER | _words("attention_bias head_dim use_bidirectional_attention"),
    "gpt2": _COMMON
    | _words(
        "activation_function add_cross_attention attn_pdrop bos_token_id embd_pdrop eos_token_id "
        "initializer_range layer_norm_epsilon n_embd n_head n_inner n_layer n_positions "
        "pad_token_id reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx "
        "scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels "
        "summary_type summary_use_proj tie_word_embeddings use_cache vocab_size"
    ),
    "gpt_neox": _COMMON
    | _words(
        "attention_bias attention_dropout bos_token_id classifier_dropout eos_token_id hidden_act "
        "hidden_dropout hidden_size initializer_range intermediate_size is_decoder layer_norm_eps "
        "max_position_embeddings num_attention_heads num_hidden_layers pad_token_id "
        "rope_parameters tie_word_embeddings use_cache use_parallel_residual vocab_size"
    ),
    "llama": _COMMON | _DECODER | _words("attention_bias head_dim mlp_bias pretraining_tp"),
    "mistral": _COMMON | _DECODER | _words("head_dim sliding_window"),
    "mixtral": _COMMON
    | _DECODER
    | _words(
        "head_dim num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef "
        "router_jitter_noise sliding_window"
    ),
    "opt": _COMMON
    | _words(
        "_remove_final_layer_norm activation_function attention_dropout bos_token_id "
        "do_layer_norm_before dropout enable_bias eos_token_id ffn_dim hidden_size init_std "
        "layer_norm_elementwise_affine layerdrop max_position_embeddings num_attention_heads "
        "num_hidden_layers pad_token_id tie_word_embeddings use_cache vocab_size "
        "word_embed_proj_dim"
    ),
    "phi3": _COMMON
    | _DECODER
    | _words("embd_pdrop original_max_position_embeddings resid_pdrop sliding_window"),
    "qwen2": _COMMON
    | _DECODER
    | _words("layer_types max_window_layers sliding_window use_sliding_window"),
    "qwen3": _COMMON
    | _DECODER
    | _words(
        "attention_bias head_dim layer_types max_window_layers sliding_window use_sliding_window"
    ),
    "qwen3_moe": _COMMON
    | _DECODER
    | _words(
        "attention_bias decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob "
        "num_experts num_experts_per_tok output_router_logits router_aux_loss_coef sliding_window "
        "use_sliding_window"
    ),
    "roberta": _COMMON | _ENCODER,
    "t5": _COMMON
    | _words(
        "classifier_dropout d_ff d_kv d_model dropout_rate eos_token_id feed_forward_proj "
        "initializer_factor is_decoder layer_norm_epsilon num_decoder_layers num_heads num_layers "
        "pad_token_id relative_attention_max_distance relative_attention_num_buckets use_cache "
        "vocab_size"
    ),
    "vit": _COMMON
    | _words(
        "attention_probs_dropout_prob encoder_stride hidden_act hidden_dropout_prob hidden_size "
        "image_size initializer_range intermediate_size layer_norm_eps num_attention_heads "
        "num_channels num_hidden_layers patch_size pooler_act pooler_output_size qkv_bias"
    ),
}
"""By `model_type`."""

OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "distilbert": {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    "gpt2": {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "t5": {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
    },
}
"""What models call the sizes that others have under one name (transformers' `attribute_map`)."""
