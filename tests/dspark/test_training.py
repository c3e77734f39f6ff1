"""The training loop: determinism, resume, micro-batches, ranks, batches without work, and golden curves."""

import dataclasses
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.blocks import attention_mask
from dspark.cache import CacheFormat
from dspark.config import LossConfig
from dspark.data import RowDraw, build_batch
from dspark.losses import Denominators, loss_weights
from dspark.storage import LocalStorage
from dspark.training import DrafterLoss, LocalEngine, Memory, schedule, train
from tests import oracles
from tests.dspark import tiny

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
REWRITE = "DSPARK_REWRITE_GOLDEN"  # DSPARK_REWRITE_GOLDEN=1 pytest tests/dspark/test_training.py -k golden


def _data(folder, sequences=None, form=tiny.FORM, **order):
    """`order`: window_shards or row_uses other than the tiny ones."""
    cache = tiny.write_cache(folder / "cache", tiny.rows(form=form) if sequences is None else sequences, form=form)
    return tiny.training_data(cache, _config(**order))


@pytest.fixture
def data(tmp_path):
    return _data(tmp_path)


class Run:
    """One call of `train`, keeping its engine."""

    def __init__(
        self,
        data,
        config,
        storage,
        kind="dspark",
        micro=4,
        draft_ids=None,
        seed=2,
        on_step=lambda metrics: None,
        engine=LocalEngine,
        chunk_rows=7,
    ):
        def make_engine(module, config, num_micro):
            self.engine = engine(module, config, num_micro)
            return self.engine

        self.drafter = tiny.drafter(kind, draft_ids, seed=seed)
        self.state = train(self.drafter, data, config, make_engine, Memory(micro, chunk_rows), LocalStorage(str(storage)), on_step)
        self.curves, self.weights = self.state.curves, self.engine.weights()

    def column(self, name):
        return [step[name] for step in self.curves]


def _config(**changes):
    return dataclasses.replace(tiny.TRAINING, **changes)


def _equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- equations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
def test_first_step_has_the_loss_of_the_oracle_from_cache_to_total(data, tmp_path, draft_ids):
    config = _config(num_steps=1, select_every_steps=1)
    found = Run(data, config, tmp_path, micro=2, draft_ids=draft_ids).curves[0]
    drafter, rows = tiny.drafter("dspark", draft_ids), []
    draws = data.order.draws(0, config.batch_sequences)
    for row, draw in zip(data.train.read(draws), draws, strict=True):
        one = build_batch([(row, draw.anchor_seed)], config.num_anchors, tiny.BLOCK)
        anchors, tapped = one.anchors_BA[0].tolist(), one.context.tapped_SLD.double()
        mask = attention_mask(one.anchors_BA[0].numpy(), len(tapped), tiny.BLOCK)
        output = oracles.drafter_rows(drafter, tapped, anchors, one.previous_BAK[0].tolist(), mask)
        target = one.final_BAKD[0].double() @ tiny.tables().lm_head_VD.T
        rows += zip(output.logits_AKW.tolist(), target.tolist(), one.label_BAK[0].tolist(), output.confidence_AK.tolist(), strict=True)
    loss = oracles.loss(*zip(*rows, strict=True), drafter.draft_ids_W.tolist(), config.loss.position_decay)
    assert found["loss"] == pytest.approx(loss.total((0.1, 0.9, 1.0)), rel=1e-6)  # the cache keeps log-sum-exp in fp32
    assert found["loss_tv"] == pytest.approx(loss.tv / loss.sum_weights, rel=1e-6)
    assert found["train_accepted_length"] == pytest.approx(loss.accepted_length(), rel=1e-6)


