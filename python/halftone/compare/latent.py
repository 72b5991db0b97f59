"""The suite of latent (MLA) caches: lists of keys, all keys, prompts over lists; halftone beside FlashMLA, which reads
the pages that halftone wrote."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import numpy as np
from numpy.typing import NDArray

import halftone as ht

from .oracle import attention_rows, relative_error
from .peers import Refusal, line_of
from .records import Part, Work, as_host

PEERS = ("halftone", "flash_mla")
FORMATS = {"cuda": "fp8-g128-f32,bf16", "cpu": "fp8-g128-f32,bf16"}
KINDS = ("sparse_decode", "dense_decode", "sparse_prefill")
_DIM, _V_DIM, _PAGE = 576, 512, 64
_HEADS = (64, 128)  # what FlashMLA has sparse kernels for; other numbers are padded, as engines do
_SAMPLES = 4  # queries that are held against double precision
_PIECE = 1 << 20  # tokens made and appended at a time


@dataclass(frozen=True)
class Shape:
    """``batch`` requests of ``context`` tokens and ``q_len`` queries each; with ``top_k`` each query has a list of so
    many places of its request, else it sees all keys."""

    kind: str
    batch: int
    q_len: int
    q_heads: int
    context: int
    top_k: int = 0

    @property
    def name(self) -> str:
        keys = f"{self.top_k} of {self.context} keys" if self.top_k else f"{self.context} keys"
        return f"{self.kind}, batch {self.batch}, {self.q_len} queries, {keys}, {self.q_heads} heads"

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees."""
        if self.top_k:
            return float(self.batch * self.q_len * self.top_k)
        return self.batch * (self.q_len * self.context - self.q_len * (self.q_len - 1) / 2)


def _decode(
    heads: tuple[int, ...], batches: tuple[int, ...], q_lens: tuple[int, ...], top_ks: tuple[int, ...]
) -> list[Shape]:
    return [Shape("sparse_decode", b, q, h, 32768, k) for h in heads for k in top_ks for q in q_lens for b in batches]


SHAPES = {
    "cuda": _decode((128, 64), (2, 128), (2,), (2048, 16384)) + _decode((32, 16, 8), (8, 128), (1, 2), (2048,))
    + [Shape("dense_decode", 128, 1, h, n) for h in (128, 64, 32, 16) for n in (4096, 8192)]
    + [Shape("sparse_prefill", 1, 4096, 128, 8192, 2048)],
    "cpu": [Shape("sparse_decode", 2, 1, 16, 2048, 256), Shape("dense_decode", 2, 1, 16, 512),
            Shape("sparse_prefill", 1, 16, 16, 1024, 128)],
}  # fmt: skip
SMOKE = {
    "cuda": [Shape("sparse_decode", 2, 2, 64, 1024, 128), Shape("dense_decode", 2, 1, 16, 256),
             Shape("sparse_prefill", 1, 64, 64, 512, 128)],
    "cpu": [Shape("sparse_decode", 2, 1, 8, 256, 32), Shape("dense_decode", 2, 2, 8, 80),
            Shape("sparse_prefill", 1, 8, 8, 128, 32)],
}  # fmt: skip


@dataclass(frozen=True)
class Gathers:
    """What reading the records that lists name reached on ``device``, as `halftone bench --table mla` measured it."""

    device: str
    rates: dict[tuple[Any, ...], float]  # GB/s, by what a gather depends on

    @staticmethod
    def load(path: str) -> Gathers:
        """From the JSON. Raises argparse.ArgumentTypeError."""
        try:
            with open(path) as file:
                report = json.load(file)
            rows = [row for row in report["rows"] if row.get("gather_us") and row["chain"] == 1]
            rates: dict[tuple[Any, ...], float] = {}
            for row in rows:
                if not row.get("extra_top_k"):
                    key = (row.get("format") or row["format_k"], row["batch"], row["q_len"], row["top_k"], row["context"])
                    rates[key] = max(rates.get(key, 0.0), row["ceiling_gbs"])
            return Gathers(report["device"]["name"], rates)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{path} is no JSON of halftone bench: {line_of(error)}") from None

    def of(self, shape: Shape, form: str) -> float | None:
        """GB/s; None for what was not measured, such as prompts, whose queries share what they list."""
        if shape.kind != "sparse_decode":
            return None
        return self.rates.get((form, shape.batch, shape.q_len, shape.top_k, shape.context))


def works(
    shapes: list[Shape], device: str, formats: list[str], gathers: Gathers | None = None
) -> Iterator[Callable[[], Work]]:
    """A case for every shape and format: an FP8 cache and a BF16 one hold different values."""
    caches = Caches(device)
    for form in formats:
        for shape in sorted(
            shapes, key=lambda s: (KINDS.index(s.kind), s.batch, s.context)
        ):  # alike ones share a cache
            yield lambda form=form, shape=shape: make_work(shape, form, caches, gathers)  # type: ignore[misc]


