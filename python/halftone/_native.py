"""Loads the native library. It depends on neither Python's nor any framework's ABI; tvm_ffi passes the arguments."""

from __future__ import annotations

import os
import pathlib

import tvm_ffi

from . import errors  # noqa: F401  registers the exception classes before the first call


def _find() -> str:
    override = os.environ.get("HALFTONE_PYTHON_LIBRARY")  # a build tree's library, for halftone's own tests
    path = pathlib.Path(override) if override else pathlib.Path(__file__).parent / "lib" / "libhalftone_python.so"
    if not path.is_file():
        raise ImportError(
            f"halftone's native library is not at {path}: install the package with `pip install .`, or set "
            "HALFTONE_PYTHON_LIBRARY to a built libhalftone_python.so."
        )
    return str(path)


_module = tvm_ffi.load_module(_find())

version = _module["version"]
has_cuda = _module["has_cuda"]
format_info = _module["format_info"]
formats = _module["formats"]
spec = _module["spec"]
layout = _module["layout"]
spans = _module["spans"]
cache = _module["cache"]
append = _module["append"]
append_tensors = _module["append_tensors"]
sequences = _module["sequences"]
sequences_restore = _module["sequences_restore"]
sequences_copy = _module["sequences_copy"]
sequences_lengths = _module["sequences_lengths"]
sequences_pages = _module["sequences_pages"]
sequences_references = _module["sequences_references"]
sequences_free_pages = _module["sequences_free_pages"]
sequences_room = _module["sequences_room"]
sequences_writes_shared = _module["sequences_writes_shared"]
sequences_reserve = _module["sequences_reserve"]
sequences_advance = _module["sequences_advance"]
sequences_set_lengths = _module["sequences_set_lengths"]
sequences_truncate = _module["sequences_truncate"]
sequences_free = _module["sequences_free"]
sequences_fork = _module["sequences_fork"]
sequences_reorder = _module["sequences_reorder"]
sequences_evict_before = _module["sequences_evict_before"]
sequences_resize = _module["sequences_resize"]
dequantize = _module["dequantize"]
calibrate = _module["calibrate"]
calibrate_channels = _module["calibrate_channels"]
channel_values = _module["channel_values"]
exchange_fbgemm = _module["exchange_fbgemm"]
empty = _module["empty"]
as_bf16 = _module["as_bf16"]
plan = _module["plan"]
plan_tensors = _module["plan_tensors"]
plan_info = _module["plan_info"]
describe = _module["describe"]
step = _module["step"]
schedule_tensors = _module["schedule_tensors"]
reschedule = _module["reschedule"]
follow_stream = _module["follow_stream"]
run = _module["run"]
run_appending = _module["run_appending"]
run_listed = _module["run_listed"]
run_scheduled = _module["run_scheduled"]
run_tensors = _module["run_tensors"]
merge = _module["merge"]
