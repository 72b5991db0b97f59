#!python
"""The halftone command of a wheel: calls it inside the package's native library, without importing the package."""

import ctypes
import importlib.util
import os
import pathlib
import signal
import sys


def folder_of(package: str) -> pathlib.Path:
    """Where a package lies. Importing it would take longer than most commands: tvm_ffi imports torch."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"halftone: error: package {package} is missing from {sys.prefix}: install halftone-attention again.")
    return pathlib.Path(spec.submodule_search_locations[0])


def load() -> ctypes.CDLL:
    """The native library."""
    override = os.environ.get("HALFTONE_PYTHON_LIBRARY")  # a build tree's library, for halftone's own tests
    path = pathlib.Path(override) if override else folder_of("halftone") / "lib/libhalftone_python.so"
    try:
        ctypes.CDLL(str(folder_of("tvm_ffi") / "lib/libtvm_ffi.so"), mode=ctypes.RTLD_GLOBAL)  # it needs this one
        return ctypes.CDLL(str(path))
    except OSError as error:
        sys.exit(f"halftone: error: the native library does not load ({error}): install halftone-attention again.")


def main() -> int:
    """Returns the exit status."""
    library = load()
    try:
        command = library.halftone_command
    except AttributeError:
        sys.exit("halftone: error: this package was built with HALFTONE_BUILD_CLI=OFF: build it with ON.")
    # As any other program: Ctrl-C and a closed pipe end it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    arguments = [b"halftone", *map(os.fsencode, sys.argv[1:])]
    return int(command(len(arguments), (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)))


if __name__ == "__main__":
    sys.exit(main())
