"""Tokens of model.generate() on a HalftoneCache are those on the default cache."""

import models
import pytest
import torch

import halftone as ht
from halftone.transformers import HalftoneCache

NEW = 16
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "sampling": {"do_sample": True, "top_k": 20},
    "chunked prefill": {"prefill_chunk_size": 7},
}


def tokens(model, inputs, cache, implementation, **options):
    model.set_attn_implementation(implementation)
    torch.manual_seed(3)  # of sampling
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **options)


def check_same(model, inputs, caches=None, **options):
    """The caches, after both have generated the same."""
    exact, ours = caches or (models.RoundedCache(model.config), cache_of(model))
    expected = tokens(model, inputs, exact, "eager", **options)
    found = tokens(model, inputs, ours, "halftone", **options)
    assert found.tolist() == expected.tolist()
    return exact, ours, found


def cache_of(model, formats="fp16", **options):
    return HalftoneCache(model.config, 160, formats, **{"page_size": 16, **options})


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens(model, way):
    check_same(model, {"input_ids": models.prompt(2, 30)}, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_left_padding(model, way):
    _, ours, _ = check_same(model, models.left_padded([30, 17, 3]), **WAYS[way])
    beams = WAYS[way].get("num_beams", 1)
    lengths = [length + NEW - 1 for length in (30, 17, 3) for _ in range(beams)]
    assert ours.groups[0].host_lengths == lengths  # padding is not stored


def test_the_same_as_values_that_are_not_rounded(model):
    inputs = {"input_ids": models.prompt(2, 30)}
    expected = tokens(model, inputs, None, "eager")
    assert tokens(model, inputs, cache_of(model), "halftone").tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits(dtype):
    model = models.make(models.llama, dtype)
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    ids = models.prompt(2, 30)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        exact = model(ids).logits.float()
        model.set_attn_implementation("halftone")
        found = model(ids, past_key_values=cache_of(model, formats)).logits.float()
    step = torch.finfo(dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() < 8 * step


def test_bf16_in_the_cache(llama):
    inputs = {"input_ids": models.prompt(2, 30)}
    check_same(llama, inputs, (models.RoundedCache(llama.config, torch.bfloat16), cache_of(llama, "bf16")))


def test_prompt_lookup(model):
    inputs = {"input_ids": models.prompt(1, 8).repeat(1, 4)}
    check_same(model, inputs, prompt_lookup_num_tokens=4)


def test_an_assistant_model(model):
    """Most drafts of another random model are rejected: the cache is cropped in every round."""
    assistant = models.make(models.llama)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    check_same(model, {"input_ids": models.prompt(1, 30)}, assistant_model=assistant)


def test_a_second_turn(model):
    exact, ours, first = check_same(model, models.left_padded([20, 11]))
    padding = models.left_padded([20, 11])["attention_mask"]
    ids = torch.cat([first, models.prompt(2, 9, seed=5)], dim=1)
    mask = torch.cat([padding, torch.ones(2, ids.shape[1] - 20, dtype=torch.long)], dim=1)
    check_same(model, {"input_ids": ids, "attention_mask": mask}, (exact, ours))


def test_samples_of_one_prompt_share_its_pages(llama):
    ids = models.prompt(1, 65)
    llama.set_attn_implementation("halftone")
    cache = cache_of(llama, num_pages=12)  # 4 of the prompt that is shared, and 2 of each of 4 samples
    with torch.no_grad():
        llama(ids[:, :64], past_key_values=cache)
    cache.batch_repeat_interleave(4)
    assert cache.groups[0].free_pages == 12 - 4
    inputs = {"input_ids": ids.repeat(4, 1)}
    found = tokens(llama, inputs, cache, "halftone", do_sample=True)
    exact = models.RoundedCache(llama.config)
    assert found.tolist() == tokens(llama, inputs, exact, "sdpa", do_sample=True).tolist()
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.batch_size == 2 and cache.groups[0].batch == 2


def test_layers_that_read_the_keys_of_others(gemma3n):
    _, ours, _ = check_same(gemma3n, models.left_padded([30, 17]))
    assert [group.num_layers for group in ours.groups] == [2, 2]
    with pytest.raises(ht.OutOfRangeError, match="index is 4, but the layers with a cache are 0, 1, 2, 3"):
        ours.layer(4)


def test_attention_sinks(gpt_oss):
    check_same(gpt_oss, models.left_padded([30, 17]))


# Twice what is measured or a little more, in nats per token of a random model, whose logits are further apart than a
# trained one's (gemma2's weights are half as large).
COSTS = {
    "int8-head": {"llama": 5e-3, "mistral": 6e-3, "qwen2": 4e-3, "gemma2": 1.5e-4},
    "int4-g32": {"llama": 0.7, "mistral": 0.7, "qwen2": 0.6, "gemma2": 0.02},
    "int8-head:int4-g32": {"llama": 0.16, "mistral": 0.2, "qwen2": 0.15, "gemma2": 0.01},
}


@pytest.mark.parametrize("formats", COSTS)
def test_what_formats_cost(model, formats):
    ids = models.prompt(2, 64)
    bound = COSTS[formats][model.config.model_type]
    costs = [models.divergence(model, ids, cache_of(model, own)) for own in ("fp16", formats)]
    assert costs[0] < 1e-5 < costs[1] < bound


def test_formats_of_each_layer(llama):
    ids = models.prompt(2, 64)
    mixed = cache_of(llama, ["int4-g32", "fp16:int8-head"])
    cost = models.divergence(llama, ids, mixed)
    assert [str(mixed.layer(i).spec.v_format) for i in (0, 1)] == ["int4-g32", "int8-head"]
    assert mixed.bytes_per_token == sum(mixed.layer(i).spec.bytes_per_token for i in (0, 1))
    assert models.divergence(llama, ids, cache_of(llama, "fp16")) < cost
    assert cost < models.divergence(llama, ids, cache_of(llama, "int4-g32"))


def test_a_static_cache_is_refused(llama):
    with pytest.raises(AttributeError, match="not StaticCache"):
        tokens(llama, {"input_ids": models.prompt(2, 30)}, None, "halftone", cache_implementation="static")


def test_graphs_of_torch_compile_break_around_the_cache(llama):
    inputs = {"input_ids": models.prompt(2, 30)}
    expected = tokens(llama, inputs, cache_of(llama), "halftone")
    forward = llama.forward
    try:
        llama.forward = torch.compile(forward, backend="eager", dynamic=True)
        assert tokens(llama, inputs, cache_of(llama), "halftone").tolist() == expected.tolist()
    finally:
        llama.forward = forward
