"""The one door to vLLM: generation, hidden states by prefill, and a server.

The first two run inside the worker's own process. On a CPU the environment below makes that possible and fast: in-process,
threads as the worker was given them, no binding to cores, no compilation. It must be set before vLLM is imported.

Hidden states come through vLLM's `extract_hidden_states` method and a connector of our own: the prompt (here: prompt plus
answer) is prefilled, the states of the wanted layers stay in a cache-only layer, and the connector copies them out. vLLM's
layer ids name the *input* of a layer: our layer l (its output) is id l+1, and id `num_layers` is the last layer's output
before the final norm. Prefix caching must be off (a cached prefix is not recomputed), and a prompt must not be prefilled in
pieces. The method cannot generate on a CPU, so text comes from a plain engine.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import torch

_HAS_GPU = torch.cuda.is_available()
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if not _HAS_GPU:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import vllm  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E402
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
    extract_from_kv_cache,
)
from vllm.inputs import TokensPrompt  # noqa: E402

from dspark.layers import fast_dtype  # noqa: E402

if TYPE_CHECKING:
    from dspark.target import TargetHead
    from pipelines.settings import SamplingConfig

ENGINE_DTYPE: Literal["bfloat16", "float32"] = "bfloat16" if fast_dtype() == torch.bfloat16 else "float32"

CAPTURE_GPU_SHARE = 0.85  # the head, which takes the log-sum-exp, lies beside the engine
CAPTURE_SEQUENCES = 16  # sequences prefilled together; their states wait in the engine's cache
BATCH_TOKENS = 4096


def version() -> str:
    return f"vllm {vllm.__version__} {ENGINE_DTYPE}"


class Generator:
    """Text with the target's recommended sampling. Token ids in, token ids and finish reason out."""

    def __init__(self, folder: Path, max_length_tokens: int, sampling: "SamplingConfig", max_new_tokens: int, seed: int) -> None:
        self.version = version()
        self._engine = vllm.LLM(
            str(folder),
            dtype=ENGINE_DTYPE,
            max_model_len=max_length_tokens,
            seed=seed,
            enforce_eager=not _HAS_GPU,
            max_num_seqs=256 if _HAS_GPU else 64,
            disable_log_stats=True,
        )
        # No seed of its own for a request: on a CPU that crashes the engine when a prompt is prefilled in pieces.
        self._sampling = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=max_new_tokens,
            skip_special_tokens=False,
            detokenize=False,
        )

    def generate(self, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
        if not prompts:
            return []
        outputs = self._engine.generate(_prompts(prompts), self._sampling, use_tqdm=False)
        return [(list(output.outputs[0].token_ids), output.outputs[0].finish_reason or "length") for output in outputs]


class Capture:
    """States of whole sequences: per sequence tapped [T, L, D] and final [T, D] (after the final norm), bf16."""

    def __init__(self, folder: Path, tapped_layers: tuple[int, ...], head: "TargetHead", max_length_tokens: int) -> None:
        self.version = version()
        self._head = head
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self._num_tapped = len(tapped_layers)
        layer_ids = sorted({*(layer + 1 for layer in tapped_layers), head.shape.num_layers})
        self._engine = vllm.LLM(
            str(folder),
            dtype=ENGINE_DTYPE,
            enforce_eager=not _HAS_GPU,
            gpu_memory_utilization=CAPTURE_GPU_SHARE,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(BATCH_TOKENS, max_length_tokens + 1),
            max_model_len=max_length_tokens + 1,  # one token is generated
            max_num_seqs=CAPTURE_SEQUENCES,
            disable_log_stats=True,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
            },
            kv_transfer_config=KVTransferConfig(
                kv_connector="HiddenStatesConnector",
                kv_connector_module_path="pipelines.backends.vllm",
                kv_role="kv_producer",
                kv_connector_extra_config={"shared_storage_path": self._folder.name},
            ),
        )
        self._sampling = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def capture(self, sequences: list[list[int]]) -> Iterator[tuple[Any, Any]]:
        for start in range(0, len(sequences), CAPTURE_SEQUENCES):
            part = sequences[start : start + CAPTURE_SEQUENCES]
            outputs = self._engine.generate(_prompts(part), self._sampling, use_tqdm=False)
            # The engine stops stepping with its last request, one step before that request's states are written.
            self._engine.generate(_prompts([part[0][:1]]), self._sampling, use_tqdm=False)
            for token_ids, output in zip(part, outputs, strict=True):
                path = Path((output.kv_transfer_params or {})["hidden_states_path"])
                states = load_file(path)
                if states["token_ids"].tolist() != list(token_ids):
                    raise RuntimeError(
                        f"{path.name}: states belong to {len(states['token_ids'])} other tokens than the {len(token_ids)} asked for"
                    )
                hidden_TLD = states["hidden_states"]
                final_TD = self._head.normalise(hidden_TLD[:, -1].to(self._head.device, self._head.dtype))
                yield hidden_TLD[:, : self._num_tapped].bfloat16(), final_TD.bfloat16().cpu()
            for leftover in Path(self._folder.name).iterdir():
                leftover.unlink()


class Prefiller:
    """Engine steps of exactly so many tokens, to be timed: prompts prefilled together, one token sampled for each."""

    def __init__(self, folder: Path, precision: str, prompt_tokens: int, batch_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._engine = vllm.LLM(
            str(folder),
            dtype="bfloat16" if precision == "bf16" else "float32",
            enforce_eager=not _HAS_GPU,
            enable_prefix_caching=False,
            max_num_batched_tokens=max(batch_tokens, prompt_tokens + 1),
            max_model_len=prompt_tokens + 1,
            disable_log_stats=True,
        )
        self._sampling = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def step(self, batch_tokens: int) -> None:
        lengths = [min(self._prompt_tokens, batch_tokens - start) for start in range(0, batch_tokens, self._prompt_tokens)]
        self.prefill([[1] * length for length in lengths])

    def prefill(self, sequences: list[list[int]]) -> None:
        self._engine.generate(_prompts(sequences), self._sampling, use_tqdm=False)


def _prompts(sequences: list[list[int]]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=ids) for ids in sequences]


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """On a GPU the parent's asynchronous copy; on a CPU the states are there already and are written at once."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if _HAS_GPU:
            super()._submit_async_write(pending)
            return
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states_TLD = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        save_file({"hidden_states": states_TLD, "token_ids": pending.token_ids.clone()}, pending.filename)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if _HAS_GPU:
            return super().get_finished(finished_req_ids)
        written = set()
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if isinstance(metadata, ExampleHiddenStatesConnectorMetadata):
            for pending in metadata.pending_saves:
                self._submit_async_write(pending)
                written.add(pending.req_id)
        return written or None, None


def serve(arguments: Sequence[str]) -> None:
    """vLLM's HTTP server with these command-line arguments, until it is told to end or its standard input is closed, as whoever
    started it closes it by ending in whatever way. It has to lead its process group."""

    def follow() -> None:
        sys.stdin.read()
        for _ in range(6):  # one that comes while vLLM starts may be lost
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5.0)
        os.killpg(os.getpid(), signal.SIGKILL)  # with its engine's process

    Thread(target=follow, daemon=True).start()
    sys.argv = ["vllm", *arguments, *([] if _HAS_GPU else ["--enforce-eager"])]
    from vllm.entrypoints.launchers.api_server.entry import main

    main()


if __name__ == "__main__":
    serve(sys.argv[1:])
