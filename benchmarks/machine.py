"""What the figures of a benchmark depend on."""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import annotated_transformer as book  # noqa: E402

SPEEDY = "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"


def told_by_git(*words):
    """What git says; nothing where there is none, or no repository."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return ""


def processor(info="/proc/cpuinfo"):
    """The processor's name, or at least its kind."""
    text = Path(info).read_text() if Path(info).exists() else ""
    name = re.search(r"^model name\s*: (.+)", text, re.M)  # not on ARM
    if name:
        return name[1]
    if sys.platform == "darwin":  # where platform knows no more than "arm"
        ask = ["sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(ask, capture_output=True, text=True).stdout
        if found.strip():
            return found.strip()
    return platform.processor() or platform.machine()


def instructions(info="/proc/cpuinfo"):
    """Which of those that speed depends on most it has; [] if unknown.

    Of two processors with one name, one may have them and the other not.
    """
    text = Path(info).read_text() if Path(info).exists() else ""
    flags = re.search(r"^flags\s*: (.+)", text, re.M)  # not on ARM
    has = set(flags[1].split()) if flags else set()
    return [name for name in SPEEDY if name in has]


def machine(options=None):
    """What the figures depend on; `options`: those of the command."""
    commit = told_by_git("rev-parse", "--short=7", "HEAD")
    # the figures themselves, just written, are no change of the code
    changed = told_by_git("status", "--porcelain", "-uno", "--", ".",
                          ":!results")  # fmt: skip
    versions = {}
    for name in ("torch", "sentencepiece", "transformers", "ctranslate2"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cpu": processor(),
        "instructions": instructions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit + "-dirty" * bool(changed),
        "options": {
            name: Path(value).name if isinstance(value, str) else value
            for name, value in (options or {}).items()
            if name != "json"
        },
    }


PATIENCE = 4  # times as long: more would be measured for hours


def half_is_measured(tries=5):
    """Whether 16 bits are fast enough here to be timed at all.

    Processors without instructions for them compute each product in a loop
    of their own: ten times as long as one in 32 bits was measured.
    """
    best = book.product_seconds(torch.device("cpu"), tries)
    times = best["16 bits"] / best["32 bits"]
    if times > PATIENCE:
        print(f"16 bits: left out, a product takes {times:.0f} times as long "
              "as in 32 bits", flush=True)  # fmt: skip
    return times <= PATIENCE


def write_figures(file, facts):
    """Write what was measured as JSON; nothing without a file's name."""
    if file:
        text = json.dumps(facts, indent=1) + "\n"
        Path(file).write_text(text, encoding="utf-8")
