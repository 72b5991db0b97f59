"""Which versions of transformers halftone.transformers and halftone.capture fit."""

import importlib.metadata

from .errors import UnsupportedError

OLDEST = (5, 17)
NEXT = (6, 0)


def check_versions() -> None:
    """Raises UnsupportedError if transformers is installed, but older or newer than what is tested."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return  # the import that follows says so, or finds it without metadata
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= found < NEXT:
        raise UnsupportedError(
            f"transformers is {version}, but halftone needs {OLDEST[0]}.{OLDEST[1]} or a later "
            f"{OLDEST[0]}.x: pip install 'transformers>={OLDEST[0]}.{OLDEST[1]},<{NEXT[0]}'."
        )
