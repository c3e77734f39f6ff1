"""The profile's plan, what its readers refuse, and the table that is published from it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dspark.step_cost import StepProfile, StepTiming
from dspark.storage import LocalStorage
from pipelines import targets
from pipelines.artifacts import SpsProfile
from pipelines.config import PROJECT_ROOT, compose
from pipelines.settings import ProfileSpsStage
from pipelines.stages import publish
from pipelines.stages.profile_sps import check_identity, read_profile, step_profile, step_sizes

STAGE = ProfileSpsStage(
    engines=("decoding",), batch_tokens=(1, 2, 3, 8, 64, 512, 600), num_requests=(1, 64, 256), context_tokens=(16, 64),
    num_repeats=5, max_spread=0.3, min_rank_correlation=0.7, precision="bf16", seed=0,
)  # fmt: skip
IDENTITY = {
    "target": "small", "target_weights_sha256": "a1", "drafter_sha256": "b2", "block_size": 3, "dtype": "bf16", "device": "a CPU",
    "num_devices": 1, "num_threads": 2, "packages": {"torch": "2.13.0"},
}  # fmt: skip


def test_sizes_of_a_number_of_requests_are_the_grids_with_both_ends_and_large_ones_half_as_often():
    assert [step_sizes(STAGE, 1, 3, repeat) for repeat in range(2)] == [[1, 2, 3, 4]] * 2
    assert [step_sizes(STAGE, 64, 3, repeat) for repeat in range(2)] == [[64, 65, 256]] * 2
    assert [step_sizes(STAGE, 256, 3, repeat) for repeat in range(3)] == [[256, 257, 512, 600, 1024], [256], [256, 257, 512, 600, 1024]]


@pytest.fixture
def artifact(tmp_path):
    curves = [
        {"context_tokens": context, "num_requests": num, "draft_seconds": 0.01 * num, "batch_tokens": [num, 4 * num],
         "verify_seconds": [0.1 * num + 0.001 * context, 0.4 * num + 0.001 * context], "overhead_seconds": [0.0, 0.0]}
        for context in (100, 300)
        for num in (1, 2, 4)
    ]  # fmt: skip
    LocalStorage(tmp_path).put(SpsProfile.SPS, json.dumps({"identity": IDENTITY, "engines": {"decoding": curves}}).encode())
    return SpsProfile(str(tmp_path), {})


def test_profile_of_the_models_that_its_reader_has_is_read(artifact):
    costs = step_profile(read_profile(artifact, {"drafter_sha256": "b2", "block_size": 3, "packages": {"torch": "2.13.0"}}), "decoding")
    cost = costs.at(200.0, 2)
    assert (cost.draft_seconds, cost.batch_tokens[0], cost.batch_tokens[-1]) == ((0.02,), 2, 8)
    assert (cost.verify_seconds[0], cost.verify_seconds[-1]) == (pytest.approx(0.4), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_weights_sha256", "a2"), ("drafter_sha256", "b3"), ("dtype", "fp32"), ("device", "a GPU"), ("num_threads", 1),
        ("block_size", 7), ("packages", {"torch": "2.14.0"}), ("num_devices", 2), ("quantisation", "int4"),
    ],
)  # fmt: skip
def test_profile_of_something_else_is_refused_by_its_reader(artifact, name, value):
    with pytest.raises(ValueError, match=rf"sps\.identity\.{name}: measured with .*, used with {value!r}: .*Fix".replace("{", r"\{")):
        read_profile(artifact, IDENTITY | {name: value})


def test_identity_that_is_all_the_same_is_accepted():
    check_identity(IDENTITY, IDENTITY)


def test_published_table_is_that_of_whole_blocks_behind_the_texts_mean_context():
    timings = [
        StepTiming(context, num, size, 0.001 * num, 0.01 * size + 0.1 * num + 1e-4 * context, 0.0)
        for context in (100, 300)
        for num in (1, 2, 4)
        for size in (num, 2 * num, 4 * num)
    ]
    table = publish._table(StepProfile.of(timings), 150.0, 3)
    num_requests = -(-np.array(table.batch_tokens) // 4)
    assert table.batch_tokens == (1, 2, 4, 8, 16)
    assert table.draft_seconds == pytest.approx(0.001 * num_requests)
    assert table.verify_seconds == pytest.approx(0.01 * np.array(table.batch_tokens) + 0.1 * num_requests + 0.015)


VERIFIER = """
import sys
from pathlib import Path
from pipelines.backends.vllm import ScriptedProposer, Verifier

engine = Verifier(Path(sys.argv[1]), "fp32", 300, num_requests=6, block_size=4)
for context_tokens, num_requests in ((130, 6), (16, 1), (16, 6)):
    sizes = [num_requests, 5 * num_requests, num_requests + 2, 3 * num_requests, num_requests]
    found = list(engine.steps(context_tokens, num_requests, sizes))
    assert [step.batch_tokens for step in found] == sizes, found
    assert all(0.0 < step.model_seconds < step.seconds for step in found), found
ScriptedProposer.propose = lambda self, sampled, *arguments, **options: setattr(self, "num_requests", len(sampled)) or [[] for _ in sampled]
try:
    list(engine.steps(16, 2, [2, 10]))
except RuntimeError as error:
    print("refused:", error)
"""


@pytest.mark.vllm
def test_steps_of_vllm_verify_as_many_tokens_as_asked_for():
    settings, _ = compose(["experiment=tiny"])
    targets.ensure_made(settings.target)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", VERIFIER, targets.uri(settings.target)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "refused: vLLM verified 2 tokens where 10 of 2 requests were asked for" in done.stdout
