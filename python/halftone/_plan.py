"""Plan once per shape: what depends on shapes and bounds alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from . import _arrays, _check, _native
from .cache import PagedKVCache
from .errors import InvalidArgumentError
from .spec import KVCacheSpec, KVTensors

_POLICIES = ("fast", "reproducible", "batch_invariant")
_ARITHMETICS = ("16-bit", "half_int8", "full_int8", "fp8")


def _plain(value: Any) -> Any:
    """tvm_ffi's texts, maps and arrays as Python's own."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, Sequence) else value


class Plan(_check.Fixed):
    """What :func:`plan` decided for a shape; valid for any lengths within its bounds. Immutable.

    Attributes:
        spec: the geometry of K and V, a :class:`KVCacheSpec` or a :class:`KVTensors`.
        options: everything else the plan depends on, by name.
        workspace_bytes: bytes of the workspace of :func:`schedule`, 256-byte aligned.
        out_dtype, lse, device: as given to :func:`plan`.
    """

    _fixed = frozenset(("spec", "options", "info", "workspace_bytes", "out_dtype", "lse", "device"))
    _instead = "make another one with plan()"

    def __init__(self, spec: KVCacheSpec | KVTensors, options: tuple[tuple[str, Any], ...]) -> None:
        self.spec = spec
        self.options: dict[str, Any] = dict(options)
        if isinstance(spec, KVTensors):
            self._native = _native.plan_tensors(
                spec.dtype, spec.kv_heads, spec.head_dim, spec.v_head_dim, _native_options(self.options)
            )
        else:
            self._native = _native.plan(spec._native, _native_options(self.options))
        self.info: dict[str, Any] = _plain(_native.plan_info(self._native))
        """The configuration and why it was chosen, the fields of C++'s ``PlanInfo``; ``passes`` is a list of dicts."""
        self.workspace_bytes: int = self.info["workspace_bytes"]
        self.out_dtype: str = self.options["out_dtype"]
        self.lse: bool = self.options["lse"]
        self.device: str = "cpu" if self.options["device_type"] == 1 else f"cuda:{self.options['device_index']}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _cached_plan, (self.spec, tuple(self.options.items()))

    def describe(self) -> str:
        """The plan in words: the configuration, the reason, sizes."""
        return str(_native.describe(self._native))

    def __repr__(self) -> str:
        configs = " + ".join(p["config"] for p in self.info["passes"])
        return f"Plan({configs}, batch={self.options['batch']}, device={self.device})"


def _native_options(options: dict[str, Any]) -> dict[str, Any]:
    extra = options["extra"]
    return {**options, "extra": None if extra is None else extra._native}


@lru_cache(maxsize=256)
def _cached_plan(spec: KVCacheSpec | KVTensors, options: tuple[tuple[str, Any], ...]) -> Plan:
    return Plan(spec, options)


