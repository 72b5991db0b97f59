"""Tiny models with random weights, of the geometries that matter, and what the tests do with them."""

import torch
import transformers as tf

VOCABULARY = 211
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # tokens far apart: a rounding of the logits changes none
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def llama():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, **GROUPED))


def mistral():
    """Every layer with a sliding window."""
    return tf.MistralForCausalLM(tf.MistralConfig(**COMMON, **GROUPED, sliding_window=19))


def qwen2():
    """With a bias of q, k and v."""
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**COMMON, **GROUPED, use_sliding_window=False))
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(linear.bias, std=0.5)
    return model


def gemma2():
    """With softcap, head_dim 256, and a sliding window in every other layer."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
    return tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**{**COMMON, "initializer_range": 0.1}, **heads, sliding_window=23, attn_logit_softcapping=20.0)
    )


def gpt_oss():
    """With attention sinks, and a sliding window in every other layer."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return tf.GptOssForCausalLM(
        tf.GptOssConfig(**COMMON, **GROUPED, **experts, sliding_window=21, rope_parameters=None)
    )


def gemma3n():
    """The last two layers read the keys of earlier ones, one of them with a sliding window."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    others = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32, "laurel_rank": 8}
    layers = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 17}
    layers["layer_types"] = ["sliding_attention", "full_attention"] * 3
    config = {**COMMON, **heads, **others, **layers, "initializer_range": 0.1}
    return tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**config, activation_sparsity_pattern=[0.0] * 6))


FAMILIES = {f.__name__: f for f in (llama, mistral, qwen2, gemma2)}


def make(family, dtype=torch.float32):
    """A model of ``family`` with the weights of its seed, without dropout, on the CPU."""
    torch.manual_seed(sum(map(ord, family.__name__)))
    return family().to(dtype).eval()


def prompt(batch, length, seed=0):
    """Token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def left_padded(lengths, seed=0):
    """Token ids and attention mask of prompts of these lengths, padded on the left."""
    ids = prompt(len(lengths), max(lengths), seed)
    mask = torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


class RoundedCache(tf.DynamicCache):
    """transformers' default cache of values that have been rounded to a 16-bit dtype."""

    def __init__(self, config, dtype=torch.float16):
        super().__init__(config=config)
        self.rounding = dtype

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = (x.to(self.rounding).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def divergence(model, ids, cache, chunk=16):
    """Mean KL divergence (nats per token) of the model's tokens with ``cache`` from those with the default one."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(ids).logits.log_softmax(-1)
        model.set_attn_implementation("halftone")
        parts = [model(part, past_key_values=cache).logits for part in ids.split(chunk, dim=1)]
    other = torch.cat(parts, dim=1).log_softmax(-1)
    return (exact.exp() * (exact - other)).sum(-1).mean().item()
