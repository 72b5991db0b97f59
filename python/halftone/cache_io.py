"""Caches in safetensors files, the same files that ``halftone quantize`` writes and ``halftone dequantize`` reads.

Each request is one layer of such a file: ``<prefix>.<i>.pages`` uint8 [pages, page_bytes] in the native layout,
``<prefix>.<i>.lengths`` int32 [1], static scales ``k_scale``, ``k_min``, ``v_scale``, ``v_min`` f32 where the formats
have them. The metadata holds ``format = halftone-cache-1`` and ``<prefix>.<i>.spec``, the spec as a JSON object. Needs
NumPy, and reading the package ``safetensors``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
from typing import Any

from . import _arrays, _check
from ._files import AtomicFile
from .cache import PagedKVCache, check_cache
from .errors import CorruptFileError, InvalidArgumentError, OutOfRangeError, UnsupportedError
from .spec import KVCacheSpec

_FORMAT = "halftone-cache-1"
_SCALES = ("k_scale", "k_min", "v_scale", "v_min")


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, but reading and writing caches needs it: "
            "pip install 'halftone-attention[safetensors]'."
        ) from None


def _to_numpy(cache: PagedKVCache, name: str, dtype: str) -> Any:
    """An array of ``cache`` on the host. Raises InvalidArgumentError for another dtype (of a wrapped cache)."""
    x = getattr(cache, name)
    if _arrays.dtype_of(x) != dtype:
        raise InvalidArgumentError(f"cache.{name} is {_arrays.dtype_of(x)}, but must be {dtype}: wrap such an array.")
    framework, numpy = _arrays.framework_of(x), _import("numpy")
    if framework == "torch":
        return x.detach().resolve_neg().cpu().numpy()
    return x.get() if framework == "cupy" else numpy.from_dlpack(x) if framework == "dlpack" else numpy.asarray(x)


def _spec_from_json(text: str, where: str) -> KVCacheSpec:
    try:
        fields = json.loads(text)
        return KVCacheSpec(**fields)
    except (ValueError, TypeError, NotImplementedError, RecursionError) as error:
        raise CorruptFileError(f"{where}: its cache spec is not usable ({error}): write the file again.") from None


def _path(path: Any) -> str:
    try:
        name = os.fsdecode(path)
    except TypeError:
        name = ""
    if not name:
        raise InvalidArgumentError(f"path is {path!r}, but must name a file: pass a str or a path.")
    return _check.text(name, "path")


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
        path: of the file to write. An existing one is replaced at the end and keeps its mode; a link is followed.
        prefix: of the tensors' names.

    Raises:
        OutOfRangeError: a length or a live entry of the block table beyond the cache (a wrapped one).
        InvalidArgumentError: a cache of no requests, of which no file could say the spec; ``path`` is no path.
        UnsupportedError: NumPy is not installed. OSError: the file cannot be written.
    """
    numpy = _import("numpy")
    check_cache(cache)
    target = _path(path)
    _check.text(prefix, "prefix")
    if cache.batch == 0:
        raise InvalidArgumentError("cache has batch 0, but a file needs at least one request: save one that has some.")
    spec = cache.spec
    pages, table = _to_numpy(cache, "pages", "uint8"), _to_numpy(cache, "block_table", "int32")
    if pages.shape[1] != spec.page_bytes:
        raise InvalidArgumentError(
            f"cache.pages has rows of {pages.shape[1]} bytes, but pages of its spec have {spec.page_bytes}: wrap such."
        )
    scales = {name: _to_numpy(cache, name, "f32") for name in _SCALES if getattr(cache, name) is not None}
    metadata, small, live = {"format": _FORMAT}, {}, {}
    for i, length in enumerate(_to_numpy(cache, "lengths", "int32").tolist()):
        label = f"{prefix}.{i}"
        live[f"{label}.pages"] = _live_entries(table[i], i, length, spec.page_size, len(pages))
        small[f"{label}.lengths"] = numpy.array([length], numpy.int32)
        small.update({f"{label}.{name}": values for name, values in scales.items()})
        metadata[f"{label}.spec"] = spec.key
    unused = numpy.zeros((1, spec.page_bytes), numpy.uint8)  # of a request without tokens
    entries = [(name, "I32" if name.endswith("lengths") else "F32", x.shape, x.nbytes) for name, x in small.items()]
    for name, rows in live.items():
        shape = (max(len(rows), 1), spec.page_bytes)
        entries.append((name, "U8", shape, shape[0] * shape[1]))
    with AtomicFile(target) as file:
        file.write(_header(entries, metadata))
        for values in small.values():
            file.write(values.tobytes())
        for rows in live.values():  # one request at a time, so that a large cache is not held twice
            file.write((pages[rows] if len(rows) else unused).reshape(-1))


