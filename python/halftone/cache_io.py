"""Caches in safetensors files, the same files that ``halftone quantize`` writes and ``halftone dequantize`` reads.

Each request is one layer of such a file: ``<prefix>.<i>.pages`` uint8 [pages, page_bytes] in the native layout,
``<prefix>.<i>.lengths`` int32 [1], static scales ``k_scale``, ``k_min``, ``v_scale``, ``v_min`` f32 where the formats
have them, ``k_offset`` and ``k_channel_scale`` f32 [kv_heads, head_dim] where the spec has them. The metadata holds ``format = halftone-cache-1`` and ``<prefix>.<i>.spec``, the spec as a JSON object. Needs
NumPy, and reading the package ``safetensors``.
"""

from __future__ import annotations

from typing import Any

from .cache import PagedKVCache, check_cache


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
    check_cache(cache).to_safetensors(path, prefix)


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
    return PagedKVCache.from_safetensors(path, max_len=max_len, num_pages=num_pages, framework=framework, device=device)
