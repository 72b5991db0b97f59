"""What a HalftoneCache keeps, gives back, copies and refuses; and halftone's attention without one."""

import copy
import pickle
import random

import models
import pytest
import torch
import transformers as tf

import halftone as ht
from halftone.transformers import HalftoneCache, register
from halftone.transformers.columns import Columns

PAGE = 16


def cache_of(model, formats="fp16", max_len=160, **options):
    return HalftoneCache(model.config, max_len, formats, **{"page_size": PAGE, **options})


@torch.no_grad()
def logits(model, ids, cache=None, implementation="halftone", **inputs):
    model.set_attn_implementation(implementation)
    return model(ids, past_key_values=cache, **inputs).logits


def test_pages_behind_a_window_are_returned(mistral):
    """A window of 19 and a rollback of 10 span at most 3 pages of 16 beside those of the call."""
    cache = cache_of(mistral, max_step=PAGE, rollback=10)
    group = cache.groups[0]
    ids = models.prompt(2, 144)
    expected = logits(mistral, ids, implementation="eager")
    for part, exact in zip(ids.split(PAGE, dim=1), expected.split(PAGE, dim=1)):
        found = logits(mistral, part, cache)
        group = cache.groups[0]
        assert group.num_pages - group.free_pages <= 2 * 4
        assert torch.allclose(found, exact, atol=5e-2)
    assert group.num_pages < 2 * 144 // PAGE


def test_layers_of_each_window_have_pages_of_their_own():
    model = models.make(models.gemma2)
    cache = cache_of(model, batch=2, max_step=32, rollback=0)
    windowed, full = cache.groups
    assert [windowed.num_layers, full.num_layers] == [1, 1]
    assert windowed.num_pages == 2 * (-(-(22 + 32) // PAGE) + 1) and full.num_pages == 2 * 10
    assert cache.layer(0) is windowed.layer(0) and cache.layer(1) is full.layer(0)


def test_a_crop_is_as_if_the_tokens_had_not_come(model):
    ids = models.prompt(2, 60)
    expected = logits(model, ids[:, 40:], cache_after(model, ids[:, :40]))
    cache = cache_after(model, ids[:, :40])
    logits(model, models.prompt(2, 7, seed=9), cache)
    cache.crop(-7)
    assert cache.get_seq_length() == 40
    assert torch.equal(logits(model, ids[:, 40:], cache), expected)


def cache_after(model, ids, **options):
    cache = cache_of(model, **options)
    logits(model, ids, cache)
    return cache


def test_a_crop_behind_what_a_window_has_returned(mistral):
    cache = cache_after(mistral, models.prompt(1, 100), rollback=10)
    logits(mistral, models.prompt(1, 1), cache)  # returns the pages before 100 - 18 - 10
    cache.crop(-5)
    with pytest.raises(ht.OutOfRangeError, match="request 0 would need keys .* larger rollback than 10"):
        cache.crop(-40)
    assert cache.get_seq_length() == 96
    cache.crop(-96)
    assert cache.groups[0].host_lengths == [0]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_its_own_way(llama, copy_of):
    ids = models.prompt(2, 50)
    cache = cache_after(llama, ids[:, :40], formats="int4-g32")
    other = copy_of(cache)
    logits(llama, models.prompt(2, 9, seed=4), other)
    assert torch.equal(
        logits(llama, ids[:, 40:], cache),
        logits(llama, ids[:, 40:], cache_after(llama, ids[:, :40], formats="int4-g32")),
    )
    assert [cache.get_seq_length(), other.get_seq_length()] == [50, 49]


def test_reset_and_another_batch(llama):
    cache = cache_after(llama, models.prompt(2, 40))
    with pytest.raises(ht.InvalidArgumentError, match="the call has 3 requests, but the cache holds 2"):
        logits(llama, models.prompt(3, 1), cache)
    cache.reset()
    ids = models.prompt(3, 20)
    assert torch.equal(logits(llama, ids, cache), logits(llama, ids, cache_of(llama)))
    assert cache.batch_size == 3


def test_a_call_that_fails_is_cropped_away(llama, monkeypatch):
    ids = models.prompt(2, 50)
    cache = cache_after(llama, ids[:, :40])

    def fail(*_, **__):
        raise RuntimeError("in the midst")

    with monkeypatch.context() as patched:
        patched.setattr(llama.model.layers[1], "forward", fail)
        with pytest.raises(RuntimeError, match="in the midst"):
            logits(llama, ids[:, 40:], cache)
    for call in (lambda: logits(llama, ids[:, 40:], cache), lambda: copy.deepcopy(cache), lambda: cache.crop(-1)):
        with pytest.raises(ht.InvalidArgumentError, match="ended before layers 1 had the tokens"):
            call()
    cache.crop(-10)
    assert torch.equal(logits(llama, ids[:, 40:], cache), logits(llama, ids[:, 40:], cache_after(llama, ids[:, :40])))


def test_right_padding_is_not_stored(llama):
    ids = models.prompt(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:] = 0
    cache = cache_of(llama)
    found = logits(llama, ids, cache, attention_mask=mask)
    expected = logits(llama, ids, implementation="eager", attention_mask=mask)
    assert cache.groups[0].host_lengths == [30, 20]
    assert torch.allclose(found[mask.bool()], expected[mask.bool()], atol=5e-2)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_without_a_cache(model, padded):
    inputs = models.left_padded([40, 25] if padded else [40, 40])
    seen = inputs["attention_mask"].bool()
    ids = inputs.pop("input_ids")
    for cached in (False, True):
        caches = [tf.DynamicCache(config=model.config) if cached else None for _ in range(2)]
        exact = logits(model, ids, caches[0], "eager", use_cache=cached, **inputs)
        found = logits(model, ids, caches[1], use_cache=cached, **inputs)
        assert torch.allclose(found[seen], exact[seen], atol=1e-3)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)], dim=1)
    more = models.prompt(2, 5, seed=2)
    exact = logits(model, more, caches[0], "eager", attention_mask=mask)
    assert torch.allclose(logits(model, more, caches[1], attention_mask=mask), exact, atol=1e-3)


