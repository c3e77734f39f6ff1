"""Every file in conf/ composes and validates, and a wrong one is answered with field, value, rule and fix."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipelines import config, flow, targets
from pipelines.benchmarks import ON_HUB
from pipelines.config import PROJECT_ROOT, compose
from pipelines.dag import fingerprint
from pipelines.settings import STEPS

CONF = PROJECT_ROOT / "conf"
CONTENDERS = sorted(path.stem for path in (CONF / "contender").glob("*.yaml"))
EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml") if p.stem != "paper_recipe")
CHOICES = [(group, path.stem) for group in ("drafter", "data", "cluster", "target") for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def known_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Composition must not depend on which models are on this machine, nor on its processor."""
    (tmp_path / "with_bf16").write_text("flags : fpu amx_bf16")
    monkeypatch.setattr(config, "CPU_INFO", tmp_path / "with_bf16")
    monkeypatch.setattr(targets, "_existing", lambda source: Path(source.path))
    known = {"weights_sha256": "w", "tokenizer_sha256": "t", "chat_template_sha256": "c"}
    monkeypatch.setattr(targets, "read_identity", lambda folder: known)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes_and_wires_every_step(experiment: str) -> None:
    settings, _ = compose([f"experiment={experiment}"])
    steps = flow.build(settings)
    names = tuple(step.name for step in steps)
    until = {"paper_gemma4_12b": "schedule", "compare": "evaluate"}.get(experiment, STEPS[-1])
    assert names == STEPS[: STEPS.index(until) + 1]
    assert len({fingerprint(step) for step in steps}) == len(steps)


def test_comparison_sweeps_every_contender() -> None:
    swept = yaml.safe_load((CONF / "experiment" / "compare.yaml").read_text())["hydra"]["sweeper"]["params"]
    assert sorted(swept["contender"].split(",")) == CONTENDERS
    assert len(set(swept["stage.train.seed"].split(","))) == 3


@pytest.mark.parametrize("contender", CONTENDERS)
def test_contender_is_a_drafter_with_a_loss_whatever_the_experiment_says(contender: str) -> None:
    settings, _ = compose(["experiment=compare", f"contender={contender}"])
    assert flow.build(settings)
    assert settings.drafter.kind == contender.partition("_")[0]
    loss = contender if contender in ("eagle3", "mtp") else "ce" if "_ce" in contender else "dspark"
    assert settings.stage.train.loss == compose([f"loss={loss}"])[0].stage.train.loss
    assert settings.drafter.block_size == (1 if contender == "mtp" else 4)
    assert getattr(settings.drafter, "num_layers", 1) == (1 if "1layer" in contender or contender in ("eagle3", "mtp") else 2)


