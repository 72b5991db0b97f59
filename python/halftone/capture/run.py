"""From a model and tokens to a capture file."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .. import InvalidArgumentError, ResourceExhaustedError
from .recorder import Recorder, Seen
from .writer import Entry, StreamWriter

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_CHUNK = 256


@dataclass(frozen=True)
class Summary:
    """What a capture file has.

    Attributes:
        layers: their numbers in the model.
        tokens: of each layer.
        data_bytes: of all tensors.
        options: of each layer what differs from plain causal attention with a scale of 1/sqrt(head_dim): "scaling",
            "softcap", "sliding_window".
    """

    layers: list[int]
    tokens: int
    data_bytes: int
    options: dict[int, dict[str, float]]


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    tokens: Sequence[int] | Tensor,
    path: str,
    *,
    layers: Sequence[int] | None = None,
    dtype: str | None = None,
    before_rope: bool = False,
    max_bytes: int = 1 << 30,
    chunk: int = _CHUNK,
    metadata: dict[str, str] | None = None,
) -> Summary:
    """Runs ``tokens`` through ``model`` and writes q, k and v of its layers to a safetensors file.

    The tensors are ``layers.<i>.q``, ``layers.<i>.k`` and ``layers.<i>.v``, [tokens, heads, head_dim], as they enter
    attention, after RoPE: what ``halftone eval`` reads. The file is written as the tokens go through the model, and
    gets its name when it is complete.

    Args:
        model: a decoder of transformers, on any device.
        tokens: ids of one sequence, in order.
        path: of the file to write.
        layers: their numbers, negative ones from the end; None means all.
        dtype: "f32", "f16" or "bf16"; None means the model's own, which loses nothing.
        before_rope: also write ``layers.<i>.q_before_rope`` and ``layers.<i>.k_before_rope``.
        max_bytes: of all tensors.
        chunk: tokens in one call of the model.
        metadata: texts to write into the file, beside those about the attention.

    Raises:
        InvalidArgumentError: no token, layers that do not exist, values that are not finite.
        ResourceExhaustedError: more than ``max_bytes``; the sentence says how many tokens fit.
        UnsupportedError: a model whose attention cannot be seen.
        OSError: the file cannot be written.
    """
    ids = torch.as_tensor(tokens, dtype=torch.long).reshape(1, -1)
    config = model.config.get_text_config(decoder=True)
    count = int(ids.shape[1])
    _check(ids, config, dtype, max_bytes, chunk)
    chosen = _layers(layers, config.num_hidden_layers)
    job = _Job(path, count, chosen, None if dtype is None else DTYPES[dtype], max_bytes, metadata or {})
    was_training = model.training
    model.eval()
    cache = DynamicCache(config=config)
    try:
        with job, Recorder(model, job.see, before_rope):
            for part in ids.split(chunk, dim=1):
                model(input_ids=part.to(model.device), past_key_values=cache, use_cache=True)
                job.write()
    finally:
        model.train(was_training)
    return Summary(chosen, count, job.data_bytes, job.options)


def _check(ids: Tensor, config: Any, dtype: str | None, max_bytes: int, chunk: int) -> None:
    count, vocabulary = int(ids.shape[1]), int(config.vocab_size)
    if count == 0:
        raise InvalidArgumentError("tokens is empty, but a capture has at least one: give a longer text.")
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise InvalidArgumentError(
            f"tokens has the id {wrong}, but the model has {vocabulary}: use the tokenizer of this model."
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and count > limit:
        raise InvalidArgumentError(
            f"tokens has {count} ids, but the model was made for sequences of {limit}: capture at most as many."
        )
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}: choose one.")
    for value, name in ((max_bytes, "max_bytes"), (chunk, "chunk")):
        if value < 1:
            raise InvalidArgumentError(f"{name} is {value}, but must be 1 or more: give a count.")


def _layers(layers: Sequence[int] | None, count: int) -> list[int]:
    """The layers' numbers in order. Raises InvalidArgumentError."""
    if layers is None:
        return list(range(count))
    for layer in layers:
        if not -count <= layer < count:
            raise InvalidArgumentError(
                f"layers has {layer}, but the model has {count} layers: use {-count} to {count - 1}."
            )
    if not layers:
        raise InvalidArgumentError("layers is empty, but a capture has at least one: name one, or None for all.")
    return sorted({layer % count for layer in layers})


