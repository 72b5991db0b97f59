"""Formats and geometry of each layer: from what the user says and the model's configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .. import InvalidArgumentError, KVCacheSpec, KVFormat, Recipe, UnsupportedError, load_recipe

_ROTATED = "+rot"
_SHARED = "DummyLayer"  # of a layer that attends to what another one appended, or that has no attention


@dataclass(frozen=True)
class Side:
    """K or V of a layer."""

    format: KVFormat
    rotate: bool


def parse_side(text: Any) -> Side:
    """``FORMAT`` or ``FORMAT+rot``. Raises InvalidArgumentError."""
    if isinstance(text, KVFormat):
        return Side(text, False)
    if not isinstance(text, str):
        raise InvalidArgumentError(
            f"formats has a {type(text).__name__}, but must have KVFormats or names, such as 'int8-head+rot': pass one."
        )
    return Side(KVFormat(text.removesuffix(_ROTATED)), text.endswith(_ROTATED))


def parse_pair(value: Any) -> tuple[Side, Side]:
    """K and V of a layer, from ``K``, ``K:V`` or a pair. Raises InvalidArgumentError."""
    if isinstance(value, str) and ":" in value:
        value = tuple(value.split(":"))
    if isinstance(value, tuple):
        if len(value) != 2:
            raise InvalidArgumentError(
                f"formats has an entry of {len(value)} parts, but a layer has K and V: pass one format, or two."
            )
        return parse_side(value[0]), parse_side(value[1])
    side = parse_side(value)
    return side, side


def windows_of(config: PreTrainedConfig) -> dict[int, int | None]:
    """The sliding window, in keys, of each layer that has keys of its own; None for one that sees all.

    Raises UnsupportedError for a layer whose state is another than keys and values.
    """
    windows: dict[int, int | None] = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows[index] = int(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            windows[index] = None
        elif type(layer).__name__ != _SHARED:
            raise UnsupportedError(
                f"layer {index} of {type(config).__name__} has a {type(layer).__name__}, but a HalftoneCache has full "
                "and sliding attention: use transformers' own cache."
            )
    if not windows:
        raise InvalidArgumentError(
            f"config is a {type(config).__name__} without layers that have a cache: pass that of a decoder."
        )
    return windows


def recipe_of(formats: Any) -> Recipe | None:
    """The recipe that ``formats`` is or names; None for anything else. Raises InvalidArgumentError, OSError."""
    if isinstance(formats, Recipe):
        return formats
    if isinstance(formats, os.PathLike) or (isinstance(formats, str) and formats.endswith(".json")):
        return load_recipe(formats)
    return None


def _of_recipe(recipe: Recipe, layers: Sequence[int], page_size: int, geometry: dict[str, Any]) -> list[KVCacheSpec]:
    """The specs of ``layers``, which must have this geometry. Raises InvalidArgumentError."""
    specs = dict(zip(recipe.layers, recipe.specs(page_size)))
    for layer in layers:
        if layer not in specs:
            raise InvalidArgumentError(
                f"recipe {recipe.path!r} has no layer {layer}, but the model has: make it from a capture of all layers."
            )
        for name, value in geometry.items():
            own = getattr(specs[layer], name)
            if value is not None and own != value:
                raise InvalidArgumentError(
                    f"recipe {recipe.path!r} has {name} {own} in layer {layer}, but the model {value}: use the recipe "
                    "of this model."
                )
    return [specs[layer] for layer in layers]


def specs_of(
    config: PreTrainedConfig,
    formats: Any,
    layers: Sequence[int],
    page_size: int,
    geometry: dict[str, int | None],
) -> list[KVCacheSpec]:
    """The spec of each layer; ``geometry`` replaces what the configuration says. Raises InvalidArgumentError."""
    heads = config.num_attention_heads
    found = {
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "v_head_dim": None,
    }
    found.update({name: value for name, value in geometry.items() if value is not None})
    if isinstance(formats, Recipe):
        found["v_head_dim"] = found["v_head_dim"] or found["head_dim"]
        count = config.num_hidden_layers
        if max(formats.layers) >= count:
            raise InvalidArgumentError(
                f"recipe {formats.path!r} has a layer {max(formats.layers)}, but the model's last is {count - 1}: use the "
                "recipe of this model."
            )
        return _of_recipe(formats, layers, page_size, found)
    if isinstance(formats, (str, KVFormat, KVCacheSpec, tuple)):
        formats = [formats] * len(layers)
    if not isinstance(formats, Sequence) or len(formats) != len(layers):
        count = len(formats) if isinstance(formats, Sequence) else type(formats).__name__
        raise InvalidArgumentError(
            f"formats is a list of {count}, but the model has {len(layers)} layers with a cache: give one for each, or one "
            "for all."
        )
    return [_spec(entry, page_size, found) for entry in formats]


def _spec(entry: Any, page_size: int, geometry: dict[str, Any]) -> KVCacheSpec:
    if isinstance(entry, KVCacheSpec):
        return entry
    k, v = parse_pair(entry)
    return KVCacheSpec(
        k_format=k.format, v_format=v.format, rotate_k=k.rotate, rotate_v=v.rotate, page_size=page_size, **geometry
    )