def test_papers_experiment_evaluates_its_nine_benchmarks_from_the_hub() -> None:
    settings, _ = compose(["experiment=paper_qwen3_4b"])
    assert settings.stage.evaluate.benchmarks == dict.fromkeys(ON_HUB, "hub")
    assert len(ON_HUB) == 9


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_choice_of_a_group_composes(group: str, choice: str) -> None:
    settings, _ = compose([f"{group}={choice}"])
    assert flow.build(settings)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stage.train.lrr=1"], ["stage.train.lrr", "did you mean stage.train.lr"]),
        (["stage.train.lr=fast"], ["stage.train.lr", "'fast'", "number"]),
        (["stage.train.clip_norm=1.0"], ["stage.train.clip_norm: 1.0", "Muon", "stage.train.muon_lr=null"]),
        (["stage.train.muon_lr=0"], ["stage.train.muon_lr", "above 0"]),
        (
            ["stage.trace.settings=[{temperature: -1, draft_mode: greedy, ablation: null}]"],
            ["stage.trace.settings.0.temperature: -1", "at least 0"],
        ),
        (
            ["stage.trace.settings=[{temperature: 0, draft_mode: greedy, ablation: no_markov}]"],
            ["stage.trace.settings.0.ablation", "null"],
        ),
        (["stage.trace.settings=[]"], ["stage.trace.settings: []", "the first is the one that is served"]),
        (["stage.calibrate.num_folds=1"], ["stage.calibrate.num_folds: 1", "at least 2"]),
        (["stage.profile_sps.engines=[vllm]"], ["stage.profile_sps.engines", "decoding"]),
        (["stage.profile_sps.batch_tokens=[8,4]"], ["stage.profile_sps.batch_tokens: [8, 4]", "ascending"]),
        (["stage.schedule.thresholds=[1.5]"], ["stage.schedule.thresholds", "0 to 1"]),
        (["stage.profile_sps.context_tokens=[256,256]"], ["stage.profile_sps.context_tokens: [256, 256]", "ascending"]),
        (["stage.schedule.concurrencies=[1,300]"], ["stage.schedule.concurrencies: [1, 300]", "stage.profile_sps.num_requests from 1 to 300"]),
        (["stage.train.num_steps=1.5"], ["stage.train.num_steps", "1.5"]),
        (["target=llama9"], ["target", "'llama9'", "smollm2_135m"]),
        (["experiment=tinny"], ["experiment", "tiny"]),
        (["until=trane"], ["until", "trane", "evaluate"]),
        (["rebuild=[regen]"], ["rebuild", "regenerate"]),
        (["drafter.markov_rank=0"], ["drafter.markov_rank", "drafter=dflash"]),
        (["target.tapped_layers=[8,1]"], ["target.tapped_layers", "ascending"]),
        (["target.tapped_layers=[1,29]"], ["target.tapped_layers: [1, 29]", "between 0 and 28", "for example"]),
        (["drafter=mtp", "drafter.block_size=2"], ["drafter.block_size: 2", "drafter.block_size=1"]),
        (["drafter.sliding_layers=[0,2]", "drafter.sliding_window=64"], ["drafter.sliding_layers: [0, 2]", "num_layers - 1 = 1"]),
        (["drafter.sliding_layers=[1]"], ["drafter.sliding_window: None", "at least 1", "drafter.sliding_window=512"]),
        (["drafter=dflash", "drafter.sliding_window=64"], ["drafter.sliding_window: 64", "null without"]),
        (["drafter.sequential_head=rnn", "drafter.markov_rank=0"], ["drafter.markov_rank: 0", "rnn head needs rank 1"]),
        (["drafter.sequential_head=none"], ["drafter.markov_rank: 64", "drafter.markov_rank=0"]),
        (["stage.prompts.fractions.train=0.9"], ["stage.prompts.fractions", "add up to 1"]),
        (["stage.train.batch_sequences=7", "cluster.micro_batch_sequences=2"], ["stage.train.batch_sequences", "multiple of 2"]),
        (["cluster.train_engine=deepspeed", "cluster.executor=local"], ["cluster.train_engine", "cluster=ray"]),
        (["stage.evaluate.settings=[{temperature: 1.0, draft_mode: probabilistic, ablation: null, top: 1}]"], ["stage.evaluate.settings.0.top", "unknown"]),
        (["stage.evaluate.settings=[{temperature: 1.0, draft_mode: greedy, ablation: null, top_p: 0}]"], ["stage.evaluate.settings.0.top_p: 0.0", "at most 1"]),
        (["stage.evaluate.settings=[{temperature: 1.0, draft_mode: greedy, ablation: null, top_k: -1}]"], ["stage.evaluate.settings.0.top_k: -1", "no filter"]),
        (["stage.evaluate.settings=[{temperature: 0, draft_mode: greedy, ablation: null, top_k: 5}]"], ["stage.evaluate.settings.0", "temperature 0"]),
        (["stage.evaluate.settings=[{temperature: 0, draft_mode: greedy, ablation: null, policy: fixed_0}]"], ["settings.0.policy: 'fixed_0'", "threshold_<"]),
        (["stage.evaluate.settings=[{temperature: 0, draft_mode: greedy, ablation: null, policy: threshold_1.5}]"], ["settings.0.policy: 'threshold_1.5'"]),
        (["drafter=dflash", "stage.evaluate.settings=[{temperature: 0, draft_mode: greedy, ablation: null, policy: threshold_0.5}]"], ["no confidences"]),
        (["stage.evaluate.settings=[{temperature: 0, draft_mode: greedy, ablation: null},{temperature: 0.0, draft_mode: greedy, ablation: null}]"], ["two are the same"]),
        (["stage.trace.settings=[{temperature: 0, draft_mode: greedy, ablation: null, policy: fixed_1}]"], ["stage.trace.settings.0.policy: 'fixed_1'", "whole blocks"]),
        (["stage.trace.settings=[{temperature: 1, draft_mode: greedy, ablation: null, top_p: 2}]"], ["stage.trace.settings.0.top_p: 2.0", "at most 1"]),
        (["stage.trace.settings=[{temperature: 0, draft_mode: greedy, ablation: null},{temperature: 0.0, draft_mode: greedy, ablation: null}]"], ["stage.trace.settings: ", "two are the same"]),
        (["stage.evaluate.engine=vllm", "stage.evaluate.serving=null"], ["stage.evaluate.serving: None", "evaluate.yaml"]),
        (["stage.evaluate.engine=vllm", "stage.evaluate.serving.method=dspark"], ["stage.evaluate.serving.method: 'dspark'", "GPU", "method=ngram"]),
        (["stage.evaluate.engine=vllm", "stage.evaluate.serving.method=dspark", "cluster.gpus_per_worker=1"], ["num_speculative_tokens: 4", "block_size = 7"]),
        (["stage.evaluate.engine=vllm", "stage.evaluate.serving.min_ngram=5"], ["stage.evaluate.serving.min_ngram: 5", "at most max_ngram"]),
        (["stage.evaluate.engine=vllm", "stage.evaluate.serving.tolerance=0"], ["stage.evaluate.serving.tolerance: 0.0", "above 0"]),
        (["stage.evaluate.engine=vllm", "cluster.serving_url=localhost:8000"], ["cluster.serving_url: 'localhost:8000'", "http://"]),
        (["stage.evaluate.thresholds=[0.5,2]"], ["stage.evaluate.thresholds: [0.5, 2.0]", "0 to 1"]),
        (["stage.evaluate.context_edges_tokens=[64,128]"], ["stage.evaluate.context_edges_tokens: [64, 128]", "begin with 0"]),
        (["stage.evaluate.turns=both"], ["stage.evaluate.turns", "'both'", "'first' or 'all'"]),
        (["stage.evaluate.benchmarks={gsm9k: hub}"], ["stage.evaluate.benchmarks.gsm9k: 'hub'", "gsm8k", "JSONL"]),
        (["stage.evaluate.benchmarks={test: x.jsonl}"], ["stage.evaluate.benchmarks.test: 'x.jsonl'", "another name"]),
        (["stage.evaluate.max_new_tokens=100000"], ["stage.evaluate.max_new_tokens", "1023"]),
        (["stage.cache_targets.max_bytes=0"], ["stage.cache_targets.max_bytes: 0", "above 0", "null"]),
        (["stage.cache_targets.window_bytes=0"], ["stage.cache_targets.window_bytes: 0", "at least 1", "2000000000"]),
        (["stage.cache_targets.num_top_logits=0"], ["stage.cache_targets.num_top_logits: 0", "at least 1"]),
        (["stage.cache_targets.assumed_prompt_tokens=0"], ["stage.cache_targets.assumed_prompt_tokens: 0", "at least 1"]),
        (["stage.cache_targets.assumed_response_tokens=-1"], ["stage.cache_targets.assumed_response_tokens: -1", "at least 1"]),
        (["target.width=0"], ["target.width: 0", "at least 1", "hidden_size"]),
        (["stage.cache_targets.dtype=fp4"], ["stage.cache_targets.dtype: 'fp4'", "'bf16' or 'fp8'"]),
        (["nonsense"], ["nonsense", "overrides look like"]),
    ],
)  # fmt: skip
def test_wrong_setting_is_answered_with_field_and_fix(overrides: list[str], expected: list[str]) -> None:
    with pytest.raises(ValueError, match="Fix:") as caught:
        compose(overrides)
    text = str(caught.value)
    assert all(part in text for part in [*expected, "Fix:"]), text
    assert len(text) < 600