def _header(entries: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file whose tensors (name, dtype, shape, bytes) follow without holes."""
    fields: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size in entries:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def load(
    path: Any,
    *,
    max_len: int | None = None,
    num_pages: int | None = None,
    framework: str = "numpy",
    device: str = "cpu",
) -> PagedKVCache:
    """Reads a file of :func:`save` or of ``halftone quantize`` into a new cache, one request for each layer in it.

    As it stands, the cache has the pages that were saved and no others, so that a request grows only within its last
    page: say ``max_len`` or ``num_pages`` to append to it.

    Args:
        path: of the file.
        max_len: most tokens of one request; None means as many as fit into the pages of the longest one.
        num_pages: pages shared by all requests; None means as many as were saved or, with ``max_len``, enough for
            every request at that length.
        framework, device: where the cache's arrays are to live.

    Raises:
        CorruptFileError: the file breaks its format or contradicts itself, or a static scale is no usable number.
        InvalidArgumentError: it holds no packed cache, or layers of different geometry; ``path`` is no path.
        OutOfRangeError: a request is longer than ``max_len``.
        ResourceExhaustedError: ``num_pages`` is less than was saved, or the pages do not fit into memory.
        UnsupportedError: ``safetensors`` is not installed. OSError: the file cannot be read.
    """
    _import("numpy")
    library = _import("safetensors")
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
    return _assemble(name, layers, max_len, num_pages, framework, device)


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
    try:  # the library checks scales that it can read: those of a cache on the CPU
        PagedKVCache(0, 0, spec=spec, **{s: layer[s] for s in _SCALES if s in layer}).dequantize()
    except InvalidArgumentError as error:
        raise CorruptFileError(f"file {name!r}, layer {label!r}: {error}") from None
    return layer


def _assemble(
    name: str,
    layers: list[dict[str, Any]],
    max_len: int | None,
    num_pages: int | None,
    framework: str,
    device: str,
) -> PagedKVCache:
    import numpy

    first = layers[0]
    for layer in layers[1:]:
        same_scales = all(numpy.array_equal(layer.get(s, 0), first.get(s, 0)) for s in _SCALES)
        if layer["spec"] != first["spec"] or not same_scales:
            raise InvalidArgumentError(
                f"file {name!r} holds layers of different geometry or static scales: load them one file at a time."
            )
    lengths = [layer["length"] for layer in layers]
    page_size = first["spec"].page_size
    if max_len is None:
        max_len = -(-max(*lengths, 1) // page_size) * page_size
        if num_pages is None:
            num_pages = sum(-(-length // page_size) for length in lengths)
    scales = {s: _arrays.make(framework, first[s], "f32", device) for s in _SCALES if s in first}
    cache = PagedKVCache(
        len(layers), max_len, spec=first["spec"], num_pages=num_pages, framework=framework, device=device, **scales
    )
    pool = cache._owned("load()")
    cache.reserve(lengths)
    for own, layer in zip(pool.pages, layers):
        for index, page in zip(own, layer["pages"]):
            cache.pages[index] = _arrays.make(framework, page, "uint8", device)
    pool.lengths = lengths
    _arrays.assign(cache.lengths, pool.lengths)
    return cache
