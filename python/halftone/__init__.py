"""halftone: attention over low-precision KV caches, on the CPU and on Hopper GPUs.

Works on the arrays of NumPy, torch, JAX and CuPy through DLPack, and needs none of them. README.md has a quick start,
docs/python.md the reference.
"""

from . import _native
from ._merge import merge
from ._plan import Plan, plan
from ._recipe import Recipe, RecipeLayer, load_recipe
from .attention import Schedule, attend, schedule
from .cache import PagedKVCache, Rope
from .convert import (
    calibrate,
    calibrate_channels,
    dequantize,
    export_fbgemm_int4,
    export_flash_mla_lse,
    import_fbgemm_int4,
    import_flash_mla_lse,
)
from .errors import (
    CorruptFileError,
    DeviceError,
    Error,
    InternalError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnsupportedError,
)
from .format import KVFormat
from .layered import LayeredKVCache
from .listed import attend_listed
from .spec import KVCacheSpec, KVSpan, KVTensors

__version__ = str(_native.version())
has_cuda = bool(_native.has_cuda())
"""True when this build has the CUDA backend; whether a GPU is there shows when one is used."""

__all__ = [
    "CorruptFileError",
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "KVCacheSpec",
    "KVFormat",
    "KVSpan",
    "KVTensors",
    "LayeredKVCache",
    "OutOfRangeError",
    "PagedKVCache",
    "Plan",
    "Recipe",
    "RecipeLayer",
    "ResourceExhaustedError",
    "Rope",
    "Schedule",
    "UnsupportedError",
    "attend",
    "attend_listed",
    "calibrate",
    "calibrate_channels",
    "dequantize",
    "export_fbgemm_int4",
    "export_flash_mla_lse",
    "has_cuda",
    "import_fbgemm_int4",
    "import_flash_mla_lse",
    "load_recipe",
    "merge",
    "plan",
    "schedule",
]
