"""How tokens get into a cache: of one layer, or of several that share their lengths."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Callable, Sequence
from weakref import WeakValueDictionary

from . import _arrays, _check, _native
from ._sequences import SequenceOperations, Sequences, Step
from .errors import InvalidArgumentError

# What writes new tokens in append's stead: given k, v, slots, pairing, cos, sin and positions as the native library
# takes them, and whether the lengths advance.
Write = Callable[[tuple[Any, ...], bool], None]

_PAIRINGS = ("none", "half", "interleaved")
_advancing: WeakValueDictionary[Any, Appending] = WeakValueDictionary()  # whose append() advances lengths, by place


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) that append applies to K before it quantises.

    Args:
        cos: f32 [max_position, rotary_dim / 2]; dims from rotary_dim on pass through.
        sin: f32, as ``cos``.
        positions: int32 [tokens], the row of ``cos`` and ``sin`` for each appended token.
        pairing: "half" pairs dims (i, i + rotary_dim/2) as GPT-NeoX and most Llama checkpoints do; "interleaved" pairs
            (2i, 2i + 1) as GPT-J does.
    """

    cos: Any
    sin: Any
    positions: Any
    pairing: str = "half"


class Appending(SequenceOperations):
    """The half of :class:`PagedKVCache` that writes."""

    pages: Any
    lengths: Any
    framework: str
    device: str
    _native: Any
    _native_status: Any
    _batch: int
    _single: Any  # int32 [batch + 1]: cu_seqlens of one token for every request
    _native_single: Any
    _is_advancing: bool  # known to be the one cache whose append() advances its lengths
    _layer: int | None  # of several
    _native_starts: Any  # the cache at the lengths before the present step, of a layer

    def _claim_lengths(self) -> None:
        """Makes this cache the one that advances its lengths. Raises InvalidArgumentError if another layer's does."""
        if self._batch == 0:
            return
        other = _advancing.setdefault(_arrays.place_of(self.lengths), self)
        if other is not self and _arrays.place_of(other.pages) != _arrays.place_of(self.pages):
            raise InvalidArgumentError(
                "lengths is shared with a cache of other pages whose append() advances it, but a step must advance it "
                "once: wrap these pages with lengths of their own, make a LayeredKVCache, or use append_slots()."
            )
        self._is_advancing = other is self

    def _release_lengths(self) -> None:
        """Lets another cache claim the lengths, before this one goes on with others."""
        place = _arrays.place_of(self.lengths)
        if _advancing.get(place) is self:
            del _advancing[place]

    def append(
        self,
        k: Any,
        v: Any = None,
        counts: Sequence[int] | None = None,
        *,
        cu_seqlens: Any = None,
        rope: Rope | None = None,
        stream: int | None = None,
    ) -> None:
        """Quantises new tokens into the pages and advances the lengths; RoPE and rotation are fused in.

        Every call advances: once per step. Caches of several layers that were wrapped with one array of lengths would
        count each token once for every layer and put it into the wrong slot; this is refused where it can be seen.
        Use a :class:`LayeredKVCache`, wrap each layer with lengths of its own, or use :meth:`append_slots`.

        Pages are dealt, and shared ones that would be written copied, before anything is written, so a failure leaves
        lengths and tokens as they were. Once :meth:`reserve` has dealt the pages, nothing here touches the host's
        memory: the call can be captured.

        Args:
            k: f32, f16 or bf16 [tokens, kv_heads, head_dim], request after request.
            v: the same dtype [tokens, kv_heads, v_head_dim]; None for a latent cache, whose V is a part of K.
            counts: tokens of each request; None means one each, or all of them with a single request. Layers after
                the first take those of layer 0.
            cu_seqlens: instead of ``counts``, int32 [batch + 1] beside the pages: their running sum from 0. On a GPU
                it is read (and waited for) only when some request has no room for as many tokens as ``k`` has, which
                :meth:`reserve` gives; the host then learns the new lengths when it needs them.
            rope: applied to K first; of a latent cache to its last rope_dim dims.
            stream: a cudaStream_t; None means the framework's current stream.

        Raises:
            OutOfRangeError: a request would exceed ``max_len``.
            ResourceExhaustedError: no page is free.
            InvalidArgumentError: shapes or dtypes; lengths that another layer's cache advances; a layer whose turn it
                is not; on the CPU also non-finite input (CUDA sets ``status``).
        """
        if not self._is_advancing:
            self._claim_lengths()
        self._add(k, v, counts, cu_seqlens, rope, stream)

    def _add(
        self, k: Any, v: Any, counts: Sequence[int] | None, cu_seqlens: Any, rope: Rope | None, stream: int | None,
        each: int | None = None, write: Write | None = None, slots: Any = None,
    ) -> None:  # fmt: skip
        """:meth:`append` of a cache that may advance its lengths. ``each``: tokens of every request."""
        tokens = int(_check.shape(k, "k", 3, "tokens, kv_heads, head_dim")[0])
        sequences, batch = self._sequences, self._batch
        stream = _arrays.stream_of(self.pages, stream)
        how = (rope, stream, slots, write)
        if self._layer is not None and sequences is not None:
            if self._layer:
                self._follow(sequences, k, v, tokens, counts, *how)
                return
            sequences.check_complete("append() to layer 0")
        if cu_seqlens is not None:
            if counts is not None:
                raise InvalidArgumentError("cu_seqlens is given beside counts, but one says where tokens go: drop one.")
            self._append_ragged(k, v, tokens, cu_seqlens, *how)
            return
        if counts is None:
            if each is None:
                each = tokens if batch == 1 else 1
            if each * batch != tokens:
                raise InvalidArgumentError(
                    f"k has {tokens} tokens for {batch} requests, but counts is None: say how many each one gets."
                )
            if sequences is not None and sequences.has_room(each):  # every step of decode but the few that need a page
                cu = self._cumulative(each, stream)
                step = None if self._layer is None else self._step(tokens, each, cu)
                try:
                    self._append(k, v, cu, *how)
                    sequences.pool.step(each)
                except KeyboardInterrupt:
                    sequences.recover(step)
                    raise
                sequences.step = step
                return
            counts = [each] * batch
        else:
            counts = _check.counts(counts, "counts")
        if sum(counts) != tokens:
            raise InvalidArgumentError(f"counts add up to {sum(counts)}, but k has {tokens} tokens: make them agree.")
        self._append_counted(k, v, tokens, counts, None, *how)

    def _append_counted(
        self, k: Any, v: Any, tokens: int, counts: list[int], cu: Any, rope: Rope | None, stream: int | None,
        slots: Any, write: Write | None,
    ) -> None:  # fmt: skip
        """``cu`` is the native running sum of ``counts``, if there is one."""
        sequences = self._sequences
        if sequences is not None:
            sequences.reserve(counts, stream)
        if cu is None:
            cu = self._cumulative(counts, stream)
        if sequences is None:
            self._append(k, v, cu, rope, stream, slots, write)
            return
        step = None if self._layer is None else self._step(tokens, counts, cu)
        try:
            self._append(k, v, cu, rope, stream, slots, write)
            sequences.pool.advance(counts)
        except KeyboardInterrupt:
            sequences.recover(step)
            raise
        sequences.step = step

    def _append_ragged(
        self, k: Any, v: Any, tokens: int, cu_seqlens: Any, rope: Rope | None, stream: int | None, slots: Any,
        write: Write | None,
    ) -> None:  # fmt: skip
        sequences, batch = self._sequences, self._batch
        found = _check.shape(cu_seqlens, "cu_seqlens", 1, "batch + 1")[0]
        if found != batch + 1:
            raise InvalidArgumentError(
                f"cu_seqlens has {found} entries, but must have {batch + 1} for {batch} requests: pass running sums."
            )
        cu = _arrays.native(cu_seqlens, "cu_seqlens")
        if sequences is None:
            self._append(k, v, cu, rope, stream, slots, write)
            return
        if self.device == "cpu" or not sequences.has_room(tokens):
            if _arrays.is_capturing(self.pages, stream):
                raise InvalidArgumentError(
                    f"cu_seqlens may give a request {tokens} tokens, for which not every one has pages, and the "
                    f"capture of a graph deals none: call reserve({tokens}) before it."
                )
            sums = _arrays.to_list(cu_seqlens)
            counts = [int(end) - int(begin) for begin, end in zip(sums, sums[1:])]
            if sums[0] != 0 or sums[-1] != tokens or min(counts, default=0) < 0:
                raise InvalidArgumentError(
                    f"cu_seqlens goes from {sums[0]} to {sums[-1]}, but must rise from 0 to the {tokens} tokens of k: "
                    "pass running sums."
                )
            self._append_counted(k, v, tokens, counts, cu, rope, stream, slots, write)
            return
        step = None if self._layer is None else self._step(tokens, None, cu)
        try:
            self._append(k, v, cu, rope, stream, slots, write)
        except KeyboardInterrupt:
            sequences.recover(step)
            raise
        sequences.pool.may_step(tokens)
        sequences.is_behind = True
        sequences.step = step

    def _step(self, tokens: int, counts: list[int] | int | None, cu: Any) -> Step:
        """What layer 0 is about to begin."""
        assert self._sequences is not None
        return Step(tokens, counts, cu, set(range(1, len(self._sequences.pages))))

    def _follow(
        self, sequences: Sequences, k: Any, v: Any, tokens: int, counts: Any, rope: Rope | None, stream: int | None,
        slots: Any, write: Write | None,
    ) -> None:  # fmt: skip
        """Appends the tokens that layer 0 has advanced the lengths for."""
        step, layer = sequences.step, self._layer
        if step is None or layer not in step.missing:
            raise InvalidArgumentError(
                f"append() to layer {layer} comes before layer 0 has begun a step that it lacks: append to layer 0 "
                "first, then once to each of the others."
            )
        if tokens != step.tokens:
            raise InvalidArgumentError(
                f"k has {tokens} tokens, but layer 0 began the step with {step.tokens}: append as many to each layer."
            )
        if counts is not None and step.counts is not None:
            expected = [step.counts] * self._batch if isinstance(step.counts, int) else step.counts
            if _check.counts(counts, "counts") != expected:
                raise InvalidArgumentError(
                    f"counts is {list(counts)}, but layer 0 began the step with {expected}: leave counts out."
                )
        self._append(k, v, step.cu_seqlens, rope, stream, slots, write)
        step.missing.discard(layer)

    def append_slots(
        self, k: Any, v: Any, slot_mapping: Any, *, rope: Rope | None = None, stream: int | None = None
    ) -> None:
        """Quantises tokens into given slots; lengths and block table are the caller's business.

        Args:
            k, v, rope, stream: as in :meth:`append`.
            slot_mapping: int64 [tokens], ``page * page_size + offset``; a negative entry skips its token.

        Raises:
            OutOfRangeError: a slot beyond the cache (CPU).
            InvalidArgumentError: two tokens with one slot, non-finite input (CPU), shapes or dtypes.
        """
        _check.shape(slot_mapping, "slot_mapping", 1, "tokens")
        slots = _arrays.native(slot_mapping, "slot_mapping")
        self._append(k, v, None, rope, _arrays.stream_of(self.pages, stream), slots)

    def _append(
        self, k: Any, v: Any, cu: Any, rope: Rope | None, stream: int | None, slots: Any = None,
        write: Write | None = None,
    ) -> None:  # fmt: skip
        """``cu``, ``stream`` and ``slots`` as the native library takes them. With ``cu``, the lengths advance once."""
        native, target, advance = _arrays.native, self._native, cu is not None
        pairing, cos, sin, positions = 0, None, None, None
        if rope is not None:
            if not isinstance(rope, Rope):
                raise InvalidArgumentError(f"rope is a {type(rope).__name__}, but must be a halftone.Rope: make one.")
            pairing = _PAIRINGS.index(_check.choice(rope.pairing, "rope.pairing", _PAIRINGS))
            cos, sin, positions = (native(getattr(rope, n), f"rope.{n}") for n in ("cos", "sin", "positions"))
        if self._layer is not None and advance:
            if self._layer:
                target, advance = self._native_starts, False
            else:
                self._begin_step(stream)
        tokens = native(k, "k"), native(v, "v"), slots
        if write is not None:
            write((*tokens, pairing, cos, sin, positions), advance)
            return
        _native.append(target, *tokens, cu, advance, pairing, cos, sin, positions, self._native_status, stream)

    def _begin_step(self, stream: int | None) -> None:
        """Keeps for the other layers where the tokens go that layer 0 is about to count."""
        assert self._sequences is not None
        with _arrays.on_stream(self.pages, stream):
            _arrays.overwrite(self._sequences.starts, self.lengths)

    def _cumulative(self, counts: int | Sequence[int], stream: int | None = None) -> Any:
        """The native cu_seqlens of ``counts`` tokens for every request, or for each. That of decode is made once."""
        if isinstance(counts, int):
            if counts == 1 and self._single is not None:
                return self._native_single
            counts = [counts] * self._batch
        cu = [0, *accumulate(counts)]
        is_single = cu == list(range(self._batch + 1))
        with _arrays.on_stream(self.pages, stream):
            array = _arrays.make(self.framework, cu, "int32", self.device)
            if is_single:  # kept, for calls on any stream
                _arrays.wait(array)
        native = _arrays.kept(array, "cu_seqlens")
        if is_single:
            self._single, self._native_single = array, native
        return native
