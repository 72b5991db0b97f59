"""A safetensors file that is written part by part, and gets its name when it is complete."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import InternalError

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: in the file.
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        shape: [tokens, heads, dims].
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


class StreamWriter:
    """A context in which rows of tensors are written in any order of tensors, each from its first row on.

    The data lies in a temporary file of the same folder until the context ends; an exception removes it. Holds no more
    than the rows of one call in memory.

    Args:
        path: of the safetensors file.
        entries: all its tensors.
        metadata: texts about it.

    Raises:
        OSError: the file cannot be written. InternalError: fewer rows than were announced.
    """

    def __init__(self, path: str, entries: list[Entry], metadata: dict[str, str]) -> None:
        self._path = os.path.realpath(path)
        self._entries = {entry.name: entry for entry in entries}
        header: dict[str, object] = {"__metadata__": metadata}
        self._offsets: dict[str, int] = {}
        end = 0
        for entry in entries:
            size = entry.shape[0] * entry.row_bytes
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [end, end + size],
            }
            self._offsets[entry.name] = end
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._rows = dict.fromkeys(self._entries, 0)
        self._file: Any = None

    def __enter__(self) -> StreamWriter:
        folder, name = os.path.split(self._path)
        self._file = tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False)  # noqa: SIM115
        self._file.write(self._head)
        return self

    def write(self, name: str, rows: Tensor) -> None:
        """Writes the next rows [n, heads, dims] of a tensor, converted to its dtype."""
        entry = self._entries[name]
        assert self._file is not None
        self._file.seek(len(self._head) + self._offsets[name] + self._rows[name] * entry.row_bytes)
        values = rows.detach().to(entry.dtype).contiguous().cpu()
        self._file.write(values.view(torch.uint8).numpy().data)
        self._rows[name] += rows.shape[0]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._file is not None
        try:
            if kind is None:
                short = [name for name, entry in self._entries.items() if self._rows[name] != entry.shape[0]]
                if short:
                    raise InternalError(
                        f"{short[0]} has {self._rows[short[0]]} rows of {self._entries[short[0]].shape}."
                    )
                self._file.flush()
                os.fsync(self._file.fileno())
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(self._file.name, 0o666 & ~umask)
                os.replace(self._file.name, self._path)
        finally:
            self._file.close()
            if os.path.exists(self._file.name) and self._file.name != self._path:
                os.unlink(self._file.name)
