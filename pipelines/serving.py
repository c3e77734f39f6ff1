"""Serving truth: what a running vLLM server accepts beside the offline figure, by its own counters, on the very same prompts.

    with own_server(folder, name, speculation, precision, max_length_tokens) as url:      # or the URL of one that runs already
        texts, served = Server(url, name, num_speculative_tokens).generate(prompts, limits)
    compare(serving, served, Drafts.of(rounds, num_speculative_tokens), num_equal_texts, num_texts)

Greedy on both sides. vLLM counts *drafts*, the rounds in which something was proposed, so the offline rounds without a proposal
are left out; and it counts tokens accepted behind a stop token, which our rounds do not hold. Knows vLLM by HTTP alone; the server
that it starts is `pipelines/backends/vllm.py` in a process of its own.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipelines.config import PROJECT_ROOT
from pipelines.settings import ServingStage

if TYPE_CHECKING:
    from dspark.rounds import Round

STARTUP_SECONDS = 900.0
REQUEST_SECONDS = 3600.0
SETTLE_SECONDS = 10.0  # a server answers a moment before it counts
POLL_SECONDS = 0.2
SPECULATION = "vllm:spec_decode_num_"
GENERATED = "vllm:generation_tokens_total"
SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'\bposition="(\d+)"')


@dataclass(frozen=True)
class Drafts:
    """Rounds in which something was proposed. `num_survivors_K`: those of them that accepted k tokens or more, k from 1."""

    num_drafts: int
    num_proposed: int
    num_accepted: int
    num_survivors_K: tuple[int, ...]

    @classmethod
    def of(cls, rounds: "Sequence[Round]", block_size: int) -> "Drafts":
        accepted = [r.accepted for r in rounds if r.proposed]
        survivors_K = tuple(sum(n >= k for n in accepted) for k in range(1, block_size + 1))
        return cls(len(accepted), sum(r.proposed for r in rounds), sum(accepted), survivors_K)

    def summary(self) -> dict[str, Any]:
        """Accepted length counts the bonus token; survival is by draft, also where it proposed fewer tokens."""
        n = self.num_drafts
        return {
            "num_drafts": n,
            "num_proposed": self.num_proposed,
            "num_accepted": self.num_accepted,
            "accepted_length": 1 + self.num_accepted / n if n else None,
            "prefix_survival": [survivors / n if n else None for survivors in self.num_survivors_K],
        }


@dataclass(frozen=True)
class Limits:
    """`batch_size`: prompts that are sent together."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    batch_size: int


def speculation(serving: ServingStage, drafter: Path | None) -> dict[str, Any]:
    """vLLM's --speculative-config. `drafter`: the folder of a served DSpark drafter."""
    common = {"method": serving.method, "num_speculative_tokens": serving.num_speculative_tokens}
    if serving.method == "ngram":
        return {**common, "prompt_lookup_min": serving.min_ngram, "prompt_lookup_max": serving.max_ngram}
    return {**common, "model": str(drafter)}


def compare(serving: ServingStage, served: Drafts, offline: Drafts, num_equal_texts: int, num_texts: int) -> dict[str, Any]:
    """The report's `serving`. The difference is of accepted tokens a draft; None, and a failure, where nothing was accepted offline."""
    difference = None
    if offline.num_accepted and served.num_drafts:
        difference = (served.num_accepted / served.num_drafts) / (offline.num_accepted / offline.num_drafts) - 1.0
    return {
        "method": serving.method,
        "num_speculative_tokens": serving.num_speculative_tokens,
        "served": served.summary(),
        "offline": offline.summary(),
        "difference": difference,
        "tolerance": serving.tolerance,
        "is_within_tolerance": difference is not None and abs(difference) <= serving.tolerance,
        "num_texts": num_texts,
        "num_equal_texts": num_equal_texts,
    }


