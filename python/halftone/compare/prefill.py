"""The suite of prompts: halftone over plain tensors and over caches, beside packages that take plain tensors."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import numpy as np

import halftone as ht

from .cases import Case, Inputs, make_inputs
from .oracle import attention_rows
from .peers import Halftone, Refusal, rounded_to_e4m3
from .records import Part, Work

PEERS = ("halftone", "flash_attn 3", "torch SDPA cudnn", "torch SDPA flash", "flashinfer", "flash_attn 2",
         "flash_attn 4", "sageattention")  # fmt: skip
# What halftone reads and how it multiplies: a format of K and V, or "plain" tensors, and "@" an arithmetic.
FORMATS = {
    "cuda": "plain,plain@half_int8,plain@fp8,bf16,int8-head@half_int8,int8-tensor@half_int8,fp8@fp8",
    "cpu": "plain,bf16,int8-head@half_int8",
}
_SAMPLES = 8  # rows of a request that are held against double precision


@dataclass(frozen=True)
class Shape:
    """Prompts, or chunks of them, of ``batch`` requests alike."""

    case: Case
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.case.name}, {'causal' if self.causal else 'no mask'}"

    @property
    def flops(self) -> float:
        """Of both products, counting only keys that a query sees."""
        case = self.case
        seen = case.q_len * case.context - (case.q_len * (case.q_len - 1) / 2 if self.causal else 0)
        return 4.0 * case.batch * case.q_heads * case.head_dim * seen


# Who takes part beside halftone: name of the peer -> label -> what makes its part of a case.
Makers = dict[str, dict[str, Callable[[Shape, Inputs], Part]]]


def _shapes(q_heads: int, kv_heads: int, head_dim: int, requests: str, masks: tuple[bool, ...]) -> list[Shape]:
    pairs = [tuple(int(n) for n in text.split("x")) for text in requests.split()]
    return [
        Shape(Case(batch, context, q_heads, kv_heads, head_dim, context), causal)
        for causal in masks for context, batch in pairs
    ]  # fmt: skip


SHAPES = {
    # 2,048 dims and 16,384 tokens in all, the shapes of FlashAttention's figures; grouped queries; the end of a long
    # prompt; the shapes in which half-INT8 attention was published.
    "cuda": [s for dim in (64, 128, 256)
             for s in _shapes(2048 // dim, 2048 // dim, dim, "1024x16 4096x4 16384x1", (False, True))]
    + _shapes(32, 8, 128, "4096x4 16384x1", (True,))
    + [Shape(Case(1, 2048, 32, 8, 128, 32768), True)]
    + _shapes(16, 1, 128, "1024x32 4096x8 16384x2 32768x1", (False, True)),
    "cpu": _shapes(8, 2, 128, "256x1 1024x1", (True,)),
}  # fmt: skip
SMOKE = {"cuda": _shapes(4, 2, 128, "256x2", (False, True)), "cpu": _shapes(4, 2, 64, "96x2", (False, True))}


def works(shapes: list[Shape], device: str, formats: list[str]) -> Iterator[Callable[[], Work]]:
    return make_works(shapes, device, formats, _MAKERS)


def make_works(shapes: list[Shape], device: str, formats: list[str], makers: Makers) -> Iterator[Callable[[], Work]]:
    for shape in shapes:
        yield lambda shape=shape: _make_work(shape, device, formats, makers)  # type: ignore[misc]


def _make_work(shape: Shape, device: str, formats: list[str], makers: Makers) -> Work:
    inputs, case = make_inputs(shape.case, device), shape.case
    fields = dict(
        head_dim=case.head_dim, q_heads=case.q_heads, kv_heads=case.kv_heads, causal=shape.causal, q_len=case.q_len,
        context=case.context, batch=case.batch,
    )  # fmt: skip
    parts: list[tuple[str, str, Callable[[], Part]]] = [
        ("halftone", f"halftone {name}", lambda name=name: _halftone(shape, inputs, name))  # type: ignore[misc]
        for name in formats
    ]
    for peer, labels in makers.items():
        for label, maker in labels.items():
            parts.append((peer, f"{peer} {label}", lambda maker=maker: maker(shape, inputs)))  # type: ignore[misc]
    return Work(shape.name, fields, shape.flops, parts, lambda out: _error(shape, inputs, out))


def _error(shape: Shape, inputs: Inputs, out: Any) -> float:
    """Of a few rows of the first and of the last request, against double precision on the inputs."""
    case = shape.case
    rows = sorted({int(r) for r in np.linspace(0, case.q_len - 1, _SAMPLES)})
    visible = [r + case.context - case.q_len + 1 if shape.causal else case.context for r in rows]
    out = out.reshape(case.batch, case.q_len, case.q_heads, case.head_dim)
    wrong = total = 0.0
    for i in sorted({0, case.batch - 1}):
        truth, _ = attention_rows(inputs.q[i][rows], inputs.k[i], inputs.v[i], visible)
        own = out[i][rows]
        own = own if isinstance(own, np.ndarray) else own.double().cpu().numpy()
        wrong += float(np.square(own - truth).sum())
        total += float(np.square(truth).sum())
    return float((wrong / total) ** 0.5)


def _halftone(shape: Shape, inputs: Inputs, name: str) -> Part:
    case, cpu = shape.case, inputs.device == "cpu"
    form, _, arithmetic = name.partition("@")
    form, _, rotation = form.partition("+")
    fields: dict[str, Any] = dict(
        arithmetic=arithmetic or "16-bit", format_k=form, format_v=form, scales=None, policy="reproducible"
    )  # fmt: skip
    options: dict[str, Any] = dict(
        q_heads=case.q_heads, max_q_len=case.q_len, min_q_len=case.q_len, q_dtype="f32" if cpu else "bf16",
        causal=shape.causal, arithmetic=arithmetic or "16-bit",
    )  # fmt: skip
    q = inputs.q.reshape(-1, case.q_heads, case.head_dim)
    out = np.empty_like(q) if cpu else q.new_empty(q.shape)
    if form != "plain":
        granularity = ht.KVFormat(form).granularity
        fields["scales"] = None if granularity == "none" else granularity
        if rotation:
            fields.update(rotate_k=True, rotate_v=True)
        cache = Halftone.cache(inputs, form, rotation == "rot")
        fields["page_size"] = cache.spec.page_size
        step = ht.schedule(ht.plan(cache, **options), cache)
        return Part(lambda: ht.attend(q, cache, schedule=step, out=out), fields, schedule=step.update)
    k, v = (x.reshape(-1, case.kv_heads, case.head_dim) for x in (inputs.k, inputs.v))
    spec = ht.KVTensors(case.kv_heads, case.head_dim, "f32" if cpu else "bf16")
    plan = ht.plan(spec, batch=case.batch, max_kv_len=case.context, device=inputs.device, **options)
    starts = [
        ht._arrays.make("numpy" if cpu else "torch", [i * n for i in range(case.batch + 1)], "int32", inputs.device)
        for n in (case.q_len, case.context)
    ]
    step = ht.schedule(plan, cu_q=starts[0], cu_kv=starts[1])
    return Part(lambda: ht.attend(q, k=k, v=v, schedule=step, out=out), fields, schedule=step.update)


def plain_fields(arithmetic: str = "16-bit") -> dict[str, Any]:
    """The fields of rows over plain tensors."""
    scales = "tensor" if arithmetic == "fp8" else None
    return dict(arithmetic=arithmetic, format_k="plain", format_v="plain", scales=scales, policy=None)


def _sdpa(backend: str) -> Callable[[Shape, Inputs], Part]:
    def make(shape: Shape, inputs: Inputs) -> Part:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        case, cpu = shape.case, inputs.device == "cpu"
        if cpu and backend == "cudnn":
            raise Refusal("is for CUDA")
        if not cpu and backend == "flash":
            raise Refusal("is FlashAttention-2 on CUDA: measured on the CPU only")
        if shape.causal and case.q_len != case.context:
            raise Refusal("its causal mask is aligned to the top left")
        tensors = [torch.from_numpy(t).bfloat16() if cpu else t for t in (inputs.q, inputs.k, inputs.v)]
        q, k, v = (t.transpose(1, 2) for t in tensors)
        gqa = case.q_heads != case.kv_heads
        if cpu and gqa:  # the CPU's flash kernel wants as many KV heads as query heads
            k, v = (t.repeat_interleave(case.q_heads // case.kv_heads, 1) for t in (k, v))
            gqa = False
        chosen = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION

        def call() -> Any:
            with sdpa_kernel(chosen):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)
            return out.transpose(1, 2)

        return Part(call, plain_fields())

    return make


def _flash(package: str, eight_bits: bool = False) -> Callable[[Shape, Inputs], Part]:
    def make(shape: Shape, inputs: Inputs) -> Part:
        function = importlib.import_module(package).flash_attn_func
        tensors, scales = rounded_to_e4m3(inputs) if eight_bits else ([inputs.q, inputs.k, inputs.v], {})

        def call() -> Any:
            out = function(*tensors, causal=shape.causal, **scales)
            return out[0] if isinstance(out, tuple) else out

        return Part(call, plain_fields("fp8" if eight_bits else "16-bit"))

    return make


def _flashinfer(shape: Shape, inputs: Inputs) -> Part:
    flashinfer: Any = importlib.import_module("flashinfer")
    import torch

    case = shape.case
    memory = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD")
    first = torch.arange(case.batch + 1, dtype=torch.int32, device=inputs.device)
    wrapper.plan(
        first * case.q_len, first * case.context, case.q_heads, case.kv_heads, case.head_dim, causal=shape.causal,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (inputs.q, inputs.k, inputs.v))
    return Part(lambda: wrapper.run(q, k, v), plain_fields())


def _sage(shape: Shape, inputs: Inputs) -> Part:
    function = importlib.import_module("sageattention").sageattn
    if shape.causal and shape.case.q_len != shape.case.context:
        raise Refusal("its causal mask is aligned to the top left")
    q, k, v = inputs.q, inputs.k, inputs.v
    fields = dict(plain_fields("half_int8"), scales="block")
    return Part(lambda: function(q, k, v, tensor_layout="NHD", is_causal=shape.causal), fields)


_MAKERS: Makers = {
    "flash_attn 3": {
        "bf16": _flash("flash_attn_interface"), "fp8": _flash("flash_attn_interface", eight_bits=True),
    },
    "torch SDPA cudnn": {"bf16": _sdpa("cudnn")},
    "torch SDPA flash": {"bf16": _sdpa("flash")},
    "flashinfer": {"bf16": _flashinfer},
    "flash_attn 2": {"bf16": _flash("flash_attn")},
    "flash_attn 4": {"bf16": _flash("flash_attn.cute")},
    "sageattention": {"quantisation included": _sage},
}  # fmt: skip