class Caches:
    """The cache of one format and size at a time: a large one takes longer to make than to measure."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._key: Any = None
        self._cache: Any = None

    def get(self, form: str, batch: int, context: int) -> ht.PagedKVCache:
        if self._key != (form, batch, context):
            self._cache = None
            self._cache = self._make(form, batch, context)
            self._key = (form, batch, context)
        cache: ht.PagedKVCache = self._cache
        return cache

    def _make(self, form: str, batch: int, context: int) -> ht.PagedKVCache:
        cpu = self.device == "cpu"
        cache = ht.PagedKVCache(
            batch, context, spec=ht.KVCacheSpec.latent(form, page_size=_PAGE), device=self.device,
            framework="numpy" if cpu else "torch",
        )  # fmt: skip
        requests = max(_PIECE // context, 1)
        for first in range(0, batch, requests):
            counts = [context if first <= i < first + requests else 0 for i in range(batch)]
            cache.append(normal((sum(counts), 1, _DIM), self.device, seed=1 + first), counts=counts)
        cache.check_status()
        return cache


def normal(shape: tuple[int, ...], device: str, seed: int) -> Any:
    """Normal values; the latent's have a few outlier dims."""
    if device == "cpu":
        x: Any = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    else:
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
    x[..., [3, 261]] *= 4
    return x


def make_work(shape: Shape, form: str, caches: Caches, gathers: Gathers | None = None) -> Work:
    device = caches.device
    cache = caches.get(form, shape.batch, shape.context)
    total = shape.batch * shape.q_len
    q = normal((total, shape.q_heads, _DIM), device, seed=0)
    lists = _lists(shape, cache) if shape.top_k else None
    fields = dict(
        kind=shape.kind, format=form, q_heads=shape.q_heads, batch=shape.batch, q_len=shape.q_len,
        top_k=shape.top_k or None, context=shape.context,
    )  # fmt: skip
    read = (shape.pairs if shape.top_k else shape.batch * shape.context) * cache.spec.bytes_per_token
    parts: list[tuple[str, str, Callable[[], Part]]] = [
        ("halftone", f"halftone {form}", lambda: _halftone(shape, cache, q, lists, read)),
        ("flash_mla", f"flash_mla {form}", lambda: _flash_mla(shape, cache, q, lists, read)),
    ]
    flops = 2.0 * shape.pairs * shape.q_heads * (_DIM + _V_DIM)
    rows = sorted({int(r) for r in np.linspace(0, total - 1, _SAMPLES)})
    truth = functools.cache(lambda: _truth(shape, cache, q, lists, rows))

    def error(out: Any) -> float:
        out = out.reshape(total, shape.q_heads, _V_DIM)
        return relative_error(np.stack([as_host(out[row]) for row in rows]), truth()[0])

    def lse_error(lse: Any) -> float:
        return float(np.abs(np.stack([as_host(lse[row]) for row in rows]) - truth()[1]).max())

    gather_gbs = None if gathers is None else gathers.of(shape, form)
    return Work(f"{shape.name}, {form}", fields, flops, parts, error, lse_error, gather_gbs)