def test_step_of_the_engine_equals_adamw_written_out():
    config = _config(lr=1e-2, weight_decay=0.1, clip_norm=0.05)
    drafter = tiny.drafter("dspark")
    engine = LocalEngine(DrafterLoss(drafter, config.loss, 7), config, 1)
    rows = tiny.rows(2, 0)
    batch = build_batch([(rows[0], (1,)), (rows[1], (2,))], 6, tiny.BLOCK).to(engine.device, torch.float64)
    weights = loss_weights(batch, drafter.head, config.loss, torch.float64)
    wanted = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    first, second = ({name: torch.zeros_like(p) for name, p in wanted.items()} for _ in range(2))
    for step, share in enumerate((1.0, 0.5), start=1):
        lr = share * config.lr
        engine.backward(engine.forward(batch, Denominators(weights.sum, weights.sum_ce))[0])
        gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
        norm = sum(float((g * g).sum()) for g in gradients.values()) ** 0.5
        parts = engine.part_norms()
        assert set(parts) == {"fc", "hidden_norm", "layers", "norm", "markov_head", "confidence_head"}
        assert parts["fc"] == pytest.approx(float(gradients["fc.weight"].norm()), rel=1e-6)
        assert sum(part**2 for part in parts.values()) == pytest.approx(norm**2, rel=1e-6)
        assert engine.step(share) == pytest.approx(norm, rel=1e-12)
        assert norm > config.clip_norm
        for name, w in wanted.items():
            g = gradients[name] * (config.clip_norm / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g * g
            update = first[name] / (1 - 0.9**step) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            wanted[name] = w - lr * 0.1 * w - lr * update
        assert all(torch.allclose(p, wanted[name], atol=1e-12) for name, p in drafter.named_parameters())


def test_muon_moves_matrices_by_orthogonal_steps_and_the_rest_by_adamw():
    """A first step is U f(S) V^T of the gradient, f five Newton-Schulz iterations on its normalised singular values, times the
    rate and sqrt(max(1, rows / columns)); heads and norms move as without Muon."""
    moved = {}
    for muon_lr in (None, 0.02):
        drafter = tiny.drafter("dspark")
        before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
        config = _config(muon_lr=muon_lr, clip_norm=None)
        engine = LocalEngine(DrafterLoss(drafter, config.loss, 7), config, 1)
        generator = np.random.default_rng(3)
        gradients = {name: torch.from_numpy(generator.normal(size=p.shape)) for name, p in drafter.named_parameters()}
        for name, p in drafter.named_parameters():
            p.grad = gradients[name].clone()
        engine.step(0.5)
        moved[muon_lr] = {name: p.detach() - before[name] for name, p in drafter.named_parameters()}
    matrices = drafter.hidden_matrices()
    assert len(matrices) == 1 + 2 * 7
    assert not any("markov" in name or "norm" in name for name in matrices)
    for name, delta in moved[0.02].items():
        if name not in matrices:
            assert torch.equal(delta, moved[None][name]), name
            continue
        rows, columns = delta.shape
        U, S, Vh = torch.linalg.svd(gradients[name], full_matrices=False)
        S = S / S.norm()
        for _ in range(5):
            S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
        wanted = -0.5 * 0.02 * max(1.0, rows / columns) ** 0.5 * (U @ torch.diag(S) @ Vh)
        assert float((delta - wanted).norm() / wanted.norm()) < 0.1, name  # torch iterates in bf16


@pytest.mark.parametrize(("fraction", "warmup"), [(0.25, 5), (0.0, 1), (0.04, 1)])
def test_schedule_warms_up_and_falls_on_a_cosine(fraction, warmup):
    config = _config(num_steps=20, warmup_fraction=fraction)
    assert [schedule(s, config) for s in range(20)] == pytest.approx([oracles.learning_rate(s, 1.0, warmup, 20) for s in range(20)])


# --- the same numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_twice_is_equal_bit_for_bit(data, tmp_path, precision):
    first, second = (Run(data, _config(precision=precision, num_steps=8), tmp_path / name) for name in "ab")
    assert first.curves == second.curves
    assert _equal(first.weights, second.weights)
    assert _equal(first.state.best_weights, second.state.best_weights)


class Stop(Exception):  # noqa: N818 - not an error: the machine is gone
    pass


def _stop_after(step):
    def on_step(metrics):
        if metrics["step"] == step:
            raise Stop

    return on_step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stopped_at", [10, 13])
def test_training_resumed_at_step_10_equals_the_undisturbed_run_bit_for_bit(data, tmp_path, precision, stopped_at):
    config = _config(precision=precision)
    whole = Run(data, config, tmp_path / "whole")
    with pytest.raises(Stop):  # at step 10 the machine is gone before the checkpoint of step 10 is written
        Run(data, dataclasses.replace(config, checkpoint_every_steps=5), tmp_path / "stopped", on_step=_stop_after(stopped_at))
    steps = []
    resumed = Run(data, config, tmp_path / "stopped", seed=99, on_step=lambda metrics: steps.append(metrics["step"]))
    assert steps[0] == (6 if stopped_at == 10 else 11)
    assert resumed.curves == whole.curves
    assert resumed.column("lr") == pytest.approx([oracles.learning_rate(s, config.lr, 4, 20) for s in range(20)])
    assert _equal(resumed.weights, whole.weights)
    assert (resumed.state.best_step, resumed.state.best_accepted_length) == (whole.state.best_step, whole.state.best_accepted_length)
    assert _equal(resumed.state.best_weights, whole.state.best_weights)


def test_training_resumed_after_its_best_step_still_has_the_best_weights(data, tmp_path):
    """A learning rate that ruins what it first improves: the best step lies before the checkpoint."""
    config = _config(lr=0.1, select_every_steps=3, checkpoint_every_steps=12)
    whole = Run(data, config, tmp_path / "whole")
    assert whole.state.best_step < 12
    with pytest.raises(Stop):
        Run(data, config, tmp_path / "stopped", on_step=_stop_after(13))
    resumed = Run(data, config, tmp_path / "stopped", seed=99)
    assert resumed.state.best_step == whole.state.best_step
    assert _equal(resumed.state.best_weights, whole.state.best_weights)


def test_training_resumed_ignores_a_checkpoint_without_its_receipt(data, tmp_path):
    config = _config(checkpoint_every_steps=4)
    with pytest.raises(Stop):
        Run(data, config, tmp_path / "run", on_step=_stop_after(13))
    storage, steps = LocalStorage(str(tmp_path / "run")), []
    assert {name.split("/")[1] for name in storage.list("checkpoints/")} == {"step-000008", "step-000012"}  # the last two are kept
    storage.remove("checkpoints/step-000012/complete.json")
    resumed = Run(data, config, tmp_path / "run", seed=99, on_step=lambda metrics: steps.append(metrics["step"]))
    assert steps[0] == 9
    assert resumed.curves == Run(data, config, tmp_path / "whole").curves


def test_training_with_muon_resumed_with_another_number_of_workers_is_refused(data, tmp_path):
    config = _config(muon_lr=0.02, clip_norm=None)
    with pytest.raises(Stop):
        Run(data, config, tmp_path / "run", on_step=_stop_after(11))
    path = tmp_path / "run/checkpoints/step-000010/complete.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "world_size": 2}))
    with pytest.raises(ValueError, match=r"saved by 2 workers, now 1, .*Fix: set cluster.train_workers=2; with stage.train.muon_lr=null"):
        Run(data, config, tmp_path / "run")


@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
def test_micro_batches_of_one_and_of_four_give_the_same_losses(data, tmp_path, draft_ids):
    whole, split = (Run(data, _config(num_steps=10), tmp_path / str(m), micro=m, draft_ids=draft_ids) for m in (4, 1))
    for name in ("loss", "loss_ce", "loss_tv", "loss_confidence", "grad_norm", "train_accepted_length"):
        assert split.column(name) == pytest.approx(whole.column(name), rel=1e-9), name
    assert all(torch.allclose(split.weights[name], tensor, rtol=1e-9, atol=1e-11) for name, tensor in whole.weights.items())


@pytest.mark.parametrize(("batch_sequences", "micro"), [(4, 3), (5, 2)])
def test_batch_that_does_not_divide_into_micro_batches_is_refused(data, tmp_path, batch_sequences, micro):
    with pytest.raises(ValueError, match=rf"batch_sequences: {batch_sequences} does not divide into 1 workers of micro-batches of {micro}"):
        Run(data, _config(batch_sequences=batch_sequences), tmp_path, micro=micro)


class RankEngine(LocalEngine):
    """One of two ranks, run as threads: sums meet at a barrier."""

    world_size = 2

    def __init__(self, drafter, config, num_micro_batches, rank, slots, barrier):
        super().__init__(drafter, config, num_micro_batches)
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def all_sum(self, values):
        self.slots[self.rank] = values.detach()
        self.barrier.wait(30)
        total = self.slots[0] + self.slots[1]
        self.barrier.wait(30)
        return total

    def step(self, schedule):
        for parameter in self._parameters:
            parameter.grad = self.all_sum(parameter.grad)
        return super().step(schedule)


def _two_ranks(data, config, folder):
    slots, barrier, runs = [None, None], threading.Barrier(2), {}

    def work(rank):
        try:
            runs[rank] = Run(data, config, folder / f"rank-{rank}", micro=2, engine=lambda *given: RankEngine(*given, rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return runs[0], runs[1]


@pytest.mark.parametrize("order", [{}, {"window_shards": 1, "row_uses": 2}], ids=["once", "window_twice"])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_two_ranks_give_the_losses_of_one_though_one_rank_has_less_supervision(tmp_path, order):
    """Every second sequence has no anchor at all or few: means over ranks would differ from the global ratio. Of the five
    select rows the last finds the second rank without one."""
    masks = [tiny.loss_mask(3, 14 if i % 2 else 1 + i % 4) for i in range(8)]
    data = _data(tmp_path, [tiny.row(f"row-{i}", mask, i) for i, mask in enumerate(masks)] + tiny.rows(0, 5), **order)
    config = _config(num_steps=6)
    one, two = Run(data, config, tmp_path / "one"), _two_ranks(data, config, tmp_path)
    for rank in two:
        for name in ("loss", "loss_ce", "grad_norm", "train_accepted_length"):
            assert rank.column(name) == pytest.approx(one.column(name), rel=1e-9), name
        assert rank.state.best_accepted_length == pytest.approx(one.state.best_accepted_length, rel=1e-9)
        assert all(torch.allclose(rank.weights[name], tensor, rtol=1e-9, atol=1e-11) for name, tensor in one.weights.items())


# --- nothing to learn, and errors ---------------------------------------------------------------------------------------


def _empty_rows(num):
    return [tiny.row(f"empty-{i}", tiny.loss_mask(3, i % 2), 50 + i) for i in range(num)]


def test_batch_without_a_valid_row_gives_zero_loss_and_a_zero_gradient_for_every_parameter():
    drafter = tiny.drafter("dspark")
    batch = build_batch([(row, (1,)) for row in _empty_rows(2)], 4, tiny.BLOCK).to(torch.device("cpu"), torch.float64)
    total = tiny.losses(drafter, batch).total
    total.backward()
    assert total.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_steps_without_a_valid_row_change_no_weight_and_report_zero(tmp_path, precision):
    data = _data(tmp_path, [*_empty_rows(4), *tiny.rows(0, 2)])
    run = Run(data, _config(num_steps=3, precision=precision), tmp_path, micro=2)
    assert run.column("loss") == run.column("grad_norm") == [0.0] * 3
    assert run.column("train_accepted_length") == [1.0] * 3
    before = tiny.drafter("dspark").to(torch.bfloat16 if precision == "bf16" else torch.float64).state_dict()
    assert _equal(run.weights, before)


def test_steps_whose_labels_all_lie_outside_the_draft_vocabulary_train_on_the_rest(tmp_path):
    rows = tiny.rows(4, 2)
    for row in rows:
        row.token_ids_T[:] = 1  # not in the reduced vocabulary
    run = Run(_data(tmp_path, rows), _config(num_steps=2), tmp_path, draft_ids=tiny.REDUCED)
    assert run.column("loss_ce") == [0.0, 0.0]
    assert min(run.column("loss_tv")) > 0.1


def test_micro_batch_without_a_valid_row_adds_nothing_to_the_others(tmp_path):
    """Two empty sequences among four: micro-batches of one and of four agree."""
    data = _data(tmp_path, [*_empty_rows(2), *tiny.rows(2, 2)])
    one, four = (Run(data, _config(num_steps=4), tmp_path / str(m), micro=m) for m in (1, 4))
    assert one.column("loss") == pytest.approx(four.column("loss"), rel=1e-9)
    assert min(one.column("loss")) > 0.1


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_stops_and_names_its_rows(data, tmp_path, broken, monkeypatch):
    original = tiny.drafter

    def poisoned(*args, **settings):
        drafter = original(*args, **settings)
        drafter.fc.weight.data[0, 0] = broken
        return drafter

    monkeypatch.setattr(tiny, "drafter", poisoned)
    config = _config(num_steps=2)
    names = [row.row_id for row in data.train.read(data.order.draws(0, 4))]
    with pytest.raises(ValueError, match=rf"training step 1: loss nan.*rows {', '.join(names)}\. Fix: lower stage.train.lr"):
        Run(data, config, tmp_path)
    assert json.loads((tmp_path / "diverged/step-000001-rank-0.json").read_text())["row_ids"] == names


# --- selection ----------------------------------------------------------------------------------------------------------


def test_selection_keeps_the_weights_of_its_best_step(data, tmp_path):
    """A learning rate that first helps and then ruins: the best step is not the last."""
    seen = {}

    class Watched(LocalEngine):
        def weights(self):
            seen[len(seen)] = super().weights()
            return seen[len(seen) - 1]

    run = Run(data, _config(num_steps=15, lr=0.1, select_every_steps=3), tmp_path, engine=Watched)
    selected = [(step["select_accepted_length"], -step["step"]) for step in run.curves if "select_accepted_length" in step]
    assert len(selected) == 5
    assert (run.state.best_accepted_length, -run.state.best_step) == max(selected)
    improvements = [s for i, (s, _) in enumerate(selected) if s > max([-1.0, *(other for other, _ in selected[:i])])]
    assert _equal(run.state.best_weights, seen[len(improvements) - 1])


def test_selection_runs_no_larger_batches_than_training(data, tmp_path):
    sizes = []

    class Watched(LocalEngine):
        def forward(self, batch, denominators):
            sizes.append(len(batch.anchors_BA))
            return super().forward(batch, denominators)

    first = Run(data, _config(num_steps=2, select_every_steps=1), tmp_path / "1", micro=1, engine=Watched)
    assert max(sizes) == 1
    second = Run(data, _config(num_steps=2, select_every_steps=1), tmp_path / "4", micro=4)
    assert first.column("select_accepted_length") == pytest.approx(second.column("select_accepted_length"), rel=1e-9)


def test_selection_covers_every_select_row_with_the_oracles_length(data, tmp_path):
    drafter, lengths = tiny.drafter("dspark"), []
    run = Run(data, _config(num_steps=1, lr=0.0), tmp_path)
    assert data.num_select == 3
    for n, row in enumerate(data.select.read([RowDraw(n, n, ()) for n in range(3)])):
        assert row.split == "select"
        batch = build_batch([(row, (980406, n))], tiny.TRAINING.num_anchors, tiny.BLOCK).to(torch.device("cpu"), torch.float64)
        p_draft, p_target = tiny.draft_logits(drafter, batch)[0].detach().softmax(-1), tiny.target_probs(drafter, batch)[0]
        accept = torch.minimum(p_draft, p_target).sum(-1) * batch.valid_BAK[0]
        lengths += [sum(float(row[: k + 1].prod()) for k in range(tiny.BLOCK)) for row in accept]
    assert run.curves[0]["select_accepted_length"] == pytest.approx(1.0 + sum(lengths) / len(lengths), rel=1e-6)


# --- where rows come from, and in which form --------------------------------------------------------------------------------


def test_rows_below_what_was_given_up_are_never_asked_for_and_each_slot_is_read_once(data, tmp_path):
    """What a stream relies on: it removes the rows of slots that every rank has given up."""

    class Watched:
        def __init__(self, source):
            self.source, self.read_slots, self.ends = source, [], []

        def read(self, draws):
            self.read_slots += [draw.slot for draw in draws]
            assert min(draw.slot for draw in draws) >= self.ends[-1]
            return self.source.read(draws)

        def used(self, end_slot):
            assert end_slot > max(self.read_slots, default=-1)
            self.ends.append(end_slot)

    watched = Watched(data.train)
    Run(dataclasses.replace(data, train=watched), _config(num_steps=9), tmp_path, micro=2)
    assert watched.read_slots == list(range(36))
    assert watched.ends == list(range(0, 37, 4))


def test_training_resumed_reads_on_from_its_step(data, tmp_path):
    read, original = [], data.train.read
    with pytest.raises(Stop):
        Run(data, _config(checkpoint_every_steps=4), tmp_path, on_step=_stop_after(9))
    data.train.read = lambda draws: read.extend(draw.slot for draw in draws) or original(draws)
    Run(data, _config(checkpoint_every_steps=4), tmp_path, seed=99)
    assert read == list(range(8 * 4, 20 * 4))


@pytest.mark.parametrize(("window_shards", "row_uses"), [(1, 1), (1, 3), (8, 2)])
def test_training_that_uses_windows_several_times_is_resumed_bit_for_bit(tmp_path, window_shards, row_uses):
    data = _data(tmp_path, window_shards=window_shards, row_uses=row_uses)
    config = _config(num_steps=12, checkpoint_every_steps=5)
    whole = Run(data, config, tmp_path / "whole")
    with pytest.raises(Stop):
        Run(data, config, tmp_path / "stopped", on_step=_stop_after(8))
    again = tiny.training_data(data.train._cache, _config(window_shards=window_shards, row_uses=row_uses))  # another process
    resumed = Run(again, config, tmp_path / "stopped", seed=99)
    assert resumed.curves == whole.curves
    assert _equal(resumed.weights, whole.weights)


def test_training_from_fp8_states_stays_near_the_one_from_bf16(tmp_path):
    losses = {}
    for name, form in (("bf16", tiny.FORM), ("fp8", tiny.FP8)):
        losses[name] = np.array(Run(_data(tmp_path / name, form=form), _config(), tmp_path / name).column("loss"))
    moved = losses["bf16"][0] - losses["bf16"][-1]
    apart = np.abs(losses["fp8"] - losses["bf16"])
    assert moved > 0.1
    assert 0 < apart.max() < 0.1 * moved


def test_training_from_every_logit_equals_the_one_from_final_states(tmp_path):
    """C = V: nothing is missing, but logits are stored in fp32."""
    form = CacheFormat("bf16", "topk", tiny.SHAPE.vocab_size)
    for draft_ids in (None, tiny.REDUCED):
        where = tmp_path / ("whole" if draft_ids is None else "reduced")
        final, topk = (Run(_data(where / f.logits, form=f), _config(), where / f.logits, draft_ids=draft_ids) for f in (tiny.FORM, form))
        for name in ("loss", "loss_ce", "loss_tv", "loss_confidence", "grad_norm", "train_accepted_length"):
            assert topk.column(name) == pytest.approx(final.column(name), rel=1e-5), name


def test_training_from_the_best_logits_differs_by_no_more_than_the_mass_that_they_miss(tmp_path):
    form, missing = CacheFormat("bf16", "topk", 8), []
    for row in tiny.rows(form=form):
        missing += (1.0 - np.exp(row.top_logits_SC.astype(np.float64) - row.log_sum_exp_S[:, None]).sum(-1)).tolist()
    final, topk = (Run(_data(tmp_path / f.logits, form=f), _config(), tmp_path / f.logits) for f in (tiny.FORM, form))
    assert 0 < topk.curves[0]["loss_tv"] - final.curves[0]["loss_tv"] <= 2 * max(missing)  # L1 is twice the total variation
    assert topk.curves[0]["loss_ce"] == final.curves[0]["loss_ce"]
    assert topk.column("loss")[-1] < 0.95 * topk.column("loss")[0]
    assert topk.column("loss") == pytest.approx(final.column("loss"), rel=0.1)


# --- golden curves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "draft_ids"),
    [("dflash", None), ("dspark", None), ("dspark", tiny.REDUCED), ("gated", None), ("rnn", None), ("eagle3", None), ("mtp", tiny.REDUCED)],
    ids=["dflash", "dspark", "dspark_reduced", "gated", "rnn", "eagle3", "mtp"],
)
def test_curves_of_twenty_steps_equal_the_golden_ones(data, tmp_path, kind, draft_ids, request):
    path = GOLDEN / f"training_{request.node.callspec.id}.json"
    loss = LossConfig(0.0, 1.0, 0.0, 0.0, 4.48) if kind == "eagle3" else tiny.TRAINING.loss
    data = dataclasses.replace(data, block_size=tiny.CONFIGS[kind].block_size)
    run = Run(data, _config(loss=loss), tmp_path, kind=kind, micro=2, draft_ids=draft_ids)
    assert run.column("loss")[-1] < 0.95 * run.column("loss")[0]
    if os.environ.get(REWRITE) == "1":
        path.write_text(json.dumps(run.curves, indent=1) + "\n")
        pytest.fail(f"{path.name} was written anew; look at the difference and run again without {REWRITE}")
    golden = json.loads(path.read_text())
    assert len(golden) == len(run.curves) == 20
    for step, wanted in zip(run.curves, golden, strict=True):
        assert {key: step[key] for key in wanted} == pytest.approx(wanted, rel=1e-9)
