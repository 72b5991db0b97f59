"""How a cache becomes a safetensors file and a file a cache. ``halftone.cache_io`` has the documented functions."""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
from typing import Any

from . import _arrays, _check
from ._files import AtomicFile
from .errors import CorruptFileError, InvalidArgumentError, OutOfRangeError, UnsupportedError
from .spec import TENSORS, KVCacheSpec

_FORMAT = "halftone-cache-1"


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, but reading and writing caches needs it: "
            "pip install 'halftone-attention[safetensors]'."
        ) from None


def _to_numpy(cache: Any, name: str, dtype: str) -> Any:
    """An array of ``cache`` on the host. Raises InvalidArgumentError for another dtype (of a wrapped cache)."""
    x = getattr(cache, name)
    if _arrays.dtype_of(x) != dtype:
        raise InvalidArgumentError(f"cache.{name} is {_arrays.dtype_of(x)}, but must be {dtype}: wrap such an array.")
    return _arrays.to_numpy(x)


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


def save(cache: Any, path: Any, prefix: str) -> None:
    """Writes the live pages of every request of ``cache``, a PagedKVCache."""
    numpy = _import("numpy")
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
    scales = {name: _to_numpy(cache, name, "f32") for name in TENSORS if getattr(cache, name) is not None}
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


def load(cls: Any, path: Any, max_len: int | None, num_pages: int | None, framework: str, device: str) -> Any:
    """Reads a file into a new cache of ``cls``, which is PagedKVCache: it imports this module, not the other way."""
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
            layers = [_read_layer(cls, file, name, label, metadata[f"{label}.spec"]) for label in labels]
    except library.SafetensorError as error:
        raise CorruptFileError(f"file {name!r} is not a valid safetensors file ({error}): write it again.") from None
    if not layers:
        raise CorruptFileError(f"file {name!r}: its metadata names no layer: write it again.")
    return _assemble(cls, name, layers, max_len, num_pages, framework, device)


def _natural(label: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", label) if part]


def _read_layer(cls: Any, file: Any, name: str, label: str, spec_text: str) -> dict[str, Any]:
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
    for part, has in (("k_offset", spec.offset_k), ("k_channel_scale", spec.scale_k)):
        if has:
            layer[part] = read(part, "float32", (spec.kv_heads, spec.head_dim))
    try:  # the library checks scales that it can read: those of a cache on the CPU
        cls(0, 0, spec=spec, **{s: layer[s] for s in TENSORS if s in layer}).dequantize()
    except InvalidArgumentError as error:
        raise CorruptFileError(f"file {name!r}, layer {label!r}: {error}") from None
    return layer


def _assemble(
    cls: Any,
    name: str,
    layers: list[dict[str, Any]],
    max_len: int | None,
    num_pages: int | None,
    framework: str,
    device: str,
) -> Any:
    numpy, first = _import("numpy"), layers[0]
    for layer in layers[1:]:
        same_scales = all(numpy.array_equal(layer.get(s, 0), first.get(s, 0)) for s in TENSORS)
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
    scales = {s: _arrays.make(framework, first[s], "f32", device) for s in TENSORS if s in first}
    cache = cls(
        len(layers), max_len, spec=first["spec"], num_pages=num_pages, framework=framework, device=device, **scales
    )
    cache.reserve(lengths)
    for own, layer in zip(cache._sequences.pool.rows(), layers):
        for index, page in zip(own, layer["pages"]):
            cache.pages[index] = _arrays.make(framework, page, "uint8", device)
    cache.advance(lengths)
    _arrays.assign(cache.lengths, lengths)
    return cache
