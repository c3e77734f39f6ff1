"""What a vLLM server accepts beside the offline figure: its counters over HTTP, and one real server on a CPU."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.decoding import DecodingConfig, Request, decode
from dspark.packed_target import load_target
from dspark.sampling import Sampling
from dspark.untrained import PromptLookup
from pipelines import serving, targets
from pipelines.config import PROJECT_ROOT, compose
from pipelines.serving import Drafts, Limits, Server, compare, speculation
from pipelines.settings import ServingStage
from tests.pipelines.fake_vllm import FakeVllm

NGRAM = ServingStage("ngram", num_speculative_tokens=2, min_ngram=2, max_ngram=4, tolerance=0.05)
LIMITS = Limits(max_new_tokens=7, stop_ids=(0, 3), batch_size=2)
PROMPTS = [[1, 2, 3], [4], [5, 6]]


def test_server_is_sent_the_token_ids_and_its_own_counts_of_them_are_read() -> None:
    with FakeVllm(num_accepted=2).running() as fake:
        fake.num_prompts, fake.num_tokens = 100, 1000  # what others asked before
        texts, counted = Server(fake.url + "/", "target", 2).generate(PROMPTS, LIMITS)
    assert texts == [[1, 2]] * 3
    assert counted == Drafts(num_drafts=3, num_proposed=6, num_accepted=6, num_survivors_K=(3, 3))
    assert [body["prompt"] for body in fake.bodies] == [PROMPTS[:2], PROMPTS[2:]]
    assert {(b["temperature"], b["max_tokens"], tuple(b["stop_token_ids"]), b["model"]) for b in fake.bodies} == {
        (0.0, 7, (0, 3), "target")
    }


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeVllm(model="another"), "serves another: must serve target. Fix: .*--served-model-name target"),
        (FakeVllm(block_size=5), "drafts 5 tokens: stage.evaluate.serving.num_speculative_tokens is 2. Fix: .*=5"),
        (FakeVllm(has_speculation=False), "/metrics has no vllm:spec_decode_num_drafts_total: .* Fix: .*--speculative-config"),
    ],
    ids=["another model", "another length", "no speculation"],
)
def test_server_that_does_not_fit_is_refused_before_it_works(fake: FakeVllm, message: str) -> None:
    with fake.running(), pytest.raises(ValueError, match=f"cluster.serving_url: {fake.url}: {message}"):
        Server(fake.url, "target", 2)
    assert not fake.bodies


def test_server_that_others_use_at_the_same_time_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SETTLE_SECONDS", 0.3)
    with (
        FakeVllm(num_foreign_tokens=1).running() as fake,
        pytest.raises(ValueError, match=r"counted 8 generated tokens.*with 6.*nobody else"),
    ):
        Server(fake.url, "target", 2).generate(PROMPTS, LIMITS)


def test_url_without_a_server_or_with_another_one_is_answered_with_the_fix() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"cluster.serving_url: http://127.0.0.1:{port}: .*does not answer.*Fix: .*cluster.serving_url=null"
        ):
            Server(f"http://127.0.0.1:{port}", "target", 2)
    with (
        FakeVllm().running() as fake,
        pytest.raises(ValueError, match=r"/x: /v1/models answers 404 not found.*Fix: give the URL before /v1"),
    ):
        Server(f"{fake.url}/x", "target", 2)


def test_comparison_is_of_accepted_tokens_a_draft_and_fails_above_the_tolerance() -> None:
    offline = Drafts(100, 180, 100, (70, 30))
    found = compare(NGRAM, Drafts(50, 90, 52, (35, 17)), offline, 4, 5)
    assert found["difference"] == pytest.approx(0.04)
    assert found["is_within_tolerance"]
    assert found["served"] == {
        "num_drafts": 50,
        "num_proposed": 90,
        "num_accepted": 52,
        "accepted_length": 2.04,
        "prefix_survival": [0.7, 0.34],
    }
    assert (found["offline"]["accepted_length"], found["num_texts"], found["num_equal_texts"]) == (2.0, 5, 4)
    for num_accepted in (94, 106):
        assert not compare(NGRAM, Drafts(100, 180, num_accepted, (70, 30)), offline, 5, 5)["is_within_tolerance"]
    for served, here in ((offline, Drafts(3, 6, 0, (0, 0))), (Drafts(0, 0, 0, (0, 0)), offline)):
        nothing = compare(NGRAM, served, here, 5, 5)
        assert (nothing["difference"], nothing["is_within_tolerance"]) == (None, False)


def test_speculation_is_what_vllm_reads() -> None:
    common = {"num_speculative_tokens": 2}
    assert speculation(NGRAM, None) == {**common, "method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert speculation(replace(NGRAM, method="dspark"), Path("/d")) == {**common, "method": "dspark", "model": "/d"}


# --- a real server --------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from pipelines.serving import own_server, speculation
from pipelines.settings import ServingStage

with own_server(Path(sys.argv[1]), "tiny", speculation(ServingStage("ngram", 4, 2, 4, 0.05), None), "fp32", 512) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_own_server_accepts_what_our_prompt_lookup_accepts_and_ends_with_a_killed_owner() -> None:
    settings, _ = compose(["experiment=tiny"])
    targets.ensure_made(settings.target)
    folder = targets.uri(settings.target)
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, folder],
        cwd=PROJECT_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    target = load_target(Path(folder), (0,), torch.float32, torch.device("cpu"))
    requests = [Request(str(i), tuple(5 + (7 * i * j) % 11 for j in range(24))) for i in range(12)]
    config = DecodingConfig(Sampling("greedy", 0.0), 64, (1,), 4, 0)
    completions = list(decode(target, PromptLookup(4, 2, 4, target.shape.vocab_size), requests, config))
    offline = Drafts.of([r for c in completions for r in c.rounds], 4)
    assert offline.num_drafts > offline.num_survivors_K[0] > 10
    try:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        texts, served = Server(url, "tiny", 4).generate([c.request.prompt_ids for c in completions], Limits(64, (1,), 4))
    finally:
        owner.kill()
        owner.wait()
    found = compare(NGRAM, served, offline, sum(c.token_ids == text for c, text in zip(completions, texts, strict=True)), len(texts))
    assert found["is_within_tolerance"], found
    assert found["num_equal_texts"] == found["num_texts"] == 12
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1).close()
        except OSError:
            return
        time.sleep(0.5)
    pytest.fail("the server outlives its owner")
