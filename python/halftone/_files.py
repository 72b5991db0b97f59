"""Output files that appear complete or not at all, as those of the ``halftone`` command do."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from typing import Any, NoReturn

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # what O_TMPFILE gives where there are none
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR)


class AtomicFile:
    """A context in which a file is written that replaces ``path`` at the end, or not at all if the context is left by
    an exception.

    Until then the data lives in an unnamed file of the same folder (O_TMPFILE; where the file system has none, in a
    hidden one with a random name). A symbolic link is followed; an existing file keeps its mode, a new one gets
    what the umask leaves. The data is synced before the file gets its name. A device or FIFO is written directly.

    Args:
        path: text that the file system can encode.

    Raises:
        OSError: of the class that suits the reason.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._target = os.path.realpath(path)
        self._fd = -1
        self._hidden = ""  # name of the temporary file, empty while it has none
        self._is_direct = False

    def __enter__(self) -> AtomicFile:
        try:
            mode: int | None = os.stat(self._path).st_mode
        except OSError:  # a new file; if not, opening it says why
            mode = None
        try:
            if mode is None or stat.S_ISREG(mode):
                if mode is not None and not os.access(self._path, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                self._open_hidden(mode)
            else:  # /dev/null must never be renamed over; a folder is refused here
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
                self._is_direct = True
        except OSError as error:
            self._close()
            self._fail(error)
        return self

    def _open_hidden(self, mode: int | None) -> None:
        flags, allowed = os.O_WRONLY | os.O_CLOEXEC, 0o666 if mode is None else 0o600
        try:
            self._fd = os.open(os.path.dirname(self._target), flags | os.O_TMPFILE, allowed)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
            name = self._hidden_name()
            self._fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, allowed)
            self._hidden = name
        if mode is not None:
            os.fchmod(self._fd, stat.S_IMODE(mode))

    def _hidden_name(self) -> str:
        """Unlike a process id, not the same in two containers that share the folder."""
        return os.path.join(os.path.dirname(self._target), f".halftone-{secrets.token_hex(8)}.tmp")

    def write(self, data: Any) -> None:
        """Appends bytes, or the memory of a contiguous array of bytes."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._fail(error)

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None and not self._is_direct:
                self._commit()
        except OSError as error:
            self._fail(error)
        finally:
            self._close()

    def _commit(self) -> None:
        os.fsync(self._fd)
        if not self._hidden:
            name = self._hidden_name()
            # The folder of an absolute path does not matter, but with it os.link() follows the link to the file.
            os.link(f"/proc/self/fd/{self._fd}", name, src_dir_fd=self._fd, follow_symlinks=True)
            self._hidden = name
        os.replace(self._hidden, self._target)
        self._hidden = ""
        try:
            folder = os.open(os.path.dirname(self._target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.fsync(folder)
        except OSError:  # some file systems refuse it
            pass
        finally:
            os.close(folder)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._hidden:
            os.unlink(self._hidden)
            self._hidden = ""

    def _fail(self, error: OSError) -> NoReturn:
        remedy = "name a writable file"
        if error.errno in _NO_SPACE:
            remedy = "free some space or name another place"
        elif error.errno in _NO_FOLDER:
            remedy = "choose a folder that exists"
        elif error.errno == errno.EISDIR:
            remedy = "name a file in it"
        sentence = f"path {self._path!r} cannot be written ({error.strerror}): {remedy}."
        raise OSError(error.errno, sentence) from None  # FileNotFoundError and so on, by the number
