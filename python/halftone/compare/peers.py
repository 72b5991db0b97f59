"""The participants: each turns inputs into calls, or says why it cannot."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

import halftone as ht

from .cases import Inputs
from .oracle import attention


PAGE = 64  # tokens of a page, of halftone's and of its peers'


class Refusal(Exception):
    """A participant cannot do a case; the text says why."""


def line_of(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


@dataclass
class Entry:
    """One thing to time.

    ``call`` computes [batch, q_len, q_heads, dim] (or the same elements in another shape) and returns it; ``kv_bytes``
    is what it must read of K and V; ``stored`` gives request i as the cache holds it, where that is not the input.
    """

    label: str
    call: Callable[[], Any]
    kv_bytes: float
    stored: Callable[[int], tuple[NDArray[Any], NDArray[Any]]] | None = None
    schedule: Callable[[], Any] | None = None


class Peer:
    """``package`` is what must be importable; ``entries`` raises Refusal for a case that it does not have."""

    name = ""
    package = ""
    devices: tuple[str, ...] = ("cuda",)

    def version(self) -> str:
        """Raises ImportError when the package is absent or does not load."""
        module = importlib.import_module(self.package)
        if hasattr(module, "__version__"):
            return str(module.__version__)
        owners = importlib.metadata.packages_distributions().get(self.package.split(".")[0], [])
        return importlib.metadata.version(owners[0]) if owners else "unknown version"

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        raise NotImplementedError


def _bf16_bytes(inputs: Inputs) -> float:
    case = inputs.case
    return 2.0 * 2 * case.tokens * case.kv_heads * case.head_dim


def rounded_to_e4m3(inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    """Q, K and V, and FlashAttention-3's scales of them: 1, as e4m3 takes values up to a few dozen as they are."""
    import torch

    ones = torch.ones(inputs.case.batch, inputs.case.kv_heads, device=inputs.device)
    tensors = [x.to(torch.float8_e4m3fn) for x in (inputs.q, inputs.k, inputs.v)]
    return tensors, {f"{name}_descale": ones for name in "qkv"}


