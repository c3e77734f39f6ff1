"""The confidence head fitted again on the select rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dspark.drafters.dspark import DSpark
from dspark.refit import RIDGE, fit_logistic, refit_confidence
from dspark.training import select_batches
from tests.dspark import tiny


def test_fit_logistic_of_soft_labels_equals_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    x_MF = generator.normal(1.0, [0.5, 2.0, 3.0], (400, 3))
    label_M = 1 / (1 + np.exp(-(x_MF @ [1.0, -0.5, 0.2] + generator.normal(size=400))))
    weight_F, bias = fit_logistic(torch.from_numpy(x_MF), torch.from_numpy(label_M))
    standard_MF = (x_MF - x_MF.mean(0)) / x_MF.std(0)
    oracle = LogisticRegression(C=1 / (RIDGE * 400), tol=1e-10, max_iter=1000)  # a soft label is a row of each class, weighted
    oracle.fit(np.r_[standard_MF, standard_MF], np.r_[np.ones(400), np.zeros(400)], np.r_[label_M, 1 - label_M])
    logit_M = (torch.from_numpy(x_MF) @ weight_F + bias).numpy()
    np.testing.assert_allclose(logit_M, oracle.decision_function(standard_MF), atol=1e-5)


@pytest.mark.parametrize("kind", ["dspark", "gated", "headless"])
def test_refit_makes_the_mean_confidence_the_acceptance_and_changes_nothing_else(kind: str, tmp_path: Path) -> None:
    drafter = tiny.drafter(kind)
    assert isinstance(drafter, DSpark)
    data = tiny.training_data(tiny.write_cache(tmp_path, tiny.rows(num_select=12)))
    batches = [batch.to(torch.device("cpu"), torch.float64) for batch in select_batches(data, tiny.TRAINING, 2)]
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    found = refit_confidence(drafter, batches)
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    accepted = count = confidence = 0.0
    with torch.no_grad():
        for batch in batches:
            losses, output = tiny.losses(drafter, batch), drafter(batch)
            accepted, count = accepted + float(losses.accept_K.sum()), count + float(losses.count_K.sum())
            assert output.confidence_logits_BAK is not None
            confidence += float(output.confidence_logits_BAK[batch.valid_BAK].sigmoid().sum())
    assert found.num_rows == count
    assert confidence / count == pytest.approx(accepted / count, abs=1e-6)  # the optimum of the bias, which has no ridge
    assert found.bce_after < found.bce_before


def test_refit_leaves_a_head_that_few_rows_would_make_worse(tmp_path: Path) -> None:
    drafter = tiny.drafter("dspark")
    assert isinstance(drafter, DSpark)
    data = tiny.training_data(tiny.write_cache(tmp_path, tiny.rows(num_select=40)))
    batches = [batch.to(torch.device("cpu"), torch.float64) for batch in select_batches(data, tiny.TRAINING, 2)]
    refit_confidence(drafter, batches)  # now as good as can be
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    found = refit_confidence(drafter, batches[:2])  # of fewer rows than features
    assert not found.is_better
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
