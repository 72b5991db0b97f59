"""The cache of a model's layers, in the shape of a cache of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from .. import InvalidArgumentError, KVCacheSpec, LayeredKVCache, OutOfRangeError, PagedKVCache, Recipe
from .columns import Columns
from .formats import recipe_of, specs_of, windows_of
from .group import LayerGroup, Step
from .layers import HalftoneLayer, Pending, Seen
from .masks import Visible, check_sizes, gaps_of

_SCALES = ("k_scale", "k_min", "v_scale", "v_min", "k_offset", "k_channel_scale")


class HalftoneCache(Cache):
    """A quantised KV cache for ``model.generate(past_key_values=...)`` and for calls of the model.

    The model's attention implementation must be that of :func:`register`. Padding that ``attention_mask`` leaves out is
    not stored. Queries attend to what is in the pages, those of the prompt, too: results do not depend on how a prompt
    is cut into calls. Pages are allocated by the first call, on its device, unless ``batch`` is given.

    Layers with a sliding window have pages of their own, which are returned once the window has passed them, and fewer
    of them where ``max_step`` says that prompts come in parts.

    Args:
        config: of the model.
        max_len: most tokens of a request, generated ones included, padding not.
        formats: of K and V: ``FORMAT``, ``FORMAT+rot`` (stored after a Hadamard rotation), ``K:V`` with both; a
            :class:`halftone.KVFormat`, a pair of them, or a :class:`halftone.KVCacheSpec`; or a list with one of these
            for each layer; or a :class:`halftone.Recipe`, or the path of its file (.json), static scales included.
        batch: requests (beams count), to allocate at once; None: those of the first call.
        device: "cpu" or "cuda:<index>", beside ``batch``.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        max_step: most tokens of a request in one call of the model; None means ``max_len``.
        rollback: how many tokens :meth:`crop` can drop once a sliding window has passed; more raise OutOfRangeError.
        num_pages: pages of each layer that sees all keys; None means enough for every request at ``max_len``.
        kv_heads, head_dim, v_head_dim: of a model whose configuration says otherwise than its layers.
        k_scale, k_min, v_scale, v_min: static scales for formats that have them: a list with those of each layer.
        k_offset, k_channel_scale: offset and scale of K's channels, likewise; see :func:`halftone.calibrate_channels`.

    Raises:
        InvalidArgumentError: formats that do not fit the model.
        UnsupportedError: a model with other than full and sliding attention.
        ResourceExhaustedError: pages that do not fit into memory.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_len: int,
        formats: Any = "int8-head",
        *,
        batch: int | None = None,
        device: str | torch.device = "cpu",
        page_size: int = 64,
        max_step: int | None = None,
        rollback: int = 128,
        num_pages: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        k_scale: Sequence[Any] | None = None,
        k_min: Sequence[Any] | None = None,
        v_scale: Sequence[Any] | None = None,
        v_min: Sequence[Any] | None = None,
        k_offset: Sequence[Any] | None = None,
        k_channel_scale: Sequence[Any] | None = None,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        windows = windows_of(decoder)
        given = (("max_len", max_len), ("rollback", rollback), ("max_step", max_len if max_step is None else max_step))
        for name, value in given:
            if isinstance(value, bool) or not isinstance(value, int) or value < (name != "rollback"):
                least = int(name != "rollback")
                raise InvalidArgumentError(f"{name} is {value!r}, but must be {least} or more: give a count of tokens.")
        geometry = {"kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        recipe = recipe_of(formats)
        specs = specs_of(decoder, recipe or formats, list(windows), page_size, geometry)
        self._specs = dict(zip(windows, specs))
        self._windows = windows
        self._max_len, self._max_step, self._rollback = max_len, min(given[2][1], max_len), rollback
        self._num_pages = num_pages
        scales: tuple[Any, ...] = (k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale)
        if recipe is not None:
            scales = _scales_of_recipe(recipe, list(windows), scales)
        self._scales = _scales_of_layers(scales, list(windows))
        for layer, spec in self._specs.items():
            if recipe is None and not (spec.offset_k or spec.scale_k):
                self._specs[layer] = _with_channels(spec, self._scales, layer)
        self._seen = Seen()
        self._groups: list[LayerGroup] = []
        self._step: Step | None = None
        self._next = self._seen.columns  # after the step
        count = max(windows) + 1
        super().__init__(layers=[HalftoneLayer(self._seen, max_len, windows.get(i)) for i in range(count)])
        self._make_groups(0 if batch is None else batch, str(device) if batch is not None else "cpu")

    def __getstate__(self) -> dict[str, Any]:
        if self._step is not None and self._step.missing:
            raise InvalidArgumentError(f"{self._unfinished()} and the cache cannot be copied: reset() it before.")
        return {**self.__dict__, "_step": None}

    def _make_groups(self, batch: int, device: str) -> None:
        """Allocates pages for ``batch`` requests; with none it checks the formats and their scales only."""
        groups = []
        for window in dict.fromkeys(self._windows.values()):
            layers = [index for index, own in self._windows.items() if own == window]
            num_pages = self._num_pages if window is None else self._window_pages(window, batch)
            scales = {name: [_on(values[i], device) for i in layers] for name, values in self._scales.items()}
            specs = [self._specs[i] for i in layers]
            groups.append(LayerGroup(window, layers, specs, batch, self._max_len, num_pages, device, scales))
        self._groups = groups
        self._group_of = {layer: group for group in groups for layer in group.layers}
        self._seen.columns = Columns.none(batch)

    def _window_pages(self, window: int, batch: int) -> int:
        """Of each layer: what a window spans with the tokens of a call and those kept for crop(), at any offset."""
        page_size = self._specs[next(iter(self._windows))].page_size
        span = -(-(window - 1 + self._rollback + self._max_step) // page_size) + 1
        return batch * min(span, -(-self._max_len // page_size))

    def layer(self, index: int) -> PagedKVCache:
        """The cache of layer ``index`` of the model. Raises OutOfRangeError for one without keys of its own."""
        group = self._group_of.get(index)
        if group is None:
            raise OutOfRangeError(
                f"index is {index}, but the layers with a cache are {', '.join(map(str, self._windows))}: use one."
            )
        return group.cache.layer(group.layers.index(index))

    @property
    def groups(self) -> list[LayeredKVCache]:
        """The caches of layers that share a block table: one for each sliding window, one for full attention."""
        return [group.cache for group in self._groups]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers, scales included."""
        return float(sum(spec.bytes_per_token for spec in self._specs.values()))

    @property
    def batch_size(self) -> int:
        """Requests; -1 before the first call."""
        return self._seen.columns.batch or -1

    @property
    def is_initialized(self) -> bool:
        """True once pages are allocated."""
        return self._seen.columns.batch > 0

    def early_initialization(self, batch_size: int, num_heads: Any, head_dim: Any, dtype: Any, device: Any) -> None:
        """Allocates pages for ``batch_size`` requests; the geometry stays that of the formats."""
        self._make_groups(batch_size, str(device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # pages are dealt on the host
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Takes new keys and values [batch, kv_heads, columns, head_dim] to the attention function, which appends them.

        Returns:
            What halftone's attention function recognises, twice; other functions cannot compute with it.
        """
        if layer_idx not in self._windows:
            raise OutOfRangeError(
                f"layer_idx is {layer_idx}, but the layers with a cache are {', '.join(map(str, self._windows))}: pass "
                "the config of this model."
            )
        pending = Pending(self, layer_idx, key_states, value_states)
        return pending, pending

    def attend(
        self, pending: Pending, q: Tensor, visible: Visible, sinks: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Appends what is pending and attends.

        Takes q [batch, q_heads, columns, head_dim] to [batch, columns, q_heads, v_head_dim].

        Args:
            pending: of :meth:`update`.
            q: the queries of the same columns.
            visible: the mask.
            sinks: f32 [q_heads], or None.
            options: of :func:`halftone.plan`: scale, softcap and window_left.
        """
        window = self._windows[pending.layer]
        if window is not None and (visible.window is None or visible.window > window):
            raise InvalidArgumentError(
                f"layer {pending.layer} asks for {visible.window or 'all'} keys, but by the config it has a sliding "
                f"window of {window}, whose older pages are returned: pass the config of this model."
            )
        if not pending.is_appended:
            self._append(pending, visible, q.shape[2])
        step = self._step
        assert step is not None
        batch, heads, columns, _ = q.shape
        packed = _rows(q, step)
        out = self._group_of[pending.layer].attend(pending.layer, packed, step, sinks, {"causal": True, **options})
        if step.rows is not None:
            full = out.new_zeros((batch * columns, heads, out.shape[-1]))
            full[step.rows] = out
            out = full
        return out.view(batch, columns, heads, -1)

    def _append(self, pending: Pending, visible: Visible, columns: int) -> None:
        k, layer = pending.k, pending.layer
        if layer == next(iter(self._windows)):
            self._begin(k, visible, columns)
        step = self._step
        if step is None or layer not in step.missing or columns != step.q_length:
            raise InvalidArgumentError(
                f"layer {layer} is updated out of turn: a call of the model updates every layer once, in order; after "
                "one that failed, crop() its tokens or reset() the cache."
            )
        self._group_of[layer].append(layer, _rows(k, step), _rows(pending.v, step), step)
        step.missing.discard(layer)
        pending.is_appended = True
        self._seen.columns = self._next  # from the first layer's append on

    def _begin(self, k: Tensor, visible: Visible, columns: int) -> None:
        """Deals what all layers need for the tokens of a call; nothing is written but tables."""
        if self._step is not None and self._step.missing:
            raise InvalidArgumentError(f"{self._unfinished()}: crop() its tokens or reset() the cache.")
        batch = k.shape[0]
        if self._seen.columns.count == 0 and self._seen.columns.batch != batch:
            self._make_groups(batch, str(k.device))
        before = self._seen.columns
        if before.batch != batch:
            raise InvalidArgumentError(
                f"the call has {batch} requests, but the cache holds {before.batch}: reset() it, or make another one."
            )
        if columns > self._max_step:
            raise OutOfRangeError(
                f"the call has {columns} tokens for a request, but max_step is {self._max_step}: raise it, or generate "
                f"with prefill_chunk_size={self._max_step}."
            )
        check_sizes(visible, batch, before.count + columns)
        mask = visible.columns
        gaps, said = None, None
        if mask is not None:
            new, said = torch.stack([mask[:, before.count :].sum(1), mask.sum(1)]).tolist()  # waits for a device once
            gaps = None if new == [columns] * batch else gaps_of(mask[:, before.count :], before.count)
        after = before.extended(columns, gaps)
        lengths = after.lengths()
        if said is not None and said != lengths:
            raise InvalidArgumentError(
                "attention_mask says otherwise about tokens in the cache than when they came, but what is stored is "
                "seen, and what was padding is not stored: pass the same mask, longer by the new tokens."
            )
        for request, length in enumerate(lengths):
            if length > self._max_len:
                raise OutOfRangeError(
                    f"request {request} would have {length} tokens, but max_len is {self._max_len}: make a cache with "
                    "a larger max_len."
                )
        inner = after.first_with_inner_gap() if len(self._groups) > 1 or self._groups[0].window else None
        if inner is not None:
            raise InvalidArgumentError(
                f"attention_mask leaves out tokens of request {inner} between others, but a sliding window counts "
                "columns: pad on the left only."
            )
        counts = [new - old for new, old in zip(lengths, before.lengths())]
        rows = cu_q = None
        if gaps is not None and mask is not None:
            rows = mask[:, before.count :].reshape(-1).nonzero()[:, 0]
        if Step.needs_cu(columns, gaps is not None):
            cu_q = torch.tensor([0, *counts]).cumsum(0).to(k.device, torch.int32)
        for group in self._groups:
            group.evict(self._rollback)
            group.cache.reserve(counts)
        self._step = Step(columns, counts, rows, cu_q, before, set(self._windows))
        self._next = after

    def _unfinished(self) -> str:
        assert self._step is not None
        missing = ", ".join(map(str, sorted(self._step.missing)))
        return f"the last call of the model ended before layers {missing} had the tokens"

    def reset(self) -> None:
        """Drops all tokens; pages stay allocated."""
        for group in self._groups:
            group.truncate([0] * group.cache.batch)
        self._seen.columns = Columns.none(self._seen.columns.batch)
        self._step = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last columns, as a rejected draft.

        Args:
            tokens_to_remove: 0, or the number of columns, negated.

        Raises:
            OutOfRangeError: more than there are; tokens whose sliding window was returned, see ``rollback``.
            InvalidArgumentError: a positive number; part of a call that failed.
        """
        columns = self._seen.columns
        if tokens_to_remove > 0:
            raise InvalidArgumentError(
                f"tokens_to_remove is {tokens_to_remove}, but must be 0 or negative: pass the negated number of tokens."
            )
        count = columns.count + tokens_to_remove
        if count < 0:
            raise OutOfRangeError(
                f"tokens_to_remove is {tokens_to_remove}, but the cache has {columns.count} tokens: remove at most all."
            )
        if self._step is not None and self._step.missing and count > self._step.before.count:
            raise InvalidArgumentError(
                f"{self._unfinished()}: remove {self._step.before.count - columns.count}, or reset() the cache."
            )
        kept = columns.cropped(count)
        lengths = kept.lengths()
        for group in self._groups:
            for request, (length, gone) in enumerate(zip(lengths, group.gone)):
                if group.window is not None and length and gone > max(0, length - (group.window - 1)):
                    raise OutOfRangeError(
                        f"tokens_to_remove is {tokens_to_remove}, but request {request} would need keys that a sliding "
                        f"window of {group.window} has passed: make the cache with a larger rollback than "
                        f"{self._rollback}."
                    )
        for group in self._groups:
            group.truncate(lengths)
        self._seen.columns = kept
        self._step = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Moves beams: request ``i`` is then what ``beam_idx[i]`` was. Costs table entries, no pages."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Gives each request ``repeats`` places, which share its pages. The pages stay as many as there are."""
        self._select([i for i in range(self._seen.columns.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these requests: int [n], or bool [batch]."""
        self._select((indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist())

    def _select(self, index: list[int]) -> None:
        batch = self._seen.columns.batch
        if self._seen.columns.count == 0:
            return
        for i in index:
            if not 0 <= i < batch:
                raise OutOfRangeError(f"an index is {i}, but the cache has {batch} requests: use 0 to {batch - 1}.")
        if self._step is not None and self._step.missing:
            raise InvalidArgumentError(f"{self._unfinished()}: crop() its tokens or reset() the cache.")
        for group in self._groups:
            group.select(index)
        self._seen.columns = self._seen.columns.selected(index)
        self._step = None

    def activate_past_recording(self) -> None:
        """Nothing: the cache always keeps ``rollback`` tokens behind a window."""

    def check_status(self) -> None:
        """Raises an error for what a GPU found in a call before; waits for it. See :class:`halftone.PagedKVCache`."""
        for group in self._groups:
            group.cache.check_status()

    def __repr__(self) -> str:
        return f"HalftoneCache({', '.join(map(repr, self.groups))})"


def _rows(x: Tensor, step: Step) -> Tensor:
    """[batch, heads, columns, dims] as the [tokens, heads, dims] of a step."""
    rows = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return rows if step.rows is None else rows[step.rows]


def _on(scale: Any, device: str) -> Tensor | None:
    """A layer's scale beside its pages."""
    return None if scale is None else torch.as_tensor(scale, dtype=torch.float32, device=device).contiguous()


def _with_channels(spec: KVCacheSpec, scales: dict[str, dict[int, Any]], layer: int) -> KVCacheSpec:
    """``spec`` with the treatment of K's channels that ``layer`` has values for."""
    names = {"offset_k": "k_offset", "scale_k": "k_channel_scale"}
    flags = {flag: True for flag, name in names.items() if scales[name][layer] is not None}
    return KVCacheSpec(**{**json.loads(spec.key), **flags}) if flags else spec


def _scales_of_recipe(recipe: Recipe, layers: list[int], given: Sequence[Any]) -> tuple[Any, ...]:
    """Each kind of scale, a list of the layers'. Raises InvalidArgumentError."""
    for name, values in zip(_SCALES, given):
        if values is not None:
            raise InvalidArgumentError(f"{name} is given beside a recipe, which has its own: leave it out.")
    own, place = recipe.scales("torch"), {layer: i for i, layer in enumerate(recipe.layers)}
    return tuple([own[name][place[layer]] for layer in layers] for name in _SCALES)


def _scales_of_layers(given: Sequence[Any], layers: list[int]) -> dict[str, dict[int, Any]]:
    """Each kind of scale, by layer. Raises InvalidArgumentError."""
    made = {}
    for name, values in zip(_SCALES, given):
        if values is None:
            values = [None] * len(layers)
        if not isinstance(values, (list, tuple)) or len(values) != len(layers):
            raise InvalidArgumentError(
                f"{name} must be a list with the scales of each of the {len(layers)} layers with a cache: pass one, "
                "with None for a layer whose format has none."
            )
        made[name] = dict(zip(layers, values))
    return made