class Halftone(Peer):
    name, package, devices = "halftone", "halftone", ("cuda", "cpu")

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        return [self._entry(inputs, name) for name in formats]

    def _entry(self, inputs: Inputs, name: str) -> Entry:
        case, cpu = inputs.case, inputs.device == "cpu"
        text, _, rotation = name.partition("+")
        cache = self.cache(inputs, text, rotation == "rot")
        plan = ht.plan(
            cache, q_heads=case.q_heads, max_q_len=case.q_len, min_q_len=case.q_len, q_dtype="f32" if cpu else "bf16",
            causal=case.q_len > 1,
        )  # fmt: skip
        step = ht.schedule(plan, cache)
        q = inputs.q.reshape(-1, case.q_heads, case.head_dim)
        out = np.empty_like(q) if cpu else q.new_empty(q.shape)
        return Entry(
            label=f"halftone {name}",
            call=lambda: ht.attend(q, cache, schedule=step, out=out),
            kv_bytes=cache.spec.bytes_per_token * case.tokens,
            stored=lambda i: self._stored(cache, i),
            schedule=step.update,
        )

    @staticmethod
    def cache(inputs: Inputs, name: str, rotate: bool) -> ht.PagedKVCache:
        case, framework = inputs.case, "numpy" if inputs.device == "cpu" else "torch"
        form, scales = ht.KVFormat(name), {}
        if form.static_scale:
            for part, x in (("k", inputs.k), ("v", inputs.v)):
                sample = x[0] if framework == "numpy" else x[0].float().cpu().numpy()
                scale, minimum = ht.calibrate(sample * 1.2, form, rotate=rotate)  # room for the other requests
                for key, values in ((f"{part}_scale", scale), (f"{part}_min", minimum)):
                    if values is not None:
                        scales[key] = ht._arrays.make(framework, values.tolist(), "f32", inputs.device)
        cache = ht.PagedKVCache(
            case.batch, case.context, kv_heads=case.kv_heads, head_dim=case.head_dim, k_format=form, page_size=PAGE,
            rotate_k=rotate, rotate_v=rotate, framework=framework, device=inputs.device, **scales,
        )  # fmt: skip
        flat = (-1, case.kv_heads, case.head_dim)
        cache.append(inputs.k.reshape(flat), inputs.v.reshape(flat), [case.context] * case.batch)
        cache.check_status()
        return cache

    @staticmethod
    def _stored(cache: ht.PagedKVCache, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The pages of one request, read by the CPU backend: they are the same bytes on every device."""
        to_host = ht._arrays.to_numpy
        length = cache.host_lengths[index]
        live = -(-length // cache.spec.page_size)
        pages = to_host(cache.pages[cache.block_table[index, :live]])
        scales = {n: getattr(cache, n) for n in ht.spec.TENSORS}
        scales = {n: to_host(x) for n, x in scales.items() if x is not None}
        table = np.arange(live, dtype=np.int32)[None]
        return ht.PagedKVCache.wrap(cache.spec, pages, table, np.array([length], np.int32), **scales).dequantize()


class TorchSdpa(Peer):
    package, devices = "torch", ("cuda", "cpu")

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"torch SDPA {backend}"

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        case = inputs.case
        if inputs.device == "cpu" and self.backend == "cudnn":
            raise Refusal("is for CUDA")
        causal = case.q_len > 1
        if causal and case.q_len != case.context:
            raise Refusal("its causal mask is aligned to the top left")
        tensors = [t if torch.is_tensor(t) else torch.from_numpy(t).bfloat16() for t in (inputs.q, inputs.k, inputs.v)]
        q, k, v = (t.transpose(1, 2) for t in tensors)
        backend = SDPBackend.CUDNN_ATTENTION if self.backend == "cudnn" else SDPBackend.FLASH_ATTENTION
        gqa = case.q_heads != case.kv_heads
        if inputs.device == "cpu" and gqa:  # the CPU's flash kernel wants as many KV heads as query heads
            k, v = (t.repeat_interleave(case.q_heads // case.kv_heads, 1) for t in (k, v))
            gqa = False

        def call() -> Any:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
            return out.transpose(1, 2)

        return [Entry(f"{self.name} bf16", call, _bf16_bytes(inputs))]


class FlashAttention(Peer):
    """FlashAttention 2 and 3 through their KV-cache entry point, 4 through its plain one."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.name = f"flash_attn {generation}"
        self.package = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}[generation]

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        import torch

        case, module = inputs.case, importlib.import_module(self.package)
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.generation == 4:

            def plain() -> Any:
                out = module.flash_attn_func(q, k, v, causal=True)
                return out[0] if isinstance(out, tuple) else out

            return [Entry(f"{self.name} bf16", plain, _bf16_bytes(inputs))]
        lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=inputs.device)

        def with_cache(q: Any, k: Any, v: Any, **scales: Any) -> Callable[[], Any]:
            return lambda: module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **scales)

        entries = [Entry(f"{self.name} bf16", with_cache(q, k, v), _bf16_bytes(inputs))]
        if self.generation == 3:
            eight, scales = rounded_to_e4m3(inputs)
            entries.append(Entry(f"{self.name} fp8", with_cache(*eight, **scales), _bf16_bytes(inputs) / 2))
        return entries


