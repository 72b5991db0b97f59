"""The suite of drafts and chunks: a few rows over many keys, halftone over caches beside FlashAttention-3 over tensors
and over pages of as many tokens."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Iterator

from .cases import Case, Inputs
from .peers import PAGE, Refusal, rounded_to_e4m3
from .prefill import Makers, Shape, make_works, plain_fields
from .records import Part, Work

PEERS = ("halftone", "flash_attn 3")
FORMATS = {"cuda": "bf16,fp8,int8-head,int4-g32,fp8@fp8", "cpu": "bf16,int8-head"}
Q_LEN = 16  # of a shape whose queries nobody named


def _shapes(q_heads: int, kv_heads: int, head_dim: int, q_len: int, requests: str) -> list[Shape]:
    pairs = [tuple(int(n) for n in text.split("x")) for text in requests.split()]
    return [Shape(Case(batch, q_len, q_heads, kv_heads, head_dim, context), True) for context, batch in pairs]


SHAPES = {
    # Drafts of 48 rows (queries x query heads of a KV head) over as many keys in all; chunks of 128 to 256 rows of one
    # KV head and of 128 to 1,024 rows of eight.
    "cuda": _shapes(16, 1, 128, 3, "1024x256 2048x128 4096x64 8192x32 16384x16 32768x8 65536x4 131072x2")
    + [s for q_len in (8, 12, 16) for s in _shapes(16, 1, 128, q_len, "8192x32 131072x2")]
    + _shapes(32, 8, 128, 32, "8192x1 32768x1 131072x1") + _shapes(32, 8, 128, 64, "8192x1 131072x1 2048x8")
    + [s for q_len in (128, 256) for s in _shapes(32, 8, 128, q_len, "8192x1 32768x1")]
    + _shapes(8, 8, 128, 128, "8192x1"),
    "cpu": _shapes(16, 1, 128, 3, "1024x2") + _shapes(32, 8, 128, 32, "1024x1"),
}  # fmt: skip
SMOKE = {
    "cuda": _shapes(16, 1, 128, 3, "512x2") + _shapes(8, 2, 128, 32, "256x1"),
    "cpu": _shapes(16, 1, 64, 3, "128x2") + _shapes(4, 2, 64, 8, "96x1"),
}


def works(shapes: list[Shape], device: str, formats: list[str]) -> Iterator[Callable[[], Work]]:
    return make_works(shapes, device, formats, _MAKERS)


def _flash(eight_bits: bool, pages: bool) -> Callable[[Shape, Inputs], Part]:
    """FlashAttention-3's entry point for caches, with the splits that it chooses itself."""

    def make(shape: Shape, inputs: Inputs) -> Part:
        module: Any = importlib.import_module("flash_attn_interface")
        import torch

        case = shape.case
        fields = plain_fields("fp8" if eight_bits else "16-bit")
        lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=inputs.device)
        q, k, v = inputs.q, inputs.k, inputs.v
        options: dict[str, Any] = {"cache_seqlens": lengths, "causal": shape.causal, "num_splits": 0}
        if eight_bits:
            (q, k, v), scales = rounded_to_e4m3(inputs)
            options.update(scales)
        if pages:
            if case.context % PAGE:
                raise Refusal("is measured with whole pages only")
            k, v = (x.reshape(-1, PAGE, case.kv_heads, case.head_dim) for x in (k, v))
            table = torch.arange(k.shape[0], dtype=torch.int32, device=inputs.device)
            options["page_table"] = table.reshape(case.batch, -1)
            form = "fp8" if eight_bits else "bf16"
            fields.update(format_k=form, format_v=form, page_size=PAGE)
        # As halftone's schedule, it is the same for all layers of a step.
        options["scheduler_metadata"] = module.get_scheduler_metadata(
            case.batch, case.q_len, case.context, case.q_heads, case.kv_heads, case.head_dim, lengths,
            qkv_dtype=q.dtype, page_size=PAGE if pages else None, causal=shape.causal, num_splits=0,
        )  # fmt: skip

        def call() -> Any:
            out = module.flash_attn_with_kvcache(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return Part(call, fields)

    return make


_MAKERS: Makers = {
    "flash_attn 3": {
        f"{form} {place}": _flash(form == "fp8", place == "pages")
        for form in ("bf16", "fp8") for place in ("tensors", "pages")
    },
}  # fmt: skip
