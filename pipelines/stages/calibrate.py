"""calibrate: fits Sequential Temperature Scaling on the rounds of the calibrate split and reports it on those of the test split.

`calibration.json` holds the temperatures (dspark/calibration.py, the form that SGLang reads); `report.json` and the figures
(pipelines/calibration.py) what they do beside four other methods. A fit holds for the drafter, the draft mode and the
temperature of the trace: `calibration.json` for the served setting, the report for every setting that was traced.
"""

import json
from collections.abc import Mapping

from dspark.storage import Storage
from pipelines.artifacts import Calibration
from pipelines.calibration import analyse, figures, headline, make_report
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.flow import CalibrateConfig
from pipelines.runner import Progress, Work
from pipelines.stages.trace import SERVED, num_settings, read_rounds


def run(config: CalibrateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    found, total = {}, num_settings(inputs["rounds"])
    for number in range(total):
        work.report(Progress(number, total, "settings"))
        calibrate, test = (read_rounds(inputs["rounds"], "rounds", split, number) for split in ("calibrate", "test"))
        fitted, found[test[0].setting] = analyse(calibrate, test, config.block_size, config.calibrate)
        if number == SERVED:
            served = {name: getattr(test[0], name) for name in ("temperature", "top_k", "top_p", "draft_mode")}
            out.put(Calibration.CALIBRATION, fitted.to_json().encode())
    report = make_report(found, served)
    out.put(Calibration.REPORT, json.dumps(report, indent=1).encode())
    shown = figures(report)
    for name, data in shown.items():
        out.put(name, data)
    work.report(Progress(total, total, "settings"))
    return Outcome(file_checksums(out, [Calibration.CALIBRATION, Calibration.REPORT, *shown]), headline(report), tuple(shown))
