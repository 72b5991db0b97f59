"""The file that ``halftone recipe --output`` writes: how each layer of a model stores its keys and values."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any, Mapping

from . import _arrays
from .errors import Error, InvalidArgumentError
from .spec import TENSORS, KVCacheSpec

_VERSION = 1
_FIELDS = {
    "k_format": str, "rotate_k": bool, "v_format": str, "rotate_v": bool, "kv_heads": int, "head_dim": int,
    "v_head_dim": int,
}  # fmt: skip
_CHANNELS = {"k_offset": "offset_k", "k_channel_scale": "scale_k"}  # written where they are true
_TEXTS = {str: "a text", bool: "true or false", int: "an integer"}
_ABOUT = ("layer", "bytes_per_token", "error")


@dataclass(frozen=True)
class RecipeLayer:
    """A layer of a :class:`Recipe`.

    Attributes:
        spec: with pages of 64 tokens; :meth:`Recipe.specs` gives others.
        scales: values of "k_scale", "k_min", "v_scale", "v_min", "k_offset" and "k_channel_scale", those that it has;
            of the last two head after head.
        error: relative output error, measured when the recipe was made.
    """

    spec: KVCacheSpec
    scales: Mapping[str, tuple[float, ...]]
    error: float


@dataclass(frozen=True)
class Recipe:
    """How each layer of a model stores its keys and values, of :func:`load_recipe`.

    ``LayeredKVCache(batch, max_len, layers=recipe.specs(), **recipe.scales())`` is a cache for all of them, and
    ``halftone.transformers.HalftoneCache`` takes a recipe as its ``formats``.

    Attributes:
        path: of the file.
        layers: by their numbers in the model, in order.
    """

    path: str
    layers: Mapping[int, RecipeLayer]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers, K and V, scales included."""
        return sum(layer.spec.bytes_per_token for layer in self.layers.values())

    @property
    def error(self) -> float:
        """Root mean square of the layers' relative output errors, measured when the recipe was made."""
        return math.sqrt(sum(layer.error**2 for layer in self.layers.values()) / len(self.layers))

    def specs(self, page_size: int = 64) -> list[KVCacheSpec]:
        """The spec of each layer, in order.

        Args:
            page_size: tokens per page: 16, 32, 64, 128 or 256.
        """
        specs = []
        for layer in self.layers.values():
            fields = {name: getattr(layer.spec, name) for name in (*_FIELDS, *_CHANNELS.values())}
            specs.append(KVCacheSpec(**fields, page_size=page_size))
        return specs

    def scales(self, framework: str = "numpy", device: str = "cpu") -> dict[str, list[Any]]:
        """What lies beside the pages, as the arguments of :class:`LayeredKVCache`; None for a layer without.

        Args:
            framework: "numpy", "torch", "jax" or "cupy", of the arrays.
            device: "cpu" or "cuda:<index>".
        """

        def array(layer: RecipeLayer, name: str) -> Any:
            if name not in layer.scales:
                return None
            values: list[Any] = list(layer.scales[name])
            if name in _CHANNELS:
                dim = layer.spec.head_dim
                values = [values[i : i + dim] for i in range(0, len(values), dim)]
            return _arrays.make(framework, values, "f32", device)

        return {name: [array(layer, name) for layer in self.layers.values()] for name in TENSORS}


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads a file of ``halftone recipe --output``; docs/recipe.md describes it.

    Args:
        path: of the file.

    Raises:
        InvalidArgumentError: it is no recipe, or one of another version; the sentence says what is wrong.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        data = file.read()

    def refuse(sentence: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"recipe {name!r}: {sentence}: make the recipe again.")

    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "halftone_recipe" not in content:
        raise InvalidArgumentError(
            f"recipe {name!r}: it is no JSON object with a halftone_recipe: name a file that halftone recipe --output "
            "wrote."
        )
    if content["halftone_recipe"] != _VERSION:
        raise refuse(f"halftone_recipe is {content['halftone_recipe']!r}, but this halftone reads version {_VERSION}")
    rows = content.get("layers")
    if not isinstance(rows, list) or not rows:
        raise refuse("layers is no list with an entry")
    layers: dict[int, RecipeLayer] = {}
    for index, row in enumerate(rows):
        try:
            number, layer = _layer(row)
        except Error as error:
            raise InvalidArgumentError(f"recipe {name!r}: layers[{index}]: {error}") from None
        if number in layers:
            raise refuse(f"layers[{index}] is layer {number} once more")
        layers[number] = layer
    return Recipe(name, dict(sorted(layers.items())))


def _layer(row: Any) -> tuple[int, RecipeLayer]:
    """The number of a layer, and what a recipe says of it. Raises Error."""
    if not isinstance(row, dict):
        raise InvalidArgumentError("it is no object: make the recipe again.")
    for key in row:
        if key not in (*_FIELDS, *_CHANNELS.values(), *TENSORS, *_ABOUT):
            raise InvalidArgumentError(f"it has {key!r}, which this halftone does not know: use the version that made it.")
    row = {**dict.fromkeys(_CHANNELS.values(), False), **row}
    for key, kind in (("layer", int), *_FIELDS.items(), *dict.fromkeys(_CHANNELS.values(), bool).items()):
        value = row.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            found = repr(value) if key in row else "missing"
            raise InvalidArgumentError(f"{key} is {found}, but must be {_TEXTS[kind]}: make the recipe again.")
    if row["layer"] < 0:
        raise InvalidArgumentError(f"layer is {row['layer']}, but must be 0 or more: make the recipe again.")
    spec = KVCacheSpec(**{key: row[key] for key in (*_FIELDS, *_CHANNELS.values())})
    scales = {}
    counts = [(name, spec.kv_heads * spec.head_dim if row[flag] else 0) for name, flag in _CHANNELS.items()]
    for part, form in (("k", spec.k_format), ("v", spec.v_format)):
        count = 0 if not form.static_scale else 1 if form.granularity == "tensor" else spec.kv_heads
        counts += [(f"{part}_scale", count), (f"{part}_min", count if form.asymmetric else 0)]
    for name, wanted in counts:
        values = row.get(name, [])
        numbers = isinstance(values, list) and all(type(x) in (int, float) for x in values)
        if not numbers or len(values) != wanted:
            raise InvalidArgumentError(
                f"{name} must be a list of {wanted} numbers, as its format has: make the recipe again."
            )
        if wanted:
            scales[name] = tuple(map(float, values))
    error = row.get("error", math.nan)
    return row["layer"], RecipeLayer(spec, scales, float(error) if type(error) in (int, float) else math.nan)