def test_bidirectional_attention():
    config = tf.BertConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64)
    torch.manual_seed(0)
    model = tf.BertModel(config).eval()
    inputs = models.left_padded([20, 12])
    out = {}
    for name in ("eager", "halftone"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            out[name] = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    assert torch.allclose(out["halftone"], out["eager"], atol=1e-4)


def test_no_gradient(llama):
    llama.set_attn_implementation("halftone")
    out = llama(models.prompt(1, 5)).logits
    with pytest.raises(ht.UnsupportedError, match="attention has no gradient"):
        out.sum().backward()


def test_masks_that_halftone_lacks(llama):
    ids = models.prompt(1, 8)
    with pytest.raises(ht.UnsupportedError, match="attention_mask is a Tensor made outside of the model"):
        logits(llama, ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(ht.UnsupportedError, match="a mask of its own"):  # two sequences in one row
        logits(llama, ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)
    with pytest.raises(ht.UnsupportedError, match="output_attentions is given"):
        logits(llama, ids, output_attentions=True)


def test_masks_that_do_not_fit_the_cache(mistral):
    ids = models.prompt(2, 12)
    cache = cache_after(mistral, ids)
    mask = torch.ones(2, 14, dtype=torch.long)
    with pytest.raises(ht.InvalidArgumentError, match=r"shape \[2, 13\], but must be \[2, 14\]"):
        logits(mistral, ids[:, :2], cache, attention_mask=mask[:, :13])
    changed = mask.clone()
    changed[1, 0] = 0
    with pytest.raises(ht.InvalidArgumentError, match="says otherwise about tokens in the cache"):
        logits(mistral, ids[:, :2], cache, attention_mask=changed)
    inner = mask.clone()
    inner[1, 12] = 0
    with pytest.raises(ht.InvalidArgumentError, match="leaves out tokens of request 1 between others"):
        logits(mistral, ids[:, :2], cache, attention_mask=inner)
    assert cache.get_seq_length() == 12 and cache.groups[0].host_lengths == [12, 12]
    logits(mistral, ids[:, :2], cache, attention_mask=mask)


def test_a_request_of_padding_alone(llama):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1] = 0
    cache = cache_of(llama, max_len=21)  # below the bound of queries that calls of 17 to 32 tokens share
    found = logits(llama, models.prompt(2, 20), cache, attention_mask=mask)
    assert cache.groups[0].host_lengths == [20, 0] and found.isfinite().all()
    logits(llama, models.prompt(2, 1), cache, attention_mask=torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1))
    assert cache.groups[0].host_lengths == [21, 1]
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.groups[0].host_lengths == [1, 1]


