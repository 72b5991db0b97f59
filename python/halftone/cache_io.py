"""Caches in safetensors files, the same files that ``halftone quantize`` writes and ``halftone dequantize`` reads.

Each request is one layer of such a file: ``<prefix>.<i>.pages`` uint8 [pages, page_bytes] in the native layout,
``<prefix>.<i>.lengths`` int32 [1], static scales ``k_scale``, ``k_min``, ``v_scale``, ``v_min`` f32 where the formats
have them. The metadata holds ``format = halftone-cache-1`` and ``<prefix>.<i>.spec``, the spec as a JSON object. Needs
the package ``safetensors``.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from . import _arrays
from .cache import PagedKVCache, check_cache
from .errors import CorruptFileError, Error, InvalidArgumentError, OutOfRangeError, UnsupportedError
from .spec import KVCacheSpec

_FORMAT = "halftone-cache-1"
_SCALES = ("k_scale", "k_min", "v_scale", "v_min")


def _safetensors() -> Any:
    try:
        import numpy  # noqa: F401
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, but reading and writing caches needs it: "
            "pip install 'halftone-attention[safetensors]'."
        ) from None
    return safetensors


def _to_numpy(x: Any) -> Any:
    import numpy

    if _arrays.framework_of(x) == "torch":
        return x.detach().cpu().numpy()
    return x.get() if _arrays.framework_of(x) == "cupy" else numpy.asarray(x)


def _spec_from_json(text: str, where: str) -> KVCacheSpec:
    try:
        fields = json.loads(text)
        return KVCacheSpec(**fields)
    except (ValueError, TypeError, NotImplementedError, RecursionError) as error:
        raise CorruptFileError(f"{where}: its cache spec is not usable ({error}): write the file again.") from None


def _path(path: Any) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:
        raise InvalidArgumentError(f"path is {path!r}, but must name a file: pass a str or a path.") from None


def _live_entries(row: Any, request: int, length: int, page_size: int, num_pages: int) -> Any:
    """The entries of a row of the block table that ``length`` tokens use, checked as dequantize() checks them."""
    if length < 0:
        raise OutOfRangeError(f"cache.lengths[{request}] is {length}, but must be 0 or more: pass the live tokens.")
    if length > len(row) * page_size:
        raise OutOfRangeError(
            f"cache.lengths[{request}] is {length}, but the block table holds {len(row) * page_size} tokens per "
            "request: add pages to the table."
        )
    live = row[: -(-length // page_size)]
    for i, page in enumerate(live.tolist()):
        if not 0 <= page < num_pages:
            raise OutOfRangeError(
                f"cache.block_table[{request}, {i}] is {page}, but must be in [0, {num_pages}): give a page of the "
                "cache."
            )
    return live


def save(cache: PagedKVCache, path: Any, prefix: str = "request") -> None:
    """Writes the live pages of every request of ``cache`` to ``path``, whole or not at all.

    Args:
        cache: on any device.
        path: of the file to write; an existing one is replaced at the end.
        prefix: of the tensors' names.

    Raises:
        OutOfRangeError: a length or a live entry of the block table beyond the cache (a wrapped one).
        InvalidArgumentError: a cache of no requests, of which no file could say the spec; ``path`` is no path.
        UnsupportedError: ``safetensors`` is not installed. OSError: the file cannot be written.
    """
    library = _safetensors()
    import numpy

    check_cache(cache)
    target = _path(path)
    if cache.batch == 0:
        raise InvalidArgumentError("cache has batch 0, but a file needs at least one request: save one that has some.")
    spec = cache.spec
    pages, table = _to_numpy(cache.pages), _to_numpy(cache.block_table)
    tensors, metadata = {}, {"format": _FORMAT}
    for i, length in enumerate(_arrays.to_list(cache.lengths)):
        label = f"{prefix}.{i}"
        live = _live_entries(table[i], i, length, spec.page_size, len(pages))
        tensors[f"{label}.pages"] = pages[live] if length else numpy.zeros((1, spec.page_bytes), numpy.uint8)
        tensors[f"{label}.lengths"] = numpy.array([length], numpy.int32)
        for name in _SCALES:
            if getattr(cache, name) is not None:
                tensors[f"{label}.{name}"] = _to_numpy(getattr(cache, name))
        metadata[f"{label}.spec"] = spec.key
    temporary = f"{target}.{os.getpid()}.part"
    try:
        library.numpy.save_file(tensors, temporary, metadata)
        os.replace(temporary, target)
    except library.SafetensorError as error:
        raise OSError(
            f"path {target!r} cannot be written ({error}): choose a writable folder with enough space."
        ) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def load(path: Any, *, max_len: int | None = None, framework: str = "numpy", device: str = "cpu") -> PagedKVCache:
    """Reads a file of :func:`save` or of ``halftone quantize`` into a new cache, one request for each layer in it.

    Args:
        path: of the file.
        max_len: most tokens of one request; None means as many as fit into the pages of the longest one.
        framework, device: where the cache's arrays are to live.

    Raises:
        CorruptFileError: the file breaks its format or contradicts itself.
        InvalidArgumentError: it holds no packed cache, or layers of different geometry, or more than ``max_len``.
        UnsupportedError: ``safetensors`` is not installed. OSError: the file cannot be read.
    """
    library = _safetensors()
    name = _path(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"{name!r} is not a regular file: give the path of a safetensors file.")
    try:
        with library.safe_open(name, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise InvalidArgumentError(
                    f"file {name!r} is no packed cache (its metadata lacks format = {_FORMAT}): write it with save()."
                )
            labels = sorted((key[:-5] for key in metadata if key.endswith(".spec")), key=_natural)
            layers = [_read_layer(file, name, label, metadata[f"{label}.spec"]) for label in labels]
    except library.SafetensorError as error:
        raise CorruptFileError(f"file {name!r} is not a valid safetensors file ({error}): write it again.") from None
    if not layers:
        raise CorruptFileError(f"file {name!r}: its metadata names no layer: write it again.")
    return _assemble(name, layers, max_len, framework, device)


def _natural(label: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", label) if part]


def _read_layer(file: Any, name: str, label: str, spec_text: str) -> dict[str, Any]:
    spec = _spec_from_json(spec_text, f"file {name!r}, layer {label!r}")
    keys = set(file.keys())

    def read(part: str, dtype: str, shape: tuple[int | None, ...]) -> Any:
        key = f"{label}.{part}"
        if key not in keys:
            raise CorruptFileError(f"file {name!r}: tensor {key!r} is missing: write the file again.")
        tensor = file.get_tensor(key)
        fits = len(tensor.shape) == len(shape) and all(w in (None, g) for w, g in zip(shape, tensor.shape))
        if tensor.dtype.name != dtype or not fits:
            raise CorruptFileError(
                f"file {name!r}: tensor {key!r} is {tensor.dtype.name} {list(tensor.shape)}, which does not fit its "
                "spec: write the file again."
            )
        return tensor

    layer: dict[str, Any] = {"spec": spec, "pages": read("pages", "uint8", (None, spec.page_bytes))}
    layer["length"] = int(read("lengths", "int32", (1,))[0])
    capacity = layer["pages"].shape[0] * spec.page_size
    if not 0 <= layer["length"] <= capacity:
        raise CorruptFileError(
            f"file {name!r}: layer {label!r} says {layer['length']} tokens, but its pages hold at most {capacity}: "
            "write the file again."
        )
    for part, form in (("k", spec.k_format), ("v", spec.v_format)):
        if form.static_scale:
            count = spec.kv_heads if form.granularity == "head" else 1
            layer[f"{part}_scale"] = read(f"{part}_scale", "float32", (count,))
            if form.asymmetric:
                layer[f"{part}_min"] = read(f"{part}_min", "float32", (count,))
    return layer


def _assemble(
    name: str, layers: list[dict[str, Any]], max_len: int | None, framework: str, device: str
) -> PagedKVCache:
    import numpy

    first = layers[0]
    for layer in layers[1:]:
        same_scales = all(numpy.array_equal(layer.get(s, 0), first.get(s, 0)) for s in _SCALES)
        if layer["spec"] != first["spec"] or not same_scales:
            raise InvalidArgumentError(
                f"file {name!r} holds layers of different geometry or static scales: load them one file at a time."
            )
    longest = max(layer["length"] for layer in layers)
    page_size = first["spec"].page_size
    if max_len is None:
        max_len = -(-max(longest, 1) // page_size) * page_size
    scales = {s: _arrays.make(framework, first[s], "f32", device) for s in _SCALES if s in first}
    try:
        cache = PagedKVCache(len(layers), max_len, spec=first["spec"], framework=framework, device=device, **scales)
        pool = cache._owned("load()")
        cache.reserve([layer["length"] for layer in layers])
    except Error as error:
        if isinstance(error, InvalidArgumentError) and "scale" in str(error):
            raise CorruptFileError(f"file {name!r}: {error}") from None
        raise
    for own, layer in zip(pool.pages, layers):
        for index, page in zip(own, layer["pages"]):
            cache.pages[index] = _arrays.make(framework, page, "uint8", device)
    pool.lengths = [layer["length"] for layer in layers]
    _arrays.assign(cache.lengths, pool.lengths)
    return cache
