"""How much memory there is, and how sizes are written."""

from __future__ import annotations

import os


def available() -> int | None:
    """Bytes that can still be had without swapping, or None where the system does not say."""
    found = [bytes_ for bytes_ in (_meminfo(), _cgroup()) if bytes_ is not None]
    if found:
        return min(found)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def written(size: float) -> str:
    """A number of bytes as people write it.

    >>> written(72_500_000_000)
    '72.5 GB'
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def _meminfo() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None


def _cgroup() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            most = limit.read().strip()
            return None if most == "max" else int(most) - int(used.read())
    except (OSError, ValueError):
        return None