class Server:
    """A vLLM server that serves `model` with a speculation of so many tokens; ValueError where it is another one."""

    def __init__(self, url: str, model: str, num_speculative_tokens: int) -> None:
        self._url, self._model = url.rstrip("/"), model
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a server on loopback is behind no proxy
        served = [entry["id"] for entry in self._json("/v1/models")["data"]]
        if model not in served:
            raise self._error(f"serves {', '.join(served)}", f"must serve {model}", f"vllm serve ... --served-model-name {model}")
        found = len(self._counts()) - len(_COUNTERS)
        if found != num_speculative_tokens:
            rule = f"stage.evaluate.serving.num_speculative_tokens is {num_speculative_tokens}"
            raise self._error(
                f"drafts {found} tokens", rule, f"stage.evaluate.serving.num_speculative_tokens={found}, or serve with as many"
            )

    @property
    def version(self) -> str:
        return self._json("/version")["version"]

    def generate(self, prompts: Sequence[Sequence[int]], limits: Limits) -> tuple[list[list[int]], Drafts]:
        """Greedy token ids of every prompt, and what the server counted meanwhile; ValueError when others made it work, too."""
        texts: list[list[int]] = []
        before = self._counts()
        for start in range(0, len(prompts), limits.batch_size):
            body = {
                "model": self._model,
                "prompt": [list(ids) for ids in prompts[start : start + limits.batch_size]],
                "max_tokens": limits.max_new_tokens,
                "stop_token_ids": list(limits.stop_ids),
                "temperature": 0.0,
                "repetition_penalty": 1.0,  # in place of one that the target's generation config may name
                "return_token_ids": True,
            }
            choices = self._json("/v1/completions", body)["choices"]
            texts += [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
        num_tokens, deadline = sum(map(len, texts)), time.monotonic() + SETTLE_SECONDS
        while (counted := self._counts() - before)[GENERATED] < num_tokens and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if counted[GENERATED] != num_tokens:
            rule = f"it answered us with {num_tokens}"
            raise self._error(f"counted {counted[GENERATED]} generated tokens", rule, "measure at a server that nobody else uses")
        num_drafts, num_proposed, num_accepted = (counted[name] for name in _COUNTERS[:3])
        survivors_K = tuple(counted[f"{_PER_POSITION}/{k}"] for k in range(len(before) - len(_COUNTERS)))
        return texts, Drafts(num_drafts, num_proposed, num_accepted, survivors_K)

    def _counts(self) -> Counter[str]:
        """Of all its engines. Counters of a position are named by it."""
        found: Counter[str] = Counter()
        for name, labels, value in SAMPLE.findall(self._text("/metrics")):
            if name in _COUNTERS:
                found[name] += int(float(value))
            elif name == _PER_POSITION and (position := POSITION.search(labels)):
                found[f"{name}/{position[1]}"] += int(float(value))
        if missing := [name for name in _COUNTERS if name not in found]:
            fix = "serve with --speculative-config, and without --disable-log-stats"
            raise self._error(f"/metrics has no {missing[0]}", "must count its speculation", fix)
        return found

    def _json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        text = self._text(path, body)
        try:
            return json.loads(text)
        except ValueError:
            raise self._error(f"{path} answers {text[:60]!r}", "must be a vLLM server", "give the URL before /v1") from None

    def _text(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):  # vLLM's own variable for it
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, headers)
            with self._opener.open(request, timeout=REQUEST_SECONDS if body else 30.0) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise self._error(f"{path} answers {error.code} {said}", "must be a vLLM server", "give the URL before /v1") from None
        except (OSError, ValueError) as error:  # ValueError: no URL at all
            rule = f"{path} does not answer: {error}"
            raise self._error("no server", rule, "start one there, or cluster.serving_url=null for one of the step's own") from None

    def _error(self, found: str, rule: str, fix: str) -> ValueError:
        return ValueError(f"cluster.serving_url: {self._url}: {found}: {rule}. Fix: {fix}")


_COUNTERS = (f"{SPECULATION}drafts_total", f"{SPECULATION}draft_tokens_total", f"{SPECULATION}accepted_tokens_total", GENERATED)
_PER_POSITION = f"{SPECULATION}accepted_tokens_per_pos_total"


@contextmanager
def own_server(folder: Path, name: str, speculative: Mapping[str, Any], precision: str, max_length_tokens: int) -> Iterator[str]:
    """Serves the model of a folder under a name, on a free port of loopback; the URL, once it answers. RuntimeError with the end of
    its log when it does not. It ends with this block, or when this process ends: its standard input closes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "pipelines.backends.vllm", "--model", str(folder), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16" if precision == "bf16" else "float32"),
        *("--max-model-len", str(max_length_tokens), "--speculative-config", json.dumps(speculative)),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):  # what is left of its group, which it leads
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: IO[bytes]) -> None:
    opener, deadline = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + STARTUP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), opener.open(f"{url}/health", timeout=30.0):
            return
        time.sleep(POLL_SECONDS)
    log.seek(0)
    said = log.read().decode(errors="replace")[-2000:]
    state = "does not answer" if process.poll() is None else f"ended with status {process.returncode}"
    raise RuntimeError(f"vLLM server: {state} after its start. Fix: what its log says:\n{said}")
