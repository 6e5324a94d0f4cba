"""A trace that is being written, or that a killed run left: a folder beside its place that says what it holds.

    DIR.unfinished/unfinished.json      the run (model, tokens, choices) and the sites that are whole
    DIR.unfinished/lock                 held by the process that writes; the system lets go of it when that dies
    DIR.unfinished/self-000.safetensors ...

It has no trace.json, so it never opens as a trace. The same run can go on with it, where ``unfinished.json`` says that
it is the same: a run over a text that is named there. One that was made of inputs at hand cannot."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clearhead.trace import format as layout
from clearhead.trace.checked import site_and_check
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site, SiteCheck
from clearhead.trace.tensors import read_header

FORMAT = "clearhead-unfinished-trace"
INDEX = "unfinished.json"
LOCK = "lock"

Done = list[tuple[Site, SiteCheck]]


def folder_for(path: Path) -> Path:
    """Where a trace lies until it is whole: DIR.unfinished."""
    return path.with_name(path.name + ".unfinished")


def write_state(folder: Path, run: dict[str, Any], done: Done) -> None:
    """Say what the folder holds. Under a temporary name, then renamed."""
    sites = [{"site": asdict(site), "check": asdict(check)} for site, check in done]
    data = {"format": FORMAT, "version": layout.VERSION, "run": run, "sites": sites}
    temporary = folder / (INDEX + ".partial")
    temporary.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, folder / INDEX)


def read_state(folder: Path) -> tuple[dict[str, Any], Done] | None:
    """(the run, the sites that are whole); None if the folder does not say so."""
    try:
        data = json.loads((folder / INDEX).read_bytes())
        if data["format"] != FORMAT or data["version"] != layout.VERSION:
            return None
        done = [site_and_check(entry) for entry in data["sites"]]
        for site, _ in done:
            read_header(folder / layout.site_file(site.kind, site.layer))
        return dict(data["run"]), done
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def said(folder: Path, locked: bool = False) -> str | None:
    """What a folder holds that a run left, or is writing, in words; None where it is none.

    ``locked`` : by the one who asks, so that nobody else is writing there."""
    found = read_state(folder)
    if found is None:
        return None
    run, done = found
    of, model = run.get("of", "?"), run.get("model", "?")
    how = "is being written" if not locked and Lock.held(folder) else "was stopped"
    return f"{folder} holds {len(done)} of {of} attentions of a run of {model} that {how}"


def advice(folder: Path) -> str:
    """What can be done with a folder that a run left, in words."""
    if _goes_on(folder):
        return "`clearhead trace ... --continue` with the same model and text goes on with it, or remove it"
    return "it does not say what was read, so that nothing can go on with it. Remove it, and trace or save again"


def _goes_on(folder: Path) -> bool:
    """Whether the run that left a folder says which text it read: that can be read again."""
    found = read_state(folder)
    return found is not None and "tokens" in found[0]


def resumed(folder: Path, run: dict[str, Any]) -> Done:
    """The sites that a stopped run of the same kind left whole. Raises TraceError if it was another run."""
    found = read_state(folder)
    if found is None:
        raise TraceError(f"{folder} does not say what it holds: remove it, and record the trace again")
    before, done = found
    if not _goes_on(folder):
        raise TraceError(f"{said(folder, locked=True)}: {advice(folder)}")
    if different := sorted(name for name in run if before.get(name) != run[name]):
        raise TraceError(
            f"{folder} is of another run ({', '.join(different)} differ): give the same model, text and choices to go "
            f"on with it, or remove it"
        )
    return done


class Lock:
    """Held while a folder is written; given up by the system if the process dies."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / LOCK, "wb")  # noqa: SIM115 - open for as long as the folder is written
        try:
            import fcntl
        except ImportError:  # Windows: two runs into one folder are not noticed
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise TraceError(f"{folder} is being written by another process: wait for it, or choose -o") from None

    @staticmethod
    def held(folder: Path) -> bool:
        """Whether a process is writing there now."""
        try:
            import fcntl

            with open(folder / LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (ImportError, OSError):  # Windows; no lock
            return False
        return False

    def close(self) -> None:
        self._file.close()