class _Job:
    """The tensors of one call of the model, and the file that they go to.

    Attributes:
        data_bytes: of all tensors.
        options: of each layer, see :class:`Summary`.
    """

    def __init__(
        self,
        path: str,
        tokens: int,
        layers: list[int],
        dtype: torch.dtype | None,
        max_bytes: int,
        metadata: dict[str, str],
    ) -> None:
        self._path, self._tokens, self._layers, self._dtype = path, tokens, layers, dtype
        self._max_bytes, self._metadata = max_bytes, metadata
        self._seen: dict[int, Seen] = {}
        self._stack = ExitStack()
        self._writer: StreamWriter | None = None
        self.data_bytes = 0
        self.options: dict[int, dict[str, float]] = {}

    def __enter__(self) -> _Job:
        self._stack.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)

    def see(self, layer: int, seen: Seen) -> None:
        """Keeps what the attention of a chosen layer gets until :meth:`write`."""
        if layer in self._layers:
            self._seen[layer] = seen

    def write(self) -> None:
        """Writes what one call of the model has shown, the head of the file first."""
        missing = [layer for layer in self._layers if layer not in self._seen]
        if missing:
            raise InvalidArgumentError(
                f"layers has {missing[0]}, but that layer has no attention of its own: leave it out."
            )
        tensors = {layer: _named(layer, self._seen[layer]) for layer in self._layers}
        if self._writer is None:
            self._writer = self._stack.enter_context(self._begin(tensors))
        for named in tensors.values():
            for name, rows in named.items():
                if not bool(torch.isfinite(rows).all()):
                    raise InvalidArgumentError(
                        f"{name} has values that are not finite, but a capture must not: run the model in another "
                        "dtype."
                    )
                self._writer.write(name, rows)
        self._seen = {}

    def _begin(self, tensors: dict[int, dict[str, Tensor]]) -> StreamWriter:
        entries = []
        for named in tensors.values():
            for name, rows in named.items():
                shape = (self._tokens, int(rows.shape[1]), int(rows.shape[2]))
                entries.append(Entry(name, self._dtype or rows.dtype, shape))
        each = sum(entry.row_bytes for entry in entries)
        self.data_bytes = each * self._tokens
        if self.data_bytes > self._max_bytes:
            raise ResourceExhaustedError(
                f"max_bytes is {self._max_bytes}, but {self._tokens} tokens of {len(self._layers)} layers take "
                f"{self.data_bytes}: raise it, capture at most {self._max_bytes // each} tokens, or fewer layers."
            )
        for layer, seen in self._seen.items():
            plain = seen.q.shape[-1] ** -0.5
            own = {name: float(value) for name, value in seen.options.items()}
            if abs(own.get("scaling", plain) - plain) < 1e-6 * plain:
                own.pop("scaling", None)
            self.options[layer] = own
        about = {
            "layers": ",".join(map(str, self._layers)),
            "tokens": str(self._tokens),
            "mask": "causal",
            "attention": json.dumps({str(layer): own for layer, own in self.options.items()}),
        }
        return StreamWriter(self._path, entries, {**about, **self._metadata})


def _named(layer: int, seen: Seen) -> dict[str, Tensor]:
    """The tensors of a layer under their names in the file."""
    named = {f"layers.{layer}.q": seen.q, f"layers.{layer}.k": seen.k, f"layers.{layer}.v": seen.v}
    if seen.before is not None:
        named[f"layers.{layer}.q_before_rope"], named[f"layers.{layer}.k_before_rope"] = seen.before
    return named