@pytest.mark.parametrize("overrides", [["stage.cache_targets.mode=stream"], ["stage.cache_targets.max_bytes=1"]])
def test_setting_of_the_cache_that_needs_nothing_else_composes(overrides: list[str]) -> None:
    assert flow.build(compose(overrides)[0])


def test_fingerprint_changes_with_identity_and_not_with_execution() -> None:
    def fingerprints(*overrides: str) -> dict[str, str]:
        return {step.name: fingerprint(step) for step in flow.build(compose(list(overrides))[0])}

    base = fingerprints()
    moved = fingerprints(
        "cluster.root=s3://bucket/x",
        "cluster.serving_url=http://x:8000",
        "cluster.train_workers=4",
        "cluster.zero_stage=3",
        "cluster.micro_batch_sequences=2",
    )
    assert moved == base
    moved = fingerprints("cluster=gpu")  # only the measurement of a stack, and what is made of it
    assert {name for name in base if moved[name] != base[name]} == {"profile_sps", "schedule", "publish"}
    changed = fingerprints("stage.train.lr=2e-4")
    assert {name for name in base if changed[name] != base[name]} == set(STEPS[3:])
    changed = fingerprints("stage.evaluate.max_new_tokens=64")
    assert {name for name in base if changed[name] != base[name]} == {"evaluate", "publish"}
    changed = fingerprints("target.tapped_layers=[2,8,14]")
    assert {name for name in base if changed[name] != base[name]} == set(STEPS[2:])


@pytest.mark.parametrize(
    ("flags", "precision"), [("avx2 amx_bf16", "bf16"), ("avx512_bf16", "bf16"), ("avx2 avx512f", "fp32"), (None, "fp32")]
)
def test_default_experiment_is_the_one_that_suits_the_processor(
    flags: str | None, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CPU_INFO", tmp_path / "cpuinfo")
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu sse {flags} clflush\n")
    stages = [compose(words)[0].stage for words in ([], ["experiment=small"], ["experiment=small_fp32"])]
    assert [s.train.precision for s in stages] == [s.evaluate.precision for s in stages] == [precision, "bf16", "fp32"]


def test_plan_imports_no_heavy_library() -> None:
    code = (
        "import sys; from pipelines import __main__, flow; from pipelines.config import compose; compose(['experiment=paper_qwen3_4b']);"
        "flow.build(compose(['experiment=paper_qwen3_4b'])[0]); print([m for m in ('torch','ray','mlflow','vllm','transformers','pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT_ROOT)
    assert done.stdout.strip() == "[]"
