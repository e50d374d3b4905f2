"""Describes the machine and the versions of a measurement."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any


def about_this_machine(*distributions: str) -> dict[str, Any]:
    """Returns the CPU, and the versions of these distributions if they are installed."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return dict(
        date=datetime.date.today().isoformat(),
        cpu=model[1].strip() if model else platform.processor() or platform.machine(),
        cores=os.cpu_count(),
        versions=versions,
    )