def _lists(shape: Shape, cache: ht.PagedKVCache) -> Any:
    """int32 [total_q, top_k]: slots of random tokens of the query's request."""
    shape_ = (shape.batch, shape.q_len * shape.top_k)
    if cache.device == "cpu":
        tokens: Any = np.random.default_rng(2).integers(0, shape.context, shape_)
        pages: Any = np.take_along_axis(cache.block_table, tokens // _PAGE, 1)
        return (pages * _PAGE + tokens % _PAGE).astype(np.int32).reshape(-1, shape.top_k)
    import torch

    generator = torch.Generator(cache.device).manual_seed(2)
    tokens = torch.randint(0, shape.context, shape_, generator=generator, device=cache.device)
    pages = cache.block_table.long().gather(1, tokens // _PAGE)
    return (pages * _PAGE + tokens % _PAGE).int().reshape(-1, shape.top_k)


def _halftone(shape: Shape, cache: ht.PagedKVCache, q: Any, lists: Any, read: float) -> Part:
    cpu = cache.device == "cpu"
    out = np.empty((*q.shape[:2], _V_DIM), np.float32) if cpu else q.new_empty((*q.shape[:2], _V_DIM))
    common: dict[str, Any] = dict(q_heads=shape.q_heads, q_dtype="f32" if cpu else "bf16")

    def made(lse: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        if lists is None:
            queries: dict[str, Any] = {"max_q_len": shape.q_len, "min_q_len": shape.q_len}
            plan = ht.plan(cache, causal=shape.q_len > 1, lse=lse, **queries, **common)
            step = ht.schedule(plan, cache)
            return lambda: ht.attend(q, cache, schedule=step, out=out), step.update
        plan = ht.plan(cache, batch=int(q.shape[0]), max_kv_len=0, top_k=shape.top_k, lse=lse, **common)
        step = ht.schedule(plan, counts=_counts(shape, cache))
        return lambda: ht.attend_listed(q, cache, lists, schedule=step, out=out), step.update

    call, schedule = made(False)
    return Part(call, _policy(), read, lambda: made(True)[0]()[1], schedule)


def _policy() -> dict[str, Any]:
    return {"policy": "reproducible"}


def _counts(shape: Shape, cache: ht.PagedKVCache) -> Any:
    """int32 [total_q]: all places of every list."""
    counts = [shape.top_k] * (shape.batch * shape.q_len)
    return ht._arrays.make("numpy" if cache.device == "cpu" else "torch", counts, "int32", cache.device)


def _flash_mla(shape: Shape, cache: ht.PagedKVCache, q: Any, lists: Any, read: float) -> Part:
    flash_mla: Any = importlib.import_module("flash_mla")
    import torch

    scale, form = _DIM**-0.5, str(cache.spec.k_format)
    wanted = "fp8-g128-f32" if shape.kind == "sparse_decode" else "bf16"
    if form != wanted:
        raise Refusal(f"reads {wanted} caches in {shape.kind}")
    fields: dict[str, Any] = {"policy": None}
    queries, heads = q, shape.q_heads
    if shape.top_k and shape.q_heads not in _HEADS:
        heads = next((h for h in _HEADS if h > shape.q_heads), 0)
        if not heads:
            raise Refusal(f"has up to {_HEADS[-1]} heads")
        queries = q.new_zeros(q.shape[0], heads, _DIM)
        queries[:, : shape.q_heads] = q
        fields["padded_to"] = heads
    own = slice(0, shape.q_heads)
    if shape.kind == "sparse_prefill":
        kv, indices = cache.pages.view(torch.bfloat16).view(-1, 1, _DIM), lists[:, None]
        call: Any = lambda: flash_mla.flash_mla_sparse_fwd(queries, kv, indices, scale)  # noqa: E731
        return Part(lambda: call()[0][:, own], fields, read, lambda: ht.import_flash_mla_lse(call()[2][:, own]))
    batched, (meta, _) = queries.view(shape.batch, shape.q_len, heads, _DIM), flash_mla.get_mla_metadata()
    if shape.kind == "dense_decode":
        kv, lengths = cache.pages.view(torch.bfloat16).view(-1, _PAGE, 1, _DIM), (cache.block_table, cache.lengths)
        more: dict[str, Any] = {"causal": shape.q_len > 1}
    else:
        kv = cache.pages.view(torch.float8_e4m3fn).view(-1, _PAGE, 1, int(cache.spec.bytes_per_token))
        lengths, more = (None, None), {"is_fp8_kvcache": True, "indices": lists.view(shape.batch, shape.q_len, -1)}
    decode: Any = lambda: flash_mla.flash_mla_with_kvcache(  # noqa: E731
        batched, kv, *lengths, _V_DIM, meta, softmax_scale=scale, **more
    )
    return Part(lambda: decode()[0][:, :, own], fields, read, lambda: ht.import_flash_mla_lse(decode()[1][:, own]))


def _truth(
    shape: Shape, cache: ht.PagedKVCache, q: Any, lists: Any, rows: list[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Outputs and LSEs of these queries, in double precision on the values as the cache holds them."""
    truths = []
    for row in rows:
        if lists is not None:
            slots = as_host(lists[row]).astype(np.int64)
        else:
            keys = shape.context - shape.q_len + 1 + row % shape.q_len
            table = as_host(cache.block_table[row // shape.q_len]).astype(np.int64)
            slots = (table[:, None] * _PAGE + np.arange(_PAGE)).reshape(-1)[:keys]
        k, v = stored(cache, slots)
        if cache.device != "cpu":
            import torch

            k, v = (torch.from_numpy(x).to(cache.device) for x in (k, v))
        out, lse = attention_rows(q[row][None], k, v, [len(slots)])
        truths.append((out[0], lse[0]))
    return np.stack([out for out, _ in truths]), np.stack([lse for _, lse in truths])


def stored(cache: ht.PagedKVCache, slots: Any) -> tuple[Any, Any]:
    """K and V of these slots, read by the CPU backend from a copy of their records, whose bytes lie together."""
    spec = cache.spec
    records = cache.pages.reshape(-1, spec.layout["row_bytes"])
    if cache.device == "cpu":
        taken = records[slots]
    else:
        import torch

        taken = records.view(torch.uint8)[torch.from_numpy(slots).to(cache.device)].cpu().numpy()
    pages = -(-len(slots) // _PAGE)
    room = np.zeros((pages * _PAGE, records.shape[1]), np.uint8)
    room[: len(slots)] = taken
    table, lengths = np.arange(pages, dtype=np.int32)[None], np.array([len(slots)], np.int32)
    return ht.PagedKVCache.wrap(spec, room.reshape(pages, -1), table, lengths).dequantize()
