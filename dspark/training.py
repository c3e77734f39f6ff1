"""The training loop, and the reference engine.

`train` owns everything that decides the numbers: which rows, the loss and its global denominators, the learning rate,
selection and resume. An engine owns how a step is carried out: `LocalEngine` is plain torch on one process; the DeepSpeed
engine (pipelines/backends/deepspeed.py) shards it and must give the same numbers.

One step: every rank builds its micro-batches, the denominators (known before any forward) are summed over ranks, each
micro-batch's loss is its numerators over those sums, and the engine adds gradients up over micro-batches and ranks.
"""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.blocks import valid_anchors
from dspark.config import LossConfig, TrainingConfig
from dspark.data import Ahead, RowDraw, RowOrder, RowSource, build_batch, num_labels
from dspark.drafters.base import Drafter, TrainingBatch
from dspark.losses import Denominators, block_losses, loss_weights
from dspark.storage import Storage

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
MUON_MOMENTUM = 0.95
PART_NORM_STEPS = 10  # every so many steps the gradient is gathered whole, to measure its parts
SELECT_SEED = 980406  # anchors of the select rows: the same at every evaluation of every run


class TrainEngine(Protocol):
    rank: int
    world_size: int
    device: torch.device

    def forward(self, batch: TrainingBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
        """The micro-batch's part of the loss, and `Losses.sums`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds this micro-batch's gradients; the sum over micro-batches and ranks is the step's gradient."""
        ...

    def part_norms(self) -> dict[str, float]:
        """Of the gradient that `step` is about to use: its norm in each part of the drafter; empty where it cannot be told.
        Every rank must call it."""
        ...

    def step(self, schedule: float) -> float | None:
        """Clips, steps at `schedule` times the peak learning rates, clears; returns the gradient norm before clipping, None
        where it cannot be told."""
        ...

    def all_sum(self, values: Tensor) -> Tensor: ...

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters in the compute precision, whole. Every rank must call it."""
        ...

    def save(self, folder: Path) -> None:
        """This rank's files of a checkpoint."""
        ...

    def load(self, folder: Path) -> None: ...


class DrafterLoss(torch.nn.Module):
    """A drafter with its loss: what an engine runs. Inside one forward, since a sharded engine lends weights only there."""

    def __init__(self, drafter: Drafter, config: LossConfig, chunk_rows: int) -> None:
        super().__init__()
        self.drafter, self._config, self._chunk_rows = drafter, config, chunk_rows

    def forward(self, batch: TrainingBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
        output, head = self.drafter(batch), self.drafter.head
        weights = loss_weights(batch, head, self._config, denominators.sum.dtype)
        losses = block_losses(output, batch, head, weights, denominators, self._config, self._chunk_rows)
        return losses.total, losses.sums()


EngineFactory = Callable[[DrafterLoss, TrainingConfig, int], TrainEngine]  # drafter, config, micro-batches a step and rank


class LocalEngine:
    """Plain torch on one process: AdamW and Muon, in bf16 with fp32 master weights like the sharded engine."""

    rank, world_size = 0, 1

    def __init__(self, module: DrafterLoss, config: TrainingConfig, num_micro_batches: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._module = module.to(self.device, DTYPES[config.precision])
        self._drafter = module.drafter
        self._clip_norm = config.clip_norm
        self._parameters = list(self._drafter.parameters())
        self._has_muon = config.muon_lr is not None
        is_mixed = config.precision == "bf16"
        self._masters = [p.detach().float().clone() for p in self._parameters] if is_mixed else self._parameters
        matrices = self._drafter.hidden_matrices() if config.muon_lr is not None else set()
        muon: list[Tensor] = []
        rest: list[Tensor] = []
        for (name, _), master in zip(self._drafter.named_parameters(), self._masters, strict=True):
            (muon if name in matrices else rest).append(master)
        adamw = torch.optim.AdamW(rest, lr=config.lr, weight_decay=config.weight_decay, fused=True)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [(adamw, config.lr)]
        if config.muon_lr is not None:
            muon_optimizer = torch.optim.Muon(muon, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=MUON_MOMENTUM)
            self._optimizers.append((muon_optimizer, config.muon_lr))

    def forward(self, batch: TrainingBatch, denominators: Denominators) -> tuple[Tensor, Tensor]:
        return self._module(batch, denominators)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def part_norms(self) -> dict[str, float]:
        return part_norms((name, parameter.grad) for name, parameter in self._drafter.named_parameters())

    def step(self, schedule: float) -> float | None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.grad.to(master.dtype) if parameter.grad is not None else torch.zeros_like(master)
        limit = math.inf if self._clip_norm is None else self._clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self._masters, limit)
        for optimizer, peak in self._optimizers:
            optimizer.param_groups[0]["lr"] = schedule * peak
            optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                parameter.grad = None
        return float(norm)

    def all_sum(self, values: Tensor) -> Tensor:
        return values

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._drafter.state_dict().items()}

    def save(self, folder: Path) -> None:
        if not self._has_muon:
            adamw = self._optimizers[0][0].state
            names = [name for name, _ in self._drafter.named_parameters()]
            masters = {
                name: {ADAMW_STATES[0]: m.detach(), **{k: adamw[m][k] for k in ADAMW_STATES[1:]}}
                for name, m in zip(names, self._masters, strict=True)
            }
            save_adamw(folder, masters, int(adamw[self._masters[0]]["step"]))
            return
        optimizers = [optimizer.state_dict() for optimizer, _ in self._optimizers]
        torch.save({"masters": [m.detach() for m in self._masters], "optimizers": optimizers}, folder / "engine.pt")

    def load(self, folder: Path) -> None:
        if not self._has_muon:
            saved, num_steps = load_adamw(folder)
            adamw = self._optimizers[0][0].state
            with torch.no_grad():
                for (name, parameter), master in zip(self._drafter.named_parameters(), self._masters, strict=True):
                    state = {key: tensor.to(self.device, master.dtype) for key, tensor in saved[name].items()}
                    master.copy_(state[ADAMW_STATES[0]])
                    parameter.copy_(master)
                    step = torch.tensor(float(num_steps), device=self.device)
                    adamw[master] = {"step": step, **{key: state[key] for key in ADAMW_STATES[1:]}}
            return
        state = torch.load(folder / "engine.pt", weights_only=True)
        with torch.no_grad():
            for master, parameter, saved in zip(self._masters, self._parameters, state["masters"], strict=True):
                master.copy_(saved)
                parameter.copy_(saved)
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def part_norms(gradients: Iterable[tuple[str, Tensor | None]]) -> dict[str, float]:
    """The norm of whole gradients, by the first word of a parameter's name."""
    squares: dict[str, float] = defaultdict(float)
    for name, gradient in gradients:
        if gradient is not None:
            squares[name.partition(".")[0]] += float(torch.linalg.vector_norm(gradient.float()).square())
    return {part: math.sqrt(square) for part, square in squares.items()}


ADAMW_STATES = ("master", "exp_avg", "exp_avg_sq")
_ENGINE_FILE = "engine.safetensors"


def save_adamw(folder: Path, state: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> None:
    """`engine.safetensors`: `<parameter>.<one of ADAMW_STATES>`, each whole. No engine, world size or ZeRO stage is in it."""
    tensors = {f"{name}.{key}": tensor.cpu().contiguous() for name, states in state.items() for key, tensor in states.items()}
    save_file(tensors, folder / _ENGINE_FILE, {"num_steps": str(num_steps)})


def load_adamw(folder: Path) -> tuple[dict[str, dict[str, Tensor]], int]:
    """What `save_adamw` wrote."""
    state: dict[str, dict[str, Tensor]] = {}
    with safe_open(folder / _ENGINE_FILE, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a dict
            name, _, kind = key.rpartition(".")
            state.setdefault(name, {})[kind] = file.get_tensor(key)
        return state, int(file.metadata()["num_steps"])


@dataclass(frozen=True)
class Memory:
    """What bounds a worker's memory, and changes the numbers by rounding alone."""

    micro_batch_sequences: int
    loss_chunk_rows: int


@dataclass
class TrainingData:
    """Where the rows to train on and to select by come from, and the order of the former."""

    order: RowOrder
    train: RowSource
    select: RowSource
    num_select: int
    block_size: int


@dataclass
class Prepared:
    """This rank's micro-batches of one step, read ahead."""

    batches: list[TrainingBatch]
    row_ids: list[str]
    label_coverage: tuple[int, int]  # tokens that are labels here, and those that could be: each follows a supervised one


@dataclass
class TrainState:
    """Everything besides the engine that a resume needs."""

    step: int = 0
    best_step: int = -1
    best_accepted_length: float = -1.0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    curves: list[dict[str, float]] = field(default_factory=list)


def schedule(step: int, config: TrainingConfig) -> float:
    """The share of the peak learning rates at a step, counted from 0: linear warm-up, then a cosine to zero."""
    warmup = max(round(config.warmup_fraction * config.num_steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(config.num_steps - warmup, 1)))


def train(
    drafter: Drafter,
    data: TrainingData,
    config: TrainingConfig,
    make_engine: EngineFactory,
    memory: Memory,
    storage: Storage,
    on_step: Callable[[Mapping[str, float]], None],
) -> TrainState:
    """Trains, or goes on from the newest whole checkpoint below `checkpoints/`. The best weights by expected accepted
    length on the select rows are in the returned state."""
    probe_world = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 1
    per_rank, left = divmod(config.batch_sequences, probe_world)
    num_micro, uneven = divmod(per_rank, min(memory.micro_batch_sequences, max(per_rank, 1)))
    if left or uneven or not per_rank:
        raise ValueError(
            f"stage.train.batch_sequences: {config.batch_sequences} does not divide into {probe_world} workers of micro-batches of {memory.micro_batch_sequences}. "
            "Fix: make it a multiple of cluster.train_workers x cluster.micro_batch_sequences"
        )
    engine = make_engine(DrafterLoss(drafter, config.loss, memory.loss_chunk_rows), config, num_micro)
    checkpoints = _Checkpoints(storage, engine, config.muon_lr is not None)
    state = checkpoints.load() or TrainState()

    def prepare(step: int) -> Prepared:
        draws = data.order.draws(step, config.batch_sequences)[engine.rank :: engine.world_size]
        rows = [(row, draw.anchor_seed) for row, draw in zip(data.train.read(draws), draws, strict=True)]
        size = len(rows) // num_micro
        batches = [build_batch(rows[i : i + size], config.num_anchors, data.block_size) for i in range(0, len(rows), size)]
        data.train.used((step + 1) * config.batch_sequences)
        coverage = sum(map(num_labels, batches)), sum(len(valid_anchors(row.loss_mask_T)) for row, _ in rows)
        return Prepared(batches, [row.row_id for row, _ in rows], coverage)

    data.train.used(state.step * config.batch_sequences)
    for prepared in Ahead(prepare, state.step, config.num_steps):
        try:
            metrics = _step(engine, drafter, data.block_size, config, prepared, state.step)
        except NonFiniteLossError as error:
            name = f"diverged/step-{state.step + 1:06d}-rank-{engine.rank}.json"
            saved = {"step": state.step + 1, "error": str(error), "row_ids": prepared.row_ids, "last_steps": state.curves[-10:]}
            storage.put(name, json.dumps(saved, indent=1).encode())
            raise ValueError(f"{error}. Fix: lower stage.train.lr, or inspect the rows in {storage.uri}/{name}") from None
        state.step += 1
        if state.step % config.select_every_steps == 0 or state.step == config.num_steps:
            selected = _select(engine, data, config, per_rank // num_micro)
            metrics |= selected
            if selected["select_accepted_length"] > state.best_accepted_length:
                state.best_step, state.best_accepted_length = state.step, selected["select_accepted_length"]
                state.best_weights = engine.weights()
        state.curves.append({"step": float(state.step), **metrics})
        on_step(state.curves[-1])
        if state.step % config.checkpoint_every_steps == 0 and state.step < config.num_steps:
            checkpoints.save(state)
    return state


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient norm of a step is infinite or NaN."""


def _step(
    engine: TrainEngine, drafter: Drafter, block_size: int, config: TrainingConfig, prepared: Prepared, step: int
) -> dict[str, float]:
    dtype = DTYPES[config.precision]
    batches = [batch.to(engine.device, dtype) for batch in prepared.batches]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [loss_weights(batch, drafter.head, config.loss, wide) for batch in batches]
    denominators = Denominators(*engine.all_sum(torch.stack([torch.stack([w.sum, w.sum_ce]) for w in weights]).sum(0)))
    totals = torch.zeros(6 + 2 * block_size, dtype=wide, device=engine.device)
    for batch in batches:
        total, sums = engine.forward(batch, denominators)
        engine.backward(total)
        totals += sums
    norms = engine.part_norms() if (step + 1) % PART_NORM_STEPS == 0 else {}
    grad_norm = engine.step(schedule(step, config))
    totals = engine.all_sum(totals)
    covered, labels = engine.all_sum(torch.tensor(prepared.label_coverage, dtype=wide, device=engine.device)).tolist()
    # A step in which no row counts has loss 0, as in the loss itself; one whose labels all lie outside still has TV.
    over = {"ce": denominators.sum_ce, "soft_ce": denominators.sum, "tv": denominators.sum, "confidence": denominators.sum}
    terms = {name: float(n / d) if d > 0 else 0.0 for (name, d), n in zip(over.items(), totals[:4], strict=True)}
    loss = sum(getattr(config.loss, f"alpha_{name}") * term for name, term in terms.items())
    if not math.isfinite(loss) or not math.isfinite(grad_norm or 0.0):
        raise NonFiniteLossError(f"training step {step + 1}: loss {loss}, gradient norm {grad_norm}; rows {', '.join(prepared.row_ids)}")
    metrics = {"loss": loss, **{f"loss_{name}": term for name, term in terms.items()}, "lr": schedule(step, config) * config.lr}
    metrics |= {"label_coverage": covered / max(labels, 1), **{f"grad_norm_{part}": norm for part, norm in norms.items()}}
    if grad_norm is not None:
        metrics["grad_norm"] = grad_norm
    return metrics | _acceptance(totals[4:], block_size, "train")


def _acceptance(totals: Tensor, block_size: int, split: str) -> dict[str, float]:
    """Teacher-forced metrics from (accepted-length sum, blocks, accept sums K, counts K)."""
    accept_K, count_K = totals[2 : 2 + block_size], totals[2 + block_size :]
    rates = {f"{split}_accept_rate_{k + 1}": float(accept_K[k] / count_K[k]) for k in range(block_size) if count_K[k] > 0}
    return {f"{split}_accepted_length": 1.0 + float(totals[0] / totals[1].clamp_min(1.0)), **rates}


@torch.no_grad()
def _select(engine: TrainEngine, data: TrainingData, config: TrainingConfig, micro_size: int) -> dict[str, float]:
    """Expected accepted length, teacher-forced, on the select rows with fixed anchors."""
    dtype = DTYPES[config.precision]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    totals = torch.zeros(6 + 2 * data.block_size, dtype=wide, device=engine.device)
    nothing = Denominators(totals[0], totals[0])
    size = micro_size * engine.world_size  # a rank's memory is sized for micro-batches
    for start in range(0, data.num_select, size):
        draws = _select_draws(data, start, size)
        mine = draws[engine.rank :: engine.world_size] or draws[:1]
        _, sums = engine.forward(_select_batch(data, config, mine).to(engine.device, dtype), nothing)
        if draws[engine.rank :: engine.world_size]:
            totals += sums
    return _acceptance(engine.all_sum(totals)[4:], data.block_size, "select")


def select_batches(data: TrainingData, config: TrainingConfig, num_sequences: int) -> Iterator[TrainingBatch]:
    """All select rows with their fixed anchors, so many sequences at once."""
    for start in range(0, data.num_select, num_sequences):
        yield _select_batch(data, config, _select_draws(data, start, num_sequences))


def _select_draws(data: TrainingData, start: int, num_sequences: int) -> list[RowDraw]:
    return [RowDraw(n, n, (SELECT_SEED, n)) for n in range(start, min(start + num_sequences, data.num_select))]


def _select_batch(data: TrainingData, config: TrainingConfig, draws: Sequence[RowDraw]) -> TrainingBatch:
    rows = [(row, draw.anchor_seed) for row, draw in zip(data.select.read(draws), draws, strict=True)]
    return build_batch(rows, config.num_anchors, data.block_size)


class _Checkpoints:
    """`checkpoints/step-000200/`: every rank's engine files, the state, and `complete.json` last. The last two are kept."""

    COMPLETE = "complete.json"

    def __init__(self, storage: Storage, engine: TrainEngine, is_bound: bool) -> None:
        """is_bound: the engine's files are of its world size."""
        self._storage, self._engine, self._is_bound = storage, engine, is_bound

    def _whole(self) -> list[str]:
        suffix = f"/{self.COMPLETE}"
        return [name.removesuffix(suffix) for name in self._storage.list("checkpoints/") if name.endswith(suffix)]

    def save(self, state: TrainState) -> None:
        folder = f"checkpoints/step-{state.step:06d}"
        with tempfile.TemporaryDirectory() as temporary:
            local = Path(temporary)
            self._engine.save(local)
            if self._engine.rank == 0:
                save_file({name: tensor.cpu().contiguous() for name, tensor in state.best_weights.items()}, local / "best.safetensors")
            for path in sorted(p for p in local.rglob("*") if p.is_file()):
                self._storage.put_file(f"{folder}/{path.relative_to(local)}", path)
        self._engine.all_sum(torch.zeros(1))  # every rank has written before the receipt says so
        if self._engine.rank == 0:
            record = {
                "step": state.step,
                "best_step": state.best_step,
                "best_accepted_length": state.best_accepted_length,
                "curves": state.curves,
            }
            record |= {"world_size": self._engine.world_size, "is_bound": self._is_bound}
            self._storage.put(f"{folder}/{self.COMPLETE}", json.dumps(record).encode())
            for old in self._whole()[:-2]:
                for name in [f"{old}/{self.COMPLETE}", *self._storage.list(f"{old}/")]:
                    self._storage.remove(name)

    def load(self) -> TrainState | None:
        folders = self._whole()
        if not folders:
            return None
        record: dict[str, Any] = json.loads(self._storage.read(f"{folders[-1]}/{self.COMPLETE}"))
        if record["is_bound"] and record["world_size"] != self._engine.world_size:
            raise ValueError(
                f"{folders[-1]}: saved by {record['world_size']} workers, now {self._engine.world_size}, and Muon's state stays as it was sharded. "
                f"Fix: set cluster.train_workers={record['world_size']}; with stage.train.muon_lr=null a run goes on with any number"
            )
        with tempfile.TemporaryDirectory() as temporary:
            local = Path(temporary)
            for name in self._storage.list(f"{folders[-1]}/"):
                path = local / name.removeprefix(f"{folders[-1]}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._storage.open(name) as source, path.open("wb") as file:
                    while chunk := source.read(1 << 24):
                        file.write(chunk)
            self._engine.load(local)
            best = load_file(local / "best.safetensors")
        return TrainState(record["step"], record["best_step"], record["best_accepted_length"], best, record["curves"])
