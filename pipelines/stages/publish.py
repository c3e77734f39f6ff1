"""publish: the release directory that serving engines load, below `release/` (layout: dspark/release.py).

Everything it holds was made by earlier steps; here it is put together, checked by the rules of its readers, and registered
with the tracker. Its checksums are written last: what a killed run left is removed and written again, a whole release is
never written over.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dspark.storage import Storage
from pipelines.artifacts import Calibration, Drafter, EvalReport, Release, ScheduleReport
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.flow import PublishConfig
from pipelines.runner import Progress, Work
from pipelines.stages.profile_sps import read_profile, step_profile
from pipelines.stages.schedule import ENGINE
from pipelines.targets import local_folder

if TYPE_CHECKING:
    from dspark.scheduler import SpsTable
    from dspark.serving_files import AdditiveSps
    from dspark.step_cost import StepProfile


def run(config: PublishConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    import torch

    from dspark import calibration, release
    from dspark.checkpoint import load_drafter
    from dspark.model_card import model_card
    from dspark.target import load_head

    work.report(Progress(0, 1, "release"))
    folder = local_folder(work.resources.target_uri)
    head = load_head(folder, torch.bfloat16)
    drafter = load_drafter(open_storage(inputs["drafter"].uri), Drafter.FOLDER, head, config.target.weights, torch.bfloat16)
    fitted = calibration.Calibration.from_json(open_storage(inputs["calibration"].uri).read(Calibration.CALIBRATION), config.block_size)
    made_for = {"target_weights_sha256": config.target.weights, "drafter_sha256": inputs["drafter"].payload_sha256}
    profile = read_profile(inputs["profile"], made_for | {"block_size": config.block_size})
    report = {
        "evaluation": json.loads(open_storage(inputs["report"].uri).read(EvalReport.REPORT)),
        "calibration": json.loads(open_storage(inputs["calibration"].uri).read(Calibration.REPORT)),
        "schedule": json.loads(open_storage(inputs["schedule"].uri).read(ScheduleReport.REPORT)),
        "sps": profile,
    }
    costs, context_tokens = step_profile(profile, ENGINE), report["schedule"]["context_tokens"]
    sps = _table(costs, context_tokens, config.block_size)
    additive = _additive(costs, context_tokens, sps)
    lineage = {**_lineage(config, inputs), "calibrated for": report["calibration"]["setting"]}
    card = model_card(drafter, config.target.name, fitted, sps, additive, report["evaluation"], lineage)
    place = open_storage(f"{out.uri}/{Release.FOLDER}")
    if not place.exists(release.CHECKSUMS):
        for name in place.list():  # begun by a run that was killed
            place.remove(name)
        target_config = json.loads((folder / "config.json").read_text())
        release.write_release(place, drafter, head, target_config, fitted, sps, additive, report, lineage, card)
    release.check_release(place)
    work.report(Progress(1, 1, "release"))
    files = file_checksums(out, [f"{Release.FOLDER}/{name}" for name in (*release.FILES, release.CHECKSUMS)])
    size = sum(place.size_bytes(name) for name in release.FILES)
    return Outcome(files, {"bytes": float(size), "num_files": float(len(files))}, registered_model=config.publish.name)


def _table(costs: "StepProfile", context_tokens: float, block_size: int) -> "SpsTable":
    """The SPS table of steps in which every request has its whole block verified: such a file knows no number of requests."""
    import numpy as np

    from dspark.scheduler import SpsTable

    sizes = sorted({size for curve in costs.curves for size in curve.batch_tokens})
    steps = [costs.at(context_tokens, max(-(-size // (block_size + 1)), costs.num_requests[0])) for size in sizes]
    verify_seconds = [float(np.interp(size, step.batch_tokens, step.verify_seconds)) for size, step in zip(sizes, steps, strict=True)]
    return SpsTable(tuple(sizes), tuple(step.draft_seconds[0] for step in steps), tuple(verify_seconds))


def _additive(costs: "StepProfile", context_tokens: float, sps: "SpsTable") -> "AdditiveSps":
    """The draft pass by the probed numbers of requests; verified tokens as in the table."""
    from dspark.serving_files import AdditiveSps

    draft_seconds = [costs.at(context_tokens, num_requests).draft_seconds[0] for num_requests in costs.num_requests]
    return AdditiveSps.of(costs.num_requests, draft_seconds, sps.batch_tokens, sps.verify_seconds)


def _lineage(config: PublishConfig, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    """What each part was made of, without places: fingerprints, checksums and code versions."""
    target = {"name": config.target.name, "weights_sha256": config.target.weights, "tokenizer_sha256": config.target.tokenizer}
    steps = {
        artifact.record["identity"]["step"]: {
            "fingerprint": artifact.fingerprint,
            "payload_sha256": artifact.payload_sha256,
            "code_version": artifact.record["provenance"]["code_version"],
        }
        for artifact in inputs.values()
    }
    return {"target": target, **steps}
