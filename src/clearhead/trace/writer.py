"""Write a trace so that it is whole or not there: site by site into DIR.unfinished, renamed at the end."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from clearhead.memory import written
from clearhead.trace import format as layout
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Index, Site, SiteCheck
from clearhead.trace.opening import is_trace
from clearhead.trace.tensors import write_tensors
from clearhead.trace.unfinished import INDEX as UNFINISHED
from clearhead.trace.unfinished import LOCK, Done, Lock, advice, folder_for, resumed, said, write_state


class TraceWriter:
    """A trace being written. Made by :func:`writing`. ``done`` : the sites that are whole."""

    def __init__(self, folder: Path, run: dict[str, Any], done: Done) -> None:
        self.folder, self.run, self.done = folder, run, done

    def add(self, site: Site, check: SiteCheck, arrays: dict[str, NDArray[Any]]) -> None:
        """Write one site's file, and say that it is there. Nothing of it is kept in memory."""
        write_tensors(self.folder / layout.site_file(site.kind, site.layer), arrays)
        self.done.append((site, check))
        write_state(self.folder, self.run, self.done)

    def finish(self, index: Index) -> None:
        """Write trace.json, which makes the folder a trace."""
        text = json.dumps(index.to_json(), ensure_ascii=False, indent=1)
        (self.folder / layout.INDEX).write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path, run: dict[str, Any] | None = None, go_on: bool = False) -> Iterator[TraceWriter]:
    """A TraceWriter whose folder takes the name ``path`` when the block ends well, and is removed if not.

    Ctrl-C, a full disk, an error of the model's: nothing is left under either name. A trace that lies at
    ``path`` already is replaced, and stays as it was unless the new one is whole. A process that is killed leaves
    ``path.unfinished``, which says what it holds; with ``go_on`` the same ``run`` goes on with it.

    Raises TraceError if something else lies at ``path``, a run that was stopped left its folder, or the disk is full
    or read-only.
    """
    given, path = path, Path(os.path.abspath(path))  # the working directory may change meanwhile
    check_destination(path)
    folder, lock = folder_for(path), None
    mine = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        resuming = _claim(folder, go_on)
        lock = Lock(folder)
        if not resuming and not go_on:
            _refuse_what_is_left(folder)
        done = resumed(folder, run or {}) if resuming else []
        mine = True
        writer = TraceWriter(folder, run or {}, done)
        write_state(folder, writer.run, done)
        yield writer
        for name in (UNFINISHED, LOCK):
            (folder / name).unlink(missing_ok=True)
        _move(folder, path)
    except OSError as error:
        raise TraceError(
            f"the trace cannot be written to {given}: {error.strerror or error}. Nothing was left behind"
        ) from error
    finally:
        if lock is not None:
            lock.close()
            (folder / LOCK).unlink(missing_ok=True)
        if mine:
            shutil.rmtree(folder, ignore_errors=True)


def _claim(folder: Path, go_on: bool) -> bool:
    """Make the folder, or find the one that a stopped run left. Gives whether it is that."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir() or folder.is_symlink():
            raise TraceError(f"{folder} is in the way: remove it, or choose another name with -o") from None
        return go_on
    return False


def _refuse_what_is_left(folder: Path) -> None:
    """Raise TraceError if the folder is not new."""
    if any(file.name != LOCK for file in folder.iterdir()):
        what = said(folder, locked=True)
        raise TraceError(f"{what}: {advice(folder)}" if what else f"{folder} is in the way: remove it")


def check_destination(path: Path) -> None:
    """Raise TraceError unless ``path`` is free for a trace: nothing there, an empty folder, or a trace."""
    if not os.path.lexists(path):
        above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
        if not above.is_dir():
            raise TraceError(f"{path} cannot be made: {above} is not a folder")
        return
    if path.is_symlink() or not path.is_dir():
        raise TraceError(f"{path} is not a folder: choose another name with -o, or remove it")
    if not is_trace(path) and any(path.iterdir()):
        raise TraceError(f"{path} exists and is not a trace: choose another folder with -o, or remove it")


def check_space(path: Path, needed: int, fewer: str) -> None:
    """Raise TraceError unless the disk of ``path`` has ``needed`` bytes free, and a little more.

    ``fewer`` : what would make the trace smaller, in words."""
    above = next(folder for folder in path.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(above).free
    if free < 1.02 * needed + 1_000_000:
        raise TraceError(
            f"the trace takes about {written(needed)} and {written(free)} are free in {above}: "
            f"{fewer}, or choose another folder"
        )


def _move(folder: Path, path: Path) -> None:
    """Give ``folder`` the name ``path``; what lay there steps aside first, and comes back if that fails."""
    if not os.path.lexists(path):
        os.rename(folder, path)
        return
    check_destination(path)  # it may have changed since
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    try:
        os.rename(path, aside / "trace")
        try:
            os.rename(folder, path)
        except BaseException:
            os.rename(aside / "trace", path)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
