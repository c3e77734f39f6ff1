"""The one door to vLLM: generation, hidden states by prefill, verification steps to be timed, and a server.

All but the server run inside the worker's own process. On a CPU the environment below makes that possible and fast: in-process,
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
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
from dspark.step_cost import random_lengths  # noqa: E402

if TYPE_CHECKING:
    from dspark.target import TargetHead
    from pipelines.settings import SamplingConfig

ENGINE_DTYPE: Literal["bfloat16", "float32"] = "bfloat16" if fast_dtype() == torch.bfloat16 else "float32"

CAPTURE_GPU_SHARE = 0.85  # the head, which takes the log-sum-exp, lies beside the engine
CAPTURE_SEQUENCES = 16  # sequences prefilled together; their states wait in the engine's cache
BATCH_TOKENS = 4096
NUM_CONTEXTS = 16  # different ones behind the steps that are timed


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
    """Prompts prefilled together, one token sampled for each."""

    def __init__(self, folder: Path, precision: str, prompt_tokens: int, batch_tokens: int) -> None:
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

    def prefill(self, sequences: list[list[int]]) -> None:
        self._engine.generate(_prompts(sequences), self._sampling, use_tqdm=False)


@dataclass(frozen=True)
class VerificationStep:
    """`model_seconds`: forward, sampling and rejection test; `seconds`: with vLLM's scheduling and output before and after."""

    batch_tokens: int
    model_seconds: float
    seconds: float


class Verifier:
    """vLLM's own ragged verification steps, each of exactly so many tokens, to be timed.

    What is verified comes from `ScriptedProposer`: the wanted number of drafted tokens, of requests drawn by chance. Their contexts
    are `NUM_CONTEXTS` texts, by turns and through the prefix cache, so that they are computed but once; these are more than a
    processor's caches hold, as the contexts of real requests are.
    """

    def __init__(self, folder: Path, precision: str, max_length_tokens: int, num_requests: int, block_size: int) -> None:
        self._engine = vllm.LLM(
            str(folder),
            dtype="bfloat16" if precision == "bf16" else "float32",
            enforce_eager=not _HAS_GPU,
            enable_prefix_caching=True,
            max_num_batched_tokens=max(BATCH_TOKENS, num_requests * (block_size + 1)),
            max_num_seqs=num_requests,
            max_model_len=max_length_tokens + block_size + 1,
            disable_log_stats=True,
            speculative_config={
                "method": "custom_class",
                "model": f"{__name__}.{ScriptedProposer.__name__}",
                "num_speculative_tokens": block_size,
            },
        ).llm_engine
        (self._proposer,) = self._engine.collective_rpc(_proposer)
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._batch_tokens, self._model_seconds = 0, 0.0
        executor: Any = self._engine.engine_core.engine_core.model_executor  # type: ignore[attr-defined] # of an engine in this process
        executor.execute_model, executor.sample_tokens = self._timed(executor.execute_model), self._timed(executor.sample_tokens)

    def steps(self, context_tokens: int, num_requests: int, sizes: Sequence[int]) -> Iterator[VerificationStep]:
        """One for each size, in this order; behind `context_tokens` cached tokens at first, each adds what it accepts, mostly one."""
        names = [f"{time.monotonic_ns()}-{i}" for i in range(num_requests)]
        sampling = vllm.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
        for i, name in enumerate(names):
            ids = np.random.default_rng(i % NUM_CONTEXTS).integers(self._vocab_size, size=context_tokens)
            # A token of its own behind them: of a prompt that is cached to its end, vLLM computes the last block again.
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=[*ids.tolist(), i % self._vocab_size]), sampling)
        self._proposer.batch_tokens = None
        while self._proposer.num_requests < num_requests:  # prompts, and plain steps of those that began
            self._engine.step()
        self._proposer.batch_tokens = sizes[0]
        self._engine.step()
        for size, following in zip(sizes, [*sizes[1:], None], strict=True):
            self._proposer.batch_tokens = following  # proposed at the end of this step
            self._model_seconds, started = 0.0, time.perf_counter()
            self._engine.step()
            seconds = time.perf_counter() - started
            if self._batch_tokens != size:
                raise RuntimeError(f"vLLM verified {self._batch_tokens} tokens where {size} of {num_requests} requests were asked for")
            yield VerificationStep(size, self._model_seconds, seconds)
        self._engine.abort_request(names)
        self._engine.step()  # removes them
        self._proposer.num_requests = 0

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(argument: Any, **options: Any) -> Any:
            started = time.perf_counter()
            found = call(argument, **options)
            self._model_seconds += time.perf_counter() - started
            self._batch_tokens = getattr(argument, "total_num_scheduled_tokens", self._batch_tokens)
            return found

        return timed


class ScriptedProposer:
    """vLLM's `custom_class` speculation: drafts without sense, as many as make the next step one of `batch_tokens` tokens."""

    def __init__(self, config: Any) -> None:
        self._block_size, self._generator = config.speculative_config.num_speculative_tokens, np.random.default_rng(0)
        self.batch_tokens: int | None = None  # no drafts
        self.num_requests = 0  # of the last step, for which a token was sampled

    def load_model(self, _target: object) -> None:
        """There is none."""

    def propose(self, sampled_token_ids: list[list[int]], *_arguments: Any, **_options: Any) -> list[list[int]]:
        self.num_requests = sum(1 for ids in sampled_token_ids if ids)
        if self.batch_tokens is None:
            return [[] for _ in sampled_token_ids]
        lengths = random_lengths(self.batch_tokens, len(sampled_token_ids), self._block_size, self._generator)
        return [[i % 2] * length for i, length in enumerate(lengths.tolist())]


def _proposer(worker: Any) -> ScriptedProposer:
    return worker.model_runner.drafter


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
