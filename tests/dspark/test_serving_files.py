"""What engines read of temperatures and costs: written, read again, looked up as each engine does, and refused by its rules."""

import json
import math

import numpy as np
import pytest

from dspark.calibration import GRID, Calibration
from dspark.scheduler import SpsTable
from dspark.serving_files import (
    CALIBRATION,
    SPS,
    SPS_ADDITIVE,
    SPS_TENSORRT,
    AdditiveSps,
    check,
    read_additive,
    read_simple,
    read_sts,
    read_tensorrt,
    sps_files,
)

K = 4
TABLE = SpsTable((1, 5, 20), (0.001, 0.001, 0.002), (0.009, 0.019, 0.048))
ADDITIVE = AdditiveSps.of((1, 2, 4), (0.001, 0.0016, 0.002), (1, 5, 20), (0.009, 0.019, 0.048))
CALIBRATED = Calibration((1.2, 0.5, 3.0, 1.0), (0.1,) * K, (0.02,) * K, 900, 15, GRID)
READERS = {CALIBRATION: read_sts, SPS: read_simple, SPS_ADDITIVE: read_additive, SPS_TENSORRT: read_tensorrt}


def _files():
    return sps_files(TABLE, ADDITIVE, K) | {CALIBRATION: CALIBRATED.to_json().encode()}


def _line(probes, values, x):
    """Linear between probes and flat outside, by a plain loop."""
    if x <= probes[0]:
        return values[0]
    for i in range(1, len(probes)):
        if x <= probes[i]:
            return values[i - 1] + (values[i] - values[i - 1]) * (x - probes[i - 1]) / (probes[i] - probes[i - 1])
    return values[-1]


# --- written and read again -------------------------------------------------------------------------------------------------


def test_files_read_again_are_what_was_written():
    files = _files()
    check(files, K)
    assert read_sts(files[CALIBRATION], K) == CALIBRATED
    assert read_additive(files[SPS_ADDITIVE], K) == ADDITIVE
    for table in (read_simple(files[SPS], K), read_tensorrt(files[SPS_TENSORRT], K)):
        assert table.batch_tokens == (1, 5, 20)
        assert table.verify_seconds == pytest.approx((0.010, 0.020, 0.050))


def test_tables_of_the_cases_answer_as_each_engine_does(sps_case):
    expected = sps_case["expected"]
    tokens, seconds = zip(*((t["batch_tokens"], float(t["seconds"])) for t in sps_case["timings"]), strict=True)
    if expected["verdict"] == "rejected":
        with pytest.raises(ValueError, match="sps"):
            SpsTable.from_timings(tokens, [0.0] * len(tokens), seconds)
        return
    table = SpsTable.from_timings(tokens, [0.0] * len(tokens), seconds)
    files = sps_files(table, ADDITIVE, 1)
    simple, tensorrt = (json.loads(files[name]) for name in (SPS, SPS_TENSORRT))
    probes, speeds = simple["sample_batch_tokens"], simple["sample_steps_per_sec"]
    assert (probes, speeds) == (expected["sglang"]["sample_batch_tokens"], pytest.approx(expected["sglang"]["sample_steps_per_sec"]))
    floors = [speeds[max((i for i, n in enumerate(probes) if n <= query), default=0)] for query in sps_case["queries"]]
    assert floors == pytest.approx(expected["sglang_lookup"])
    assert tensorrt["token_counts"] == expected["tensorrt_llm"]["token_counts"]
    assert tensorrt["step_time_ms"] == pytest.approx(expected["tensorrt_llm"]["step_time_ms"])
    times = [_line(tensorrt["token_counts"], tensorrt["step_time_ms"], query) for query in sps_case["queries"]]
    assert times == pytest.approx(expected["tensorrt_llm_lookup"])


# --- the additive form and its errors -----------------------------------------------------------------------------------------


def test_additive_form_is_what_was_measured_at_every_pair_of_probes():
    found = json.loads(_files()[SPS_ADDITIVE])
    for requests, draft in ((1, 0.001), (2, 0.0016), (4, 0.002)):
        for tokens, verify in ((1, 0.009), (5, 0.019), (20, 0.048)):
            by_file = found["bias_seconds"]
            by_file += _line(found["bs_probes"], found["alpha_seconds"], requests) + _line(
                found["m_probes"], found["theta_seconds"], tokens
            )
            assert ADDITIVE.seconds(requests, tokens) == pytest.approx(by_file, rel=1e-12) == pytest.approx(draft + verify, rel=1e-12)
    assert min(found["alpha_seconds"]) == min(found["theta_seconds"]) == 0.0
    assert ADDITIVE.seconds(9, 99) == ADDITIVE.seconds(4, 20)  # flat beyond the last probes