def plan(
    spec: KVCacheSpec | KVTensors | PagedKVCache,
    *,
    q_heads: int,
    batch: int | None = None,
    max_kv_len: int | None = None,
    max_q_len: int = 1,
    min_q_len: int = 1,
    device: str | None = None,
    q_dtype: str = "bf16",
    out_dtype: str | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    lse: bool = False,
    policy: str = "reproducible",
    arithmetic: str = "16-bit",
    workers: int = 0,
    max_total_kv: int = 0,
    max_prompt_kv: int = 0,
    appends: bool = False,
    top_k: int = 0,
    extra: KVCacheSpec | None = None,
    extra_top_k: int = 0,
) -> Plan:
    """Validates a whole problem and chooses a configuration. Depends on shapes and bounds, never on lengths.

    With kv_len keys and q_len queries, query i stands at position ``p = i + kv_len - q_len`` (bottom-right alignment)
    and sees key j when ``j <= p`` (causal), ``j >= p - window_left`` and ``j <= p + window_right``.

    Args:
        spec: where K and V lie: a :class:`KVCacheSpec` of paged caches, a :class:`KVTensors` of plain arrays, or a cache,
            which then also gives ``batch``, ``max_kv_len`` and ``device``.
        q_heads: query heads, a multiple of the KV heads.
        batch: requests.
        max_kv_len: upper bound of a request's keys, in tokens.
        max_q_len: upper bound of a request's queries, in tokens.
        min_q_len: queries of the shortest of the requests that have any, as you expect them, in tokens, from 1 to
            ``max_q_len``. It is a hint for the choice of kernels, not a limit. Where no request is expected that a
            kernel for few queries would serve sooner, none is launched; requests of fewer queries, or none, are served
            all the same, if maybe more slowly. Of no use with lists and, on CUDA, with "batch_invariant" or where
            prompts are staged and ``max_prompt_kv`` is given and less than ``max_total_kv``.
        device: "cpu" or "cuda:<index>".
        q_dtype, out_dtype: "f32", "f16" or "bf16"; ``out_dtype`` None means ``q_dtype``. CUDA: f16 and bf16.
        causal, window_left, window_right: the mask; -1 means no limit.
        scale: logit = scale * q.k, above 0; None means 1/sqrt(head_dim).
        softcap: above 0: logit = softcap * tanh(logit / softcap), before ALiBi (Gemma 2, arXiv:2408.00118).
        alibi: add -slope[head] * abs(p - j) (arXiv:2108.12409).
        sinks: a logit for each head joins the softmax's denominator (arXiv:2309.17453).
        lse: write the log of the sum of exponentials.
        policy: how the keys of a request are split over workers: "fast", "reproducible" (same plan, lengths and input:
            same bits) or "batch_invariant" (a request's bits do not depend on its neighbours, nor on the bounds).
        arithmetic: in what precision the two products take their operands: "16-bit" (nothing is rounded that Q, K and V
            do not already have rounded), "half_int8" (Q and K as 8-bit integers with a scale per row: SageAttention,
            arXiv:2410.02367), "full_int8" (P and V as well) or "fp8" (in E4M3, P where a backend rounds it: FlashAttention-3,
            arXiv:2407.08608). A lower one never comes of itself; what a backend does not serve raises UnsupportedError.
        workers: 0 for one per SM or CPU thread; else 1 to 65536.
        max_total_kv: upper bound of all requests' keys, in tokens, those of shared pages counted for each request; 0
            means ``batch * max_kv_len``. On CUDA it bounds ``info["staged_bytes"]``, the part of the workspace into
            which prompts over quantised caches dequantise K and V, and those in ``half_int8`` and ``fp8`` put codes;
            what is beyond it is left out.
        max_prompt_kv: the same of the requests that have more than one query; 0 means ``max_total_kv``. Where single
            queries stand beside prompts, it bounds ``info["staged_bytes"]`` in the other's place: stating it saves time
            as well as memory.
        appends: :func:`attend` is given the ``k`` and ``v`` of every query's token and appends them. The lengths of a
            schedule are then those before the step, which counts the new tokens itself; ``max_kv_len``,
            ``max_total_kv`` and ``max_prompt_kv`` bound the sum.
        top_k: above 0: each query attends to the keys of a list of so many places, see :func:`attend_listed`; without
            mask and ALiBi. The bounds of keys are then of no use.
        extra, extra_top_k: spec of a second cache and places of a second list, over it.

    Raises:
        InvalidArgumentError, UnsupportedError, ResourceExhaustedError.
    """
    if isinstance(spec, PagedKVCache):
        cache, spec = spec, spec.spec
        batch = cache.batch if batch is None else batch
        max_kv_len = cache.max_len if max_kv_len is None else max_kv_len
        device = cache.device if device is None else device
    elif not isinstance(spec, (KVCacheSpec, KVTensors)):
        raise InvalidArgumentError(
            f"spec is a {type(spec).__name__}, but must be a KVCacheSpec, a KVTensors or a PagedKVCache."
        )
    if top_k and max_kv_len is None:
        max_kv_len = 0  # of no use to lists
    for value, name in ((batch, "batch"), (max_kv_len, "max_kv_len")):
        if value is None:
            raise InvalidArgumentError(f"{name} is None, but a plan without a cache needs it: give a number.")
    device_type, device_index = _arrays.parse_device("cpu" if device is None else device)
    _check.choice(q_dtype, "q_dtype", _check.FLOATS)
    options = {
        "device_type": device_type,
        "device_index": device_index,
        "batch": _check.integer(batch, "batch"),
        "q_heads": _check.integer(q_heads, "q_heads"),
        "max_q_len": _check.integer(max_q_len, "max_q_len"),
        "min_q_len": _check.integer(min_q_len, "min_q_len"),
        "max_kv_len": _check.integer(max_kv_len, "max_kv_len"),
        "q_dtype": q_dtype,
        "out_dtype": q_dtype if out_dtype is None else _check.choice(out_dtype, "out_dtype", _check.FLOATS),
        "causal": _check.flag(causal, "causal"),
        "window_left": _check.integer(window_left, "window_left"),
        "window_right": _check.integer(window_right, "window_right"),
        "scale": 0.0 if scale is None else _check.positive(scale, "scale", "None for 1/sqrt(head_dim)"),
        "softcap": _check.positive(softcap, "softcap", "0 for none") if _check.real(softcap, "softcap") else 0.0,
        "alibi": _check.flag(alibi, "alibi"),
        "sinks": _check.flag(sinks, "sinks"),
        "lse": _check.flag(lse, "lse"),
        "policy": _check.choice(policy, "policy", _POLICIES),
        "arithmetic": _check.choice(arithmetic, "arithmetic", _ARITHMETICS),
        "workers": _check.integer(workers, "workers"),
        "max_total_kv": _check.integer(max_total_kv, "max_total_kv", 64),
        "max_prompt_kv": _check.integer(max_prompt_kv, "max_prompt_kv", 64),
        "appends": _check.flag(appends, "appends"),
        "top_k": _check.integer(top_k, "top_k"),
        "extra_top_k": _check.integer(extra_top_k, "extra_top_k"),
        "extra": extra.spec if isinstance(extra, PagedKVCache) else extra,
    }
    if not isinstance(options["extra"], (KVCacheSpec, type(None))):
        raise InvalidArgumentError(f"extra is a {type(extra).__name__}, but must be a KVCacheSpec or None.")
    return _cached_plan(spec, tuple(options.items()))
