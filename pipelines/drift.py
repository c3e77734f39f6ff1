"""mode=drift rounds=<uri>: does a calibration still hold on new rounds? Says keep or recalibrate, and refits without training.

The calibration is the current config's, or with `release=<uri>` that of a release. New rounds are Parquet files
(dspark/rounds.py) of the same drafter, served as the calibration's were: a file, a folder, or the beginning of their names.

    ECE now             of the calibrated survivals, per position and domain. Its interval is a bootstrap over requests
    ECE at calibration  on the calibration's own test rounds, from its report
    refit               temperatures fitted on all new rounds. What they gain is measured on requests that the fit did not see:
                        NUM_FOLDS folds, each under the temperatures of the others

The verdict is about the mean over positions. It is `recalibrate` when the interval of the ECE now lies above the ECE at
calibration by more than TOLERANCE, or when refitting lowers the held-out ECE by TOLERANCE or more and the whole interval of
that change is below 0. The first says that the confidences got worse, whatever the cause; the second that temperatures mend it.

Written to `drift/<hash of what went in>/` below the root, never into a release: `calibration.json` (the refit), `report.json`,
`reliability.png`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark import calibration
from dspark.calibration import Calibration
from dspark.metrics import estimates, resample
from dspark.rounds import Round, from_parquet
from dspark.storage import Storage
from pipelines import artifacts
from pipelines.backends.object_store import open_storage
from pipelines.calibration import SCHEMA_VERSION, reliability_figure
from pipelines.settings import CalibrateStage

FOLDER, FIGURE = "drift", "reliability.png"
TOLERANCE = 0.01  # of the mean ECE
NUM_FOLDS = 5
KEEP, RECALIBRATE = "keep", "recalibrate"


@dataclass(frozen=True)
class Calibrated:
    """A calibration that is in use; `reference_K`: the ECE on its own test rounds, None at a position without any.

    `setting`: the name of how it is served (dspark/rounds.py).
    """

    uri: str
    sha256: str
    calibration: Calibration
    setting: str
    reference_K: tuple[float | None, ...]


@dataclass(frozen=True)
class NewRounds:
    uri: str
    files: Mapping[str, str]  # name -> SHA-256
    rounds: Sequence[Round]


def read_calibrated(uri: str, block_size: int | None) -> Calibrated:
    """Of a release or of the artifact of calibrate. `block_size` None: that of the calibration itself."""
    storage = open_storage(uri)
    try:
        data, report = storage.read(artifacts.Calibration.CALIBRATION), json.loads(storage.read(artifacts.Calibration.REPORT))
    except FileNotFoundError:
        raise ValueError(
            f"release: {uri} holds no {artifacts.Calibration.CALIBRATION} with a {artifacts.Calibration.REPORT}. Fix: release=<folder of a release>"
        ) from None
    try:
        found = Calibration.from_json(data, block_size or len(json.loads(data)["temperatures"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"release: {uri}/{artifacts.Calibration.CALIBRATION}: {error!r}: no calibration. Fix: fetch the release again"
        ) from error
    report = report.get("calibration", report)  # a release's report has a part for each step
    if report.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"release: {uri}: its calibration report has schema version {report.get('schema_version')}, {SCHEMA_VERSION} is read here. Fix: "
            "run the pipeline again"
        )
    served = report["served"]
    positions = report["settings"][served]["test"]["all"]["methods"]["sts"]["positions"]
    reference = tuple(position["ece"]["estimate"] for position in positions)
    return Calibrated(uri, hashlib.sha256(data).hexdigest(), found, served, reference)


def read_rounds(uri: str) -> NewRounds:
    """Every Parquet file of a folder, or whose name begins like the uri. ValueError without one, or when one holds no rounds."""
    folder, prefix = uri.rstrip("/"), ""
    if not any(name.endswith(".parquet") for name in open_storage(folder).list()):
        folder, _, prefix = folder.rpartition("/")
    storage, files, rounds = open_storage(folder), {}, list[Round]()
    for name in (name for name in storage.list(prefix) if name.endswith(".parquet")):
        data = storage.read(name)
        files[name] = hashlib.sha256(data).hexdigest()
        try:
            rounds += from_parquet(data)
        except ValueError as error:
            raise ValueError(f"rounds: {folder}/{name}: {error}") from error
    if not rounds:
        raise ValueError(f"rounds: {uri}: no Parquet file with a round begins like this. Fix: rounds=<file or folder of rounds>")
    return NewRounds(uri, files, rounds)


def run(calibrated: Calibrated, new: NewRounds, stage: CalibrateStage, root: Storage) -> tuple[dict[str, Any], str]:
    """The report, and the place where it and the refit were written."""
    K, num_bins = len(calibrated.calibration.temperatures_K), calibrated.calibration.num_bins  # more bins, more ECE
    _check(calibrated, new, K, stage.min_rounds)
    rounds = new.rounds
    logits_NK = calibration.pad([r.confidence_logits for r in rounds], K)
    accepted_N, proposed_N = np.array([r.accepted for r in rounds]), np.array([r.proposed for r in rounds])
    request_N, domain_N = np.array([r.request_id for r in rounds]), np.array([r.domain for r in rounds])
    outcome_NK = calibration.outcomes(accepted_N, K, proposed_N)
    released_NK = calibrated.calibration.survival(logits_NK)

    def fit(is_used_N: Any, min_rounds: int) -> Calibration:
        columns = logits_NK[is_used_N], accepted_N[is_used_N]
        return calibration.fit(*columns, proposed_N=proposed_N[is_used_N], num_bins=num_bins, min_rounds=min_rounds)

    everywhere = np.ones(len(rounds), dtype=bool)
    refit = fit(everywhere, stage.min_rounds)
    held_out_NK = np.empty_like(released_NK)
    requests, request_index_N = np.unique(request_N, return_inverse=True)
    fold_N = (np.random.default_rng(0).permutation(len(requests)) % NUM_FOLDS)[request_index_N]
    for fold in range(NUM_FOLDS):
        held_out_NK[fold_N == fold] = fit(fold_N != fold, 1).survival(logits_NK[fold_N == fold])

    def resampled(survival_NK: Any, is_in_N: Any) -> Any:
        """The ECE [1 + S, K], of the rounds themselves first; a single request has no resamples."""
        num_resamples = stage.num_resamples if len(np.unique(request_N[is_in_N])) > 1 else 0
        columns = survival_NK[is_in_N], outcome_NK[is_in_N], request_N[is_in_N]
        return resample("ece", *columns, num_bins=num_bins, num_resamples=num_resamples)

    change = estimates(resampled(held_out_NK, everywhere) - resampled(released_NK, everywhere))
    now = {}
    for domain in ("all", *sorted(set(domain_N.tolist()))):
        is_in_N = everywhere if domain == "all" else domain_N == domain
        found = estimates(resampled(released_NK, is_in_N), is_ece=True)
        counts = {"num_rounds": int(is_in_N.sum()), "num_requests": len(set(request_N[is_in_N].tolist()))}
        now[domain] = {**counts, **asdict(found)}
    is_known_K = np.array([ece is not None for ece in calibrated.reference_K])
    reference = float(np.mean([ece for ece in calibrated.reference_K if ece is not None]))
    comparable = estimates(resampled(released_NK, everywhere)[:, is_known_K], is_ece=True).mean
    reasons = _reasons(reference, asdict(comparable), asdict(change.mean))
    qualities = {
        name: [asdict(q) for q in calibration.quality(survival_NK, outcome_NK, num_bins)]
        for name, survival_NK in (("released", released_NK), ("refitted", refit.survival(logits_NK)))
    }
    report = {
        "schema_version": 1,
        "verdict": RECALIBRATE if reasons else KEEP,
        "reasons": reasons,
        "calibration": {"uri": calibrated.uri, "sha256": calibrated.sha256, "setting": calibrated.setting},
        "rounds": {"uri": new.uri, "files": dict(new.files)},
        "temperatures": {"released": calibrated.calibration.temperatures_K, "refitted": refit.temperatures_K},
        "ece_at_calibration": {"position_K": calibrated.reference_K, "mean": reference},
        "ece_now": now,
        "change_by_refit": asdict(change),
        "reliability": qualities,
        "rule": {"tolerance": TOLERANCE, "num_folds": NUM_FOLDS},
        "definitions": {
            "ece_now": "of the calibrated survivals on the new rounds, 95 % bootstrap interval over requests that allows for the noise in an ECE",
            "change_by_refit": "refitted - released, on requests that the fit did not see; 95 % paired bootstrap interval over requests",
            "reliability": "refitted: on the rounds of the fit",
        },
    }
    parts = [calibrated.sha256, sorted(new.files.items()), stage.min_rounds, stage.num_resamples]
    folder = f"{FOLDER}/{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]}"
    root.put(f"{folder}/{artifacts.Calibration.CALIBRATION}", refit.to_json().encode())
    root.put(f"{folder}/{FIGURE}", reliability_figure(qualities, refit.temperatures_K))
    root.put(f"{folder}/{artifacts.Calibration.REPORT}", json.dumps(report, indent=1).encode())
    return report, f"{root.uri}/{folder}"


def _reasons(reference: float, now: Mapping[str, Any], change: Mapping[str, Any]) -> list[str]:
    """Why to recalibrate; none: keep. ECE as means over positions."""
    reasons = []
    if now["low"] is not None and now["low"] > reference + TOLERANCE:
        reasons.append(f"the ECE is at least {now['low']:.3f} now and was {reference:.3f} at calibration")
    if change["high"] < 0.0 and change["estimate"] <= -TOLERANCE:
        reasons.append(f"refitting changes the held-out ECE by {change['estimate']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]")
    return reasons


def _check(calibrated: Calibrated, new: NewRounds, block_size: int, min_rounds: int) -> None:
    """ValueError unless these rounds can judge this calibration."""
    rounds, wanted = new.rounds, calibrated.setting
    for r in rounds:
        place = f"rounds: {new.uri}: round {r.round_index} of request {r.request_id}"
        if r.policy == "every_position":
            raise ValueError(f"{place}: a block of every position, which no decoding visits. Fix: rounds={new.uri.rstrip('/')}/rounds-0-")
        if r.setting != wanted:
            raise ValueError(
                f"{place}: decoded as {r.setting}, the calibration holds for {wanted} alone. Fix: give the beginning of the names of the files "
                f"of that setting, or rounds that were served so"
            )
        if len(r.confidence_logits) != r.proposed:
            raise ValueError(
                f"{place}: {len(r.confidence_logits)} confidence logits of {r.proposed} drafted tokens. Fix: rounds of a drafter with a confidence head"
            )
    most = max(r.proposed for r in rounds)
    if most != block_size:
        raise ValueError(
            f"rounds: {new.uri}: blocks of up to {most} tokens, the calibration is of {block_size}. Fix: the rounds of this drafter, or its release"
        )
    num_rounds = [sum(r.proposed >= k for r in rounds) for k in range(1, block_size + 1)]
    num_requests = len({r.request_id for r in rounds})
    if min(num_rounds) < min_rounds or num_requests < 2 * NUM_FOLDS:
        raise ValueError(
            f"rounds: {new.uri}: {num_rounds} proposed at each position, of {num_requests} requests: at least {min_rounds} "
            f"(stage.calibrate.min_rounds) and {2 * NUM_FOLDS} are needed. Fix: collect more rounds"
        )