def test_additive_form_states_by_how_much_a_left_out_probe_is_missed():
    # At 5 tokens the line from 9 to 48 ms gives 17.2, 19 were measured; at 2 requests the line from 1 to 2 ms gives 1.33, not 1.6.
    assert ADDITIVE.left_out_error == pytest.approx((1.6 - 4 / 3) / 1.6)
    flat = AdditiveSps.of((1, 2, 4), (0.001, 0.001, 0.001), (1, 5, 20), (0.009, 0.019, 0.048))
    assert flat.left_out_error == pytest.approx((19 - (9 + 39 * 4 / 19)) / 19)
    assert AdditiveSps.of((1, 2, 4), (0.1, 0.2, 0.4), (1, 5, 20), (1.0, 5.0, 20.0)).left_out_error == pytest.approx(0.0, abs=1e-12)
    assert AdditiveSps.of((1,), (0.1,), (1, 5), (1.0, 5.0)).left_out_error == 0.0


@pytest.mark.parametrize("interaction", [0.0, 0.3])
def test_additive_form_errs_by_what_verifying_costs_by_request(interaction):
    """A stack where seconds = draft(R) + verify(M) + interaction * R * M / (K + 1) ms, its verify probes being whole blocks."""

    def verify(requests, tokens):
        return 5.0 + 0.2 * tokens + interaction * requests * tokens / (K + 1) / 16

    requests, tokens = (1, 4, 16), (5, 20, 80)
    fitted = AdditiveSps.of(requests, [1.0 + 0.1 * r for r in requests], tokens, [verify(m // (K + 1), m) for m in tokens])
    errors = [fitted.seconds(r, m) / (1.0 + 0.1 * r + verify(r, m)) - 1.0 for r in requests for m in tokens if r <= m <= r * (K + 1)]
    if interaction:
        # 16 requests verify 20 tokens: 20 of the interaction's units where the probe of 20 tokens, 4 requests, knew of 5.
        truth = 1.0 + 1.6 + verify(16, 20)
        assert min(errors) == pytest.approx(-interaction * (16 - 4) * 20 / (K + 1) / 16 / truth)
    else:
        assert max(map(abs, errors)) < 1e-12


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READERS)
def test_file_of_another_block_size_is_refused(name):
    with pytest.raises(ValueError, match=r"block_size: 4: 7, the block size|one temperature for each of the 7"):
        READERS[name](_files()[name], 7)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (CALIBRATION, {"temperatures": []}, "temperatures: .*one temperature for each of the 4"),
        (CALIBRATION, {"temperatures": [1.0, 1.0, 0.0, 1.0]}, "temperatures: .*above 0"),
        (CALIBRATION, {"temperatures": [1.0, 1.0, math.nan, 1.0]}, "temperatures: .*above 0"),
        (CALIBRATION, {"temperatures": [1.0] * 5}, "temperatures: .*one temperature for each of the 4"),
        (CALIBRATION, {"ece_before": 0.1}, "ece_before: 0.1: a list of numbers"),
        (CALIBRATION, {"dataset": 3}, "dataset: 3: a string"),
        (CALIBRATION, {"sts_temperatures": [1.0] * 4}, "sts_temperatures: .*equal to temperatures"),
        (SPS, {"sample_batch_tokens": []}, "sample_batch_tokens: .*strictly increasing"),
        (SPS, {"sample_batch_tokens": [1, 5, 5]}, "sample_batch_tokens: .*strictly increasing: repeated"),
        (SPS, {"sample_batch_tokens": [5, 1, 20]}, "sample_batch_tokens: .*strictly increasing"),
        (SPS, {"sample_batch_tokens": [0, 5, 20]}, "sample_batch_tokens: .*at least 1"),
        (SPS, {"sample_batch_tokens": [1.0, 5, 20]}, "sample_batch_tokens: .*integers"),
        (SPS, {"sample_batch_tokens": [20], "sample_steps_per_sec": [50.0]}, "sample_batch_tokens: .*at least 2 probes"),
        (SPS, {"sample_batch_tokens": [1, 2, 3]}, "sample_batch_tokens: .*up to 5 tokens"),
        (SPS, {"sample_steps_per_sec": [100.0, 50.0]}, "sample_steps_per_sec: .*3 finite numbers above 0"),
        (SPS, {"sample_steps_per_sec": [100.0, 50.0, 0.0]}, "sample_steps_per_sec: .*3 finite numbers above 0"),
        (SPS, {"sample_steps_per_sec": [100.0, math.inf, 1.0]}, "sample_steps_per_sec: .*3 finite numbers above 0"),
        (SPS, {"sample_steps_per_sec": [50.0, 50.0, 50.0]}, "at least 2 distinct costs"),
        (SPS, {"max_batch_tokens": 19}, "max_batch_tokens: 19: an integer of at least the last probe, 20"),
        (SPS, {"about": {"bias_seconds": 1}}, "has bias_seconds: SGLang would read it as the additive form"),
        (SPS_ADDITIVE, {"bias_seconds": 0.0}, "bias_seconds: 0.0: a finite number above 0"),
        (SPS_ADDITIVE, {"bias_seconds": math.nan}, "bias_seconds: nan: a finite number above 0"),
        (SPS_ADDITIVE, {"left_out_error": None}, "left_out_error: None: a finite number"),
        (SPS_ADDITIVE, {"bs_probes": [1, 4, 2]}, "bs_probes: .*strictly increasing"),
        (SPS_ADDITIVE, {"alpha_seconds": [0.0, -0.1, 0.1]}, "alpha_seconds: .*3 finite numbers, 0 or more"),
        (SPS_ADDITIVE, {"m_probes": [1, 1, 20]}, "m_probes: .*strictly increasing"),
        (SPS_ADDITIVE, {"m_probes": [20], "theta_seconds": [0.1]}, "m_probes: .*at least 2 probes"),
        (SPS_ADDITIVE, {"theta_seconds": [0.0, math.nan, 0.1]}, "theta_seconds: .*3 finite numbers, 0 or more"),
        (SPS_ADDITIVE, {"theta_seconds": [0.0, 0.0, 0.0]}, "theta_seconds: .*at least 2 distinct costs"),
        (SPS_TENSORRT, {"token_counts": [1, 20, 5]}, "token_counts: .*strictly increasing"),
        (SPS_TENSORRT, {"token_counts": [1], "step_time_ms": [2.0]}, "token_counts: .*at least 2 probes"),
        (SPS_TENSORRT, {"step_time_ms": [0.0, 1.0, 2.0]}, "step_time_ms: .*3 finite numbers above 0"),
        (SPS_TENSORRT, {"step_time_ms": "slow"}, "step_time_ms: slow: 3 finite numbers above 0"),
        (SPS_TENSORRT, {"schema_version": 2}, "has schema_version: TensorRT-LLM would read it as a table of exact"),
    ],
)  # fmt: skip
def test_file_that_an_engine_refuses_or_misreads_is_refused(name, change, message):
    changed = json.dumps({**json.loads(_files()[name]), **change}).encode()
    with pytest.raises(ValueError, match=message):
        READERS[name](changed, K)


def test_tables_of_different_measurements_are_refused():
    other = sps_files(SpsTable((1, 5, 20), (0.0, 0.0, 0.0), (0.01, 0.02, 0.0501)), ADDITIVE, K)
    with pytest.raises(ValueError, match=r"sps_tensorrt\.json: .*the seconds of sps\.json"):
        check({**_files(), SPS_TENSORRT: other[SPS_TENSORRT]}, K)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("data", [b"[]", b"{", b"3"])
def test_file_that_is_no_object_is_refused(name, data):
    with pytest.raises(ValueError, match=f"{name}: .*a JSON object"):
        READERS[name](data, K)


def test_noisy_costs_that_fall_with_size_are_kept_as_measured():
    table = SpsTable((1, 5, 20), (0.0, 0.0, 0.0), (0.02, 0.019, 0.05))
    files = sps_files(table, AdditiveSps.of((1, 4), (0.002, 0.001), (1, 5, 20), table.verify_seconds), K)
    assert read_tensorrt(files[SPS_TENSORRT], K).verify_seconds == pytest.approx(table.verify_seconds)
    assert np.array(read_additive(files[SPS_ADDITIVE], K).theta_seconds) == pytest.approx([0.001, 0.0, 0.031])