class FlashInfer(Peer):
    name, package = "flashinfer", "flashinfer"

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        flashinfer: Any = importlib.import_module("flashinfer")
        import torch

        case, page = inputs.case, PAGE
        if case.q_len != 1 or case.context % page:
            raise Refusal("is measured in decode with whole pages only")
        per_request = case.context // page
        indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=inputs.device) * per_request
        indices = torch.arange(case.batch * per_request, dtype=torch.int32, device=inputs.device)
        last = torch.full((case.batch,), page, dtype=torch.int32, device=inputs.device)
        q = inputs.q[:, 0].contiguous()
        entries = []
        for label, dtype, size in (("bf16", torch.bfloat16, 2), ("fp8", torch.float8_e4m3fn, 1)):
            shape = (-1, page, case.kv_heads, case.head_dim)
            cache = torch.stack([inputs.k.reshape(shape), inputs.v.reshape(shape)], 1).to(dtype)
            memory = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.device)
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=True)
            wrapper.plan(
                indptr, indices, last, case.q_heads, case.kv_heads, case.head_dim, page, q_data_type=torch.bfloat16,
                kv_data_type=dtype,
            )  # fmt: skip
            call = lambda wrapper=wrapper, cache=cache: wrapper.run(q, cache)  # noqa: E731
            entries.append(Entry(f"flashinfer {label}", call, _bf16_bytes(inputs) * size / 2))
        return entries


class SageAttention(Peer):
    name, package = "sageattention", "sageattention"

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        sageattention: Any = importlib.import_module("sageattention")

        case = inputs.case
        if case.q_len != case.context:
            raise Refusal("quantises K anew in every call and has no cache: measured in prefill only")
        q, k, v = inputs.q, inputs.k, inputs.v
        call = lambda: sageattention.sageattn(q, k, v, tensor_layout="NHD", is_causal=True)  # noqa: E731
        return [Entry("sageattention, quantisation included", call, _bf16_bytes(inputs))]


class Fbgemm(Peer):
    name, package = "fbgemm gen_ai", "fbgemm_gpu.experimental.gen_ai"

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        import torch

        case = inputs.case
        if case.kv_heads != 1 or case.q_len != 1 or case.head_dim != 128:
            raise Refusal("gqa_attn_splitk has one KV head, one query and dim 128")
        operator = torch.ops.fbgemm.gqa_attn_splitk
        last = torch.full((case.batch,), case.context - 1, dtype=torch.int32, device=inputs.device)
        splits, scale = 16, case.head_dim**-0.5

        def call(k: Any, v: Any, groups: int) -> Callable[[], Any]:
            return lambda: operator(inputs.q, k, v, last, scale, splits, groups)[0]

        entries = [Entry("fbgemm bf16", call(inputs.k, inputs.v, 1), _bf16_bytes(inputs))]
        for groups in (1, 4):
            k, v = (_fbgemm_int4(x, groups) for x in (inputs.k, inputs.v))
            entries.append(Entry(f"fbgemm int4, {groups} groups", call(k, v, groups), 2.0 * k.numel()))
        return entries


def _fbgemm_int4(x: Any, groups: int) -> Any:
    """[..., dim] as FBGEMM's INT4 rows: half2{scale, shift} for each group, then nibbles, the even dim low."""
    import torch

    parts = x.float().unflatten(-1, (groups, -1))
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-4).half()
    shift = low.half()
    codes = ((parts - shift[..., None].float()) / scale[..., None].float()).round().clamp(0, 15).to(torch.uint8)
    codes = codes.flatten(-2)
    nibbles = codes[..., 0::2] | (codes[..., 1::2] << 4)
    header = torch.stack([scale, shift], -1).flatten(-2).view(torch.uint8)
    return torch.cat([header, nibbles], -1).contiguous()


class FlashMla(Peer):
    name, package = "flash_mla", "flash_mla"

    def entries(self, inputs: Inputs, formats: list[str]) -> list[Entry]:
        raise Refusal("has latent attention (MLA) only")


PEERS: list[Peer] = [
    Halftone(), TorchSdpa("cudnn"), TorchSdpa("flash"), FlashAttention(2), FlashAttention(3), FlashAttention(4),
    FlashInfer(),
    SageAttention(), Fbgemm(), FlashMla(),
]  # fmt: skip


def truth_of(inputs: Inputs, index: int, kv: tuple[NDArray[Any], NDArray[Any]] | None = None) -> NDArray[Any]:
    """The oracle's output for one request, on the inputs or on what a cache made of them."""
    q, k, v = inputs.request(index)
    if kv is not None:
        k, v = kv
    return attention(q, k, v, causal=inputs.case.q_len > 1)[0]
