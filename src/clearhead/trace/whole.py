"""A file that is whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the name ``path`` when the block ends well.

    If it does not (an error, Ctrl-C, a full disk), nothing is left, and what was there before stays. Folders above it
    are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # of a name that its user knows
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only their owner may read
        try:
            os.replace(name, path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
