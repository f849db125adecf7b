"""What the figures of a benchmark depend on."""

import contextlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def machine():
    """What the figures depend on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = re.search(r"model name\s*: (.*)", info.read_text())[1]
    git = ["git", "-C", str(ROOT)]
    commit, changed = (
        subprocess.run([*git, *words], capture_output=True, text=True).stdout
        for words in (
            ["rev-parse", "--short=7", "HEAD"],
            # the figures themselves, just written, are no change of the code
            ["status", "--porcelain", "-uno", "--", ".", ":!results"],
        )
    )
    versions = {}
    for name in ("torch", "sentencepiece", "transformers", "ctranslate2"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit.strip() + "-dirty" * bool(changed),
    }
