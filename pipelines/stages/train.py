"""train: a drafter from the target cache, by the loop of `dspark.training` on whatever engine the cluster has.

The draft vocabulary is fixed first: the most frequent tokens of the training responses, plus stop and special tokens; its
coverage of the responses is reported. Then a gang of workers trains, going on from the last whole checkpoint if there is
one. The artifact is `drafter/` (layout: dspark/checkpoint.py) with the weights that were best on the select rows,
`vocabulary.json`, `curves.jsonl` (one line a step) and `curves.png`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.cache import CacheReader
from dspark.config import DSparkConfig
from dspark.storage import Storage
from pipelines import artifacts, stream
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, Resources, file_checksums
from pipelines.figures import png
from pipelines.flow import CacheContent, CacheTargetsConfig, TrainConfig
from pipelines.runner import Progress, Report, Work
from pipelines.stages.cache_targets import CAPTURER, cache_identity, capture_settings, corpus_rows
from pipelines.stages.regenerate import read_shard
from pipelines.targets import local_folder

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.training import EngineFactory, TrainingData

VOCABULARY, CURVES, FIGURE = "vocabulary.json", "curves.jsonl", "curves.png"


@dataclass(frozen=True)
class Settings:
    config: TrainConfig
    target_uri: str
    corpus: Artifact
    cache: Artifact  # with no files: states are streamed
    out_uri: str
    resources: Resources


def run(config: TrainConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    vocabulary = survey(config, inputs["corpus"], work.resources.target_uri)
    out.put(VOCABULARY, json.dumps(vocabulary).encode())
    work.report(Progress(0, config.train.num_steps, "steps"))
    settings = Settings(config, work.resources.target_uri, inputs["corpus"], inputs["cache"], out.uri, work.resources)
    with nullcontext() if inputs["cache"].record["files"] else producers(settings, work) as window:
        result = work.gang("pipelines.stages.train:train_worker", settings)
    for name in out.list(f"{stream.FOLDER}/"):
        out.remove(name)
    out.sweep()  # of engines that were killed
    curves = [json.loads(line) for line in out.read(CURVES).splitlines()]
    out.put(FIGURE, _figure(curves))
    for name in out.list("checkpoints/"):
        out.remove(name)
    metrics = {**result, "draft_vocab_size": float(vocabulary["size"]), "draft_vocab_coverage": vocabulary["coverage"]}
    if window is not None:
        metrics["rows_set_aside"] = float(len(window.set_aside))
    names = [VOCABULARY, CURVES, FIGURE, *out.list(f"{artifacts.Drafter.FOLDER}/")]
    return Outcome(file_checksums(out, names), metrics, (FIGURE,))


def survey(config: TrainConfig, corpus: Artifact, target_uri: str) -> dict[str, Any]:
    """The draft vocabulary, from the tokens of the training responses: `ids` ascending, or None for the whole vocabulary;
    `coverage`: share of these tokens inside. ValueError when no response is as long as a block."""
    from dspark.chat import ChatTokenizer
    from dspark.target import read_shape

    folder, storage, longest = local_folder(target_uri), open_storage(corpus.uri), 0
    vocab_size = read_shape(folder).vocab_size
    counts = np.zeros(vocab_size, np.int64)
    for file in sorted(name for name in corpus.record["files"] if name.endswith(".parquet")):
        for row in read_shard(storage, file, ("split", "token_ids", "loss_mask")):
            response = np.asarray(row["token_ids"])[np.asarray(row["loss_mask"], bool)]
            longest = max(longest, len(response))
            if row["split"] == "train":
                counts += np.bincount(response, minlength=vocab_size)
    if config.drafter.block_size >= longest:
        raise ValueError(
            f"drafter.block_size: {config.drafter.block_size} does not fit any response, the longest has {longest} tokens. Fix: drafter.block_size={max(longest - 1, 1)}"
        )
    if config.drafter.draft_vocab_size is None:
        return {"ids": None, "size": vocab_size, "coverage": 1.0}
    frequent = np.argsort(-counts, kind="stable")[: config.drafter.draft_vocab_size]
    chosen = set(frequent[counts[frequent] > 0].tolist()) | set(ChatTokenizer(folder).special_ids)
    ids = sorted(chosen)
    return {"ids": ids, "size": len(ids), "coverage": float(counts[ids].sum() / max(counts.sum(), 1))}


def train_worker(settings: Settings, make_engine: "EngineFactory", report: Report) -> dict[str, float]:
    """One process of the gang; rank 0 writes the drafter and its result is the step's."""
    import torch

    from dspark.checkpoint import save_drafter
    from dspark.drafters import build_drafter
    from dspark.losses import loss_bytes
    from dspark.target import load_head
    from dspark.training import DTYPES, Memory, train

    config, out = settings.config, open_storage(settings.out_uri)
    ids = json.loads(out.read(VOCABULARY))["ids"]
    head = load_head(local_folder(settings.target_uri), DTYPES[config.train.precision])
    draft_ids = None if ids is None else torch.tensor(ids)
    drafter = build_drafter(config.drafter, head.shape, config.tapped_layers, config.mask_token_id, head.tables, draft_ids)
    drafter.initialise(config.train.seed)
    data = stored_data(settings) if settings.cache.record["files"] else streamed_data(settings)

    def on_step(metrics: Mapping[str, float]) -> None:
        report(Progress(int(metrics["step"]), config.train.num_steps, "steps", {k: v for k, v in metrics.items() if k != "step"}))

    predicted = {"predicted_loss_bytes": float(loss_bytes(settings.resources.loss_chunk_rows, drafter.head, config.train.loss))}
    report(Progress(0, config.train.num_steps, "steps", predicted))
    memory = Memory(settings.resources.micro_batch_sequences, settings.resources.loss_chunk_rows)
    state = train(drafter, data, config.train, make_engine, memory, out, on_step)
    best = {"best_step": float(state.best_step), "select_accepted_length": state.best_accepted_length}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        if config.train.refit_confidence and isinstance(config.drafter, DSparkConfig):
            best |= _refit_confidence(drafter, state.best_weights, data, settings)
        save_drafter(out, artifacts.Drafter.FOLDER, drafter, state.best_weights, config.target.weights, best)
        out.put(CURVES, "".join(json.dumps(point) + "\n" for point in state.curves).encode())
    num_parameters = sum(parameter.numel() for parameter in state.best_weights.values())
    return {**best, "final_loss": state.curves[-1]["loss"], "num_parameters": float(num_parameters)}


