"""vLLM's captured states against the transformers reference, on the tiny random target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import targets
from pipelines.config import PROJECT_ROOT, compose

SCRIPT = """
import sys, torch
from pathlib import Path
from dspark.target import load_head
from pipelines.backends.vllm import Capture
from pipelines.stages.cache_targets import ReferenceCapture

folder, tapped = Path(sys.argv[1]), (0, 1, 2)
sequences = [[5 + (7 * i * (j + 1)) % 250 for i in range(n)] for j, n in enumerate((3, 17, 40, 33, 2))]
head = load_head(folder, torch.bfloat16)
pairs = zip(sequences, ReferenceCapture(folder, tapped).capture(sequences), Capture(folder, tapped, head, 512).capture(sequences), strict=True)
for ids, (tapped_reference, final_reference), (tapped_vllm, final_vllm) in pairs:
    assert tapped_vllm.shape == tapped_reference.shape == (len(ids), 3, head.shape.width), tapped_vllm.shape
    for layer in range(3):
        want, got = tapped_reference[:, layer].float(), tapped_vllm[:, layer].float()
        error = ((want - got).norm() / want.norm()).item()
        neighbour = ((tapped_reference[:, (layer + 1) % 3].float() - got).norm() / want.norm()).item()
        assert error < 0.02 < neighbour, (layer, error, neighbour)
    p, q = (head.logits(x).softmax(-1) for x in (final_reference, final_vllm))
    assert (p - q).abs().sum(-1).mean().item() / 2 < 0.05
print("captured", len(sequences))
"""


@pytest.mark.vllm
def test_capture_with_vllm_equals_transformers(tmp_path: Path) -> None:
    settings, _ = compose(["experiment=tiny", "target.source.num_layers=4"])
    targets.ensure_made(settings.target)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, targets.uri(settings.target)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "captured 5" in done.stdout