def test_limits_are_met_before_anything_is_written(llama):
    cache = cache_of(llama, max_len=20, max_step=16)
    with pytest.raises(ht.OutOfRangeError, match="17 tokens for a request, but max_step is 16.*prefill_chunk_size=16"):
        logits(llama, models.prompt(2, 17), cache)
    logits(llama, models.prompt(2, 16), cache)
    with pytest.raises(ht.OutOfRangeError, match="request 0 would have 21 tokens, but max_len is 20"):
        logits(llama, models.prompt(2, 5), cache)
    small = cache_of(llama, num_pages=3)
    with pytest.raises(ht.ResourceExhaustedError):
        logits(llama, models.prompt(2, 30), small)
    for made in (cache, small):
        assert made.get_seq_length() == made.groups[0].host_lengths[0] == (16 if made is cache else 0)
    with pytest.raises(ht.OutOfRangeError, match="tokens_to_remove is -17, but the cache has 16"):
        cache.crop(-17)
    with pytest.raises(ht.InvalidArgumentError, match="tokens_to_remove is 3, but must be 0 or negative"):
        cache.crop(3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_is_refused(llama, implementation):
    with pytest.raises(ht.InvalidArgumentError, match="set_attn_implementation"):
        logits(llama, models.prompt(1, 8), cache_of(llama), implementation)


def test_arguments_that_do_not_fit(llama):
    config = llama.config
    cases = [
        (lambda: HalftoneCache(config, 0), "max_len is 0, but must be 1 or more"),
        (lambda: HalftoneCache(config, 64, rollback=-1), "rollback is -1, but must be 0 or more"),
        (lambda: HalftoneCache(config, 64, "int5"), "int5"),
        (lambda: HalftoneCache(config, 64, ["fp16"]), "a list of 1, but the model has 2 layers"),
        (lambda: HalftoneCache(config, 64, ("fp16",) * 3), "an entry of 3 parts"),
        (lambda: HalftoneCache(config, 64, [7, 7]), "formats has a int"),
        (lambda: HalftoneCache(config, 64, "fp8-static-head"), "k_scale"),
        (lambda: HalftoneCache(config, 64, "fp8-static-head", k_scale=[None]), "each of the 2 layers"),
        (lambda: HalftoneCache(tf.MambaConfig(num_hidden_layers=1), 64), "use transformers' own cache"),
        (lambda: register("sdpa"), "another attention implementation has it"),
    ]
    for call, sentence in cases:
        with pytest.raises(ht.Error, match=sentence):
            call()


def test_static_scales(llama):
    scale = [torch.full((2,), 0.1) for _ in range(2)]
    cache = cache_of(llama, "fp8-static-head", k_scale=scale, v_scale=scale)
    assert models.divergence(llama, models.prompt(2, 32), cache) < 0.5


def test_channels_of_keys(llama):
    """Neutral ones change nothing; those of the model's own keys are close to the model."""
    prompt = models.prompt(2, 32)
    exact = cache_of(llama)
    logits(llama, prompt, exact)
    keys = [exact.layer(i).dequantize()[0] for i in range(2)]
    dims = keys[0].shape[1:]
    neutral = cache_of(llama, "int8-head", k_offset=[torch.zeros(dims)] * 2, k_channel_scale=[torch.ones(dims), None])
    assert [spec.scale_k for spec in (neutral.layer(i).spec for i in range(2))] == [True, False]
    plain = cache_of(llama, "int8-head")
    assert models.divergence(llama, prompt, neutral) == pytest.approx(models.divergence(llama, prompt, plain), rel=0.05)
    values = [ht.calibrate_channels(k, "int8-head", offset=True, scale=True) for k in keys]
    offset, scale = ([v[i] for v in values] for i in range(2))
    treated = cache_of(llama, "int8-head", k_offset=offset, k_channel_scale=scale)
    assert models.divergence(llama, prompt, treated) < 0.01


def test_columns_against_a_plain_model():
    """Random calls, crops and reorders beside a list of booleans for each request."""
    rng = random.Random(7)
    for _ in range(200):
        plain = [[] for _ in range(3)]
        columns = Columns.none(3)
        for _ in range(rng.randrange(12)):
            kind = rng.choice(["call", "call", "crop", "select"])
            if kind == "call":
                count = rng.randrange(1, 5)
                new = [[rng.random() < 0.6 for _ in range(count)] for _ in plain]
                gaps = [
                    [(columns.count + i, columns.count + i + 1) for i, on in enumerate(row) if not on] for row in new
                ]
                columns = columns.extended(count, gaps if any(gaps) else None)
                plain = [old + row for old, row in zip(plain, new)]
            elif kind == "crop":
                count = rng.randint(0, columns.count)
                columns, plain = columns.cropped(count), [row[:count] for row in plain]
            else:
                index = [rng.randrange(len(plain)) for _ in range(rng.randrange(1, 5))]
                columns, plain = columns.selected(index), [plain[i] for i in index]
            assert columns.count == len(plain[0]) and columns.lengths() == [sum(row) for row in plain]
            inner = [
                i
                for i, row in enumerate(plain)
                if "10" in (text := "".join(map("01".__getitem__, row))) and "1" in text[text.index("10") + 1 :]
            ]
            assert columns.first_with_inner_gap() == (inner[0] if inner else None)