def _refit_confidence(drafter: "Drafter", weights: dict[str, Any], data: "TrainingData", settings: Settings) -> dict[str, float]:
    """Puts another confidence head into the weights; the drafter itself may be sharded, so a new one is built."""
    import torch

    from dspark.drafters import build_drafter
    from dspark.drafters.dspark import DSpark
    from dspark.refit import refit_confidence
    from dspark.target import load_head
    from dspark.training import DTYPES, select_batches

    train, device = settings.config.train, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[train.precision]
    tables = load_head(local_folder(settings.target_uri), dtype).tables
    whole = build_drafter(drafter.config, drafter.shape, drafter.tapped_layers, drafter.mask_token_id, tables, drafter.draft_ids_W.cpu())
    assert isinstance(whole, DSpark)
    whole.to(device, dtype).load_state_dict(weights)
    batches = select_batches(data, train, settings.resources.micro_batch_sequences)
    found = refit_confidence(whole, (batch.to(device, dtype) for batch in batches))
    weights |= {name: tensor for name, tensor in whole.state_dict().items() if name.startswith("confidence_head.")}
    is_refitted = {"confidence_is_refitted": float(found.is_better)}
    return {**is_refitted, "confidence_bce_before_refit": found.bce_before, "confidence_bce_after_refit": found.bce_after}


def stored_data(settings: Settings) -> "TrainingData":
    from dspark.data import CachedRows, RowOrder
    from dspark.training import TrainingData

    config = settings.config
    cache = CacheReader(open_storage(settings.cache.uri), cache_identity(config))
    train, select = CachedRows(cache, "train"), CachedRows(cache, "select")
    _require_rows({"train": train.numbers, "select": select.numbers})
    order = RowOrder(train.shard_rows, config.train.window_shards, config.train.row_uses, config.train.seed)
    return TrainingData(order, train, select, len(select.numbers), config.drafter.block_size)


def streamed_data(settings: Settings) -> "TrainingData":
    import torch

    from dspark.training import TrainingData

    plan, num_bytes = stream_plan(settings), stream.unit_bytes(settings.resources.cache.window_bytes)
    storage = open_storage(f"{settings.out_uri}/{stream.FOLDER}")
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    train, select = stream.StreamedRows(storage, plan, num_bytes, rank), stream.StreamedSelect(storage, plan, num_bytes)
    return TrainingData(plan.order, train, select, len(plan.select), settings.config.drafter.block_size)


def stream_plan(settings: Settings) -> stream.StreamPlan:
    """Made in the driver and, alike, in each worker."""
    rows, _ = corpus_rows(settings.corpus, captured(settings))
    train = settings.config.train
    plan = stream.StreamPlan.of(rows, train.window_shards, train.row_uses, train.seed)
    _require_rows({"train": plan.train, "select": plan.select})
    return plan


def captured(settings: Settings) -> CacheTargetsConfig:
    """What the streamed states are: the config of the step that would have stored them."""
    config, stage = settings.config, settings.resources.cache
    return CacheTargetsConfig(CacheContent.of(stage), config.target, config.tapped_layers, config.width, config.mask_token_id)


def producers(settings: Settings, work: Work) -> stream.Producers:
    """Engines beside the training, that make what it is about to read."""
    config, resources = settings.config.train, settings.resources
    storage = open_storage(f"{settings.out_uri}/{stream.FOLDER}")
    num_slots = config.num_steps * config.batch_sequences
    ranks, window_bytes = resources.num_workers, resources.cache.window_bytes
    window = stream.Window(storage, stream_plan(settings), window_bytes, ranks, num_slots, config.batch_sequences)
    engines = replace(resources, num_workers=resources.num_producers)
    capture = capture_settings(captured(settings), settings.corpus, engines, storage)
    return stream.Producers(work.beside(engines), capture, window, CAPTURER)


def _require_rows(rows: Mapping[str, Sequence[object]]) -> None:
    for split, found in rows.items():
        if not found:
            raise ValueError(f"the target cache holds no {split} row. Fix: more prompts in that split (stage.prompts.limits.{split})")


def _figure(curves: list[dict[str, float]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("loss", "loss_ce", "loss_tv", "loss_confidence"):
        left.plot([point["step"] for point in curves], [point[name] for point in curves], label=name, linewidth=0.8)
    left.set(xlabel="step", yscale="log", title="training loss")
    right.plot([p["step"] for p in curves], [p["train_accepted_length"] for p in curves], label="train", linewidth=0.8)
    selected = [point for point in curves if "select_accepted_length" in point]
    right.plot([p["step"] for p in selected], [p["select_accepted_length"] for p in selected], "o-", label="select")
    right.set(xlabel="step", title="expected accepted length (teacher-forced)")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    return png(figure)
