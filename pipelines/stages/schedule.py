"""schedule: replays the test texts under every policy at every concurrency, with the steps that profile_sps measured.

Closed loop (dspark/simulate.py) with the drafter's raw confidences, with those of every calibration fitted on the calibrate
split's rounds, and with ones that know the outcome. `report.json` and the figures are pipelines/scheduling.py: throughput against
the speed that one user sees (after the paper's Figure 7), budget against concurrency (Figure 8), and what calibration is worth,
with intervals. Costs are those of the decoding engine behind the mean context of these texts; they are not a promise for another one.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dspark.storage import Storage
from pipelines import artifacts
from pipelines.artifacts import ScheduleReport
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.flow import ScheduleConfig
from pipelines.runner import Progress, Work
from pipelines.scheduling import CALIBRATED, figures, headline, make_report
from pipelines.settings import ScheduleStage
from pipelines.stages.profile_sps import read_profile, step_profile
from pipelines.stages.trace import read_rounds

if TYPE_CHECKING:
    from dspark.simulate import ReplayConfig

ENGINE = "decoding"


def run(config: ScheduleConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    from dspark import simulate

    stage = config.schedule
    drafter_sha256 = inputs["rounds"].record["inputs"]["drafter"]["payload_sha256"]
    profile = read_profile(inputs["profile"], {"drafter_sha256": drafter_sha256, "block_size": config.block_size})
    costs = step_profile(profile, ENGINE)
    rounds, texts = read_rounds(inputs["rounds"], "positions", "test"), {}
    for kind, fitted in _fit(config, inputs).items():
        texts[kind] = simulate.texts_from_rounds(rounds, config.block_size, fitted.confidence)
    texts["oracle"] = [text.with_true_confidences() for text in texts["raw"]]
    context_tokens = simulate.mean_context_tokens(texts["raw"])
    total = len(stage.concurrencies)
    work.report(Progress(0, total, "concurrencies"))
    report = make_report(
        texts,
        lambda num_requests: costs.at(context_tokens, num_requests),
        stage.concurrencies,
        replay_config(stage),
        stage.num_resamples,
        lambda done: work.report(Progress(done, total, "concurrencies")),
    )
    facts = {"engine": ENGINE, "sps_identity": profile["identity"], "context_tokens": context_tokens}
    out.put(ScheduleReport.REPORT, json.dumps({**facts, **report}, indent=1).encode())
    drawn = figures(report)
    for name, data in drawn.items():
        out.put(name, data)
    return Outcome(file_checksums(out, [ScheduleReport.REPORT, *drawn]), headline(report), tuple(drawn))


def replay_config(stage: ScheduleStage) -> "ReplayConfig":
    """What of the settings a replay reads."""
    from dspark.simulate import ReplayConfig

    return ReplayConfig(
        stage.thresholds,
        stage.num_steps,
        stage.num_warmup_steps,
        stage.num_rounds,
        stage.seed,
        stage.lag_rounds,
        stage.new_requests,
        stage.skips_by,
        stage.window_rounds,
        stage.probe_share,
    )


def _fit(config: ScheduleConfig, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    """Every kind of confidences, fitted on the whole blocks of the calibrate split; "sts" is the one that is released."""
    import numpy as np

    from dspark.baselines import fit_all
    from dspark.calibration import Calibration, pad

    text = open_storage(inputs["calibration"].uri).read(artifacts.Calibration.CALIBRATION)
    rounds = read_rounds(inputs["rounds"], "rounds", "calibrate")
    logits_NK = pad([r.confidence_logits for r in rounds], config.block_size)
    accepted_N, proposed_N = np.array([r.accepted for r in rounds]), np.array([r.proposed for r in rounds])
    stage = config.calibrate
    fitted = fit_all(logits_NK, accepted_N, proposed_N, num_bins=stage.num_bins, min_rounds=stage.min_rounds)
    return {**fitted, CALIBRATED: Calibration.from_json(text, config.block_size)}
