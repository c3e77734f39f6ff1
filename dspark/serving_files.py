"""What serving engines read beside a drafter's weights: its temperatures (STS) and what a step costs them (SPS).

    calibration.json    temperatures; SGLang's form (dspark_sts_table.py), which TensorRT-LLM reads too (dspark_sts.py)
    sps.json            SGLang's simple form (dspark_sps_table.py): steps per second by verified tokens, taken at the probe at or
                        *below* a count
    sps_additive.json   SGLang's additive form: seconds = bias + alpha(requests) + theta(verified tokens), linear between probes
    sps_tensorrt.json   TensorRT-LLM's table (dspark_planner.py): milliseconds by verified tokens, linear between probes

Verified tokens include the anchors. All of them are flat beyond their last probe, where a token looks free. The two tables by
tokens alone hold steps in which every request has its whole block verified; the additive form knows that drafting costs by
request, whatever is verified of it. Keys that no engine reads: `block_size`, and how the additive form errs.

    files = sps_files(table, AdditiveSps.of(num_requests, draft_seconds, batch_tokens, verify_seconds), block_size)
    check(files | {CALIBRATION: calibration.to_json().encode()}, block_size)
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.calibration import Calibration
from dspark.scheduler import SpsTable

CALIBRATION, SPS, SPS_ADDITIVE, SPS_TENSORRT = "calibration.json", "sps.json", "sps_additive.json", "sps_tensorrt.json"
SPS_FILES = (SPS, SPS_ADDITIVE, SPS_TENSORRT)

ADDITIVE_MARK = b'"bias_seconds"'  # by which SGLang knows its additive form, wherever in the text it stands
TENSORRT_MARKS = {"cost_tables", "engine_fingerprint", "engine_fingerprint_sha256", "measurements", "schema_version"}  # of another schema
AGREEMENT = 1e-9  # relative: two files of the same measurements
MEASURE = "run the step profile_sps again"


@dataclass(frozen=True)
class AdditiveSps:
    """Seconds of a step: bias + alpha(requests drafted for) + theta(tokens verified, anchors included).

    Exact at the probes of both curves, since drafting and verifying are timed apart. Two errors stay. Between probes a curve
    is a straight line: `left_out_error` is the largest share of its own seconds by which a curve misses an inner probe that is
    left out. And each theta was timed with one number of requests: what verifying costs by request stands in theta.
    """

    bias_seconds: float
    num_requests: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    batch_tokens: tuple[int, ...]
    theta_seconds: tuple[float, ...]
    left_out_error: float

    @classmethod
    def of(
        cls, num_requests: Sequence[int], draft_seconds: Sequence[float], batch_tokens: Sequence[int], verify_seconds: Sequence[float]
    ) -> "AdditiveSps":
        """From medians by ascending size. The bias is what the fastest probe of each curve takes, the curves are what is above it."""
        fastest_draft, fastest_verify = min(draft_seconds), min(verify_seconds)
        left_out = max(_left_out_error(num_requests, draft_seconds), _left_out_error(batch_tokens, verify_seconds))
        alpha, theta = (tuple(s - least for s in x) for x, least in ((draft_seconds, fastest_draft), (verify_seconds, fastest_verify)))
        return cls(fastest_draft + fastest_verify, tuple(num_requests), alpha, tuple(batch_tokens), theta, left_out)

    def seconds(self, num_requests: float, batch_tokens: float) -> float:
        """Of one step, as SGLang looks it up."""
        alpha = np.interp(num_requests, self.num_requests, self.alpha_seconds)
        return float(self.bias_seconds + alpha + np.interp(batch_tokens, self.batch_tokens, self.theta_seconds))


def _left_out_error(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """0 without an inner probe."""
    errors = [0.0]
    for i in range(1, len(sizes) - 1):
        line = np.interp(sizes[i], [sizes[i - 1], sizes[i + 1]], [seconds[i - 1], seconds[i + 1]])
        errors.append(abs(float(line) - seconds[i]) / seconds[i] if seconds[i] else 0.0)
    return max(errors)


def sps_files(sps: SpsTable, additive: AdditiveSps, block_size: int) -> dict[str, bytes]:
    """File name -> content, of the three SPS files."""
    tokens, seconds = list(sps.batch_tokens), np.add(sps.draft_seconds, sps.verify_seconds)
    simple = {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": (1.0 / seconds).tolist(),
        "max_batch_tokens": tokens[-1],
        "draft_seconds": list(sps.draft_seconds),
        "verify_seconds": list(sps.verify_seconds),
    }
    curves = {
        "bias_seconds": additive.bias_seconds,
        "bs_probes": list(additive.num_requests),
        "alpha_seconds": list(additive.alpha_seconds),
        "m_probes": list(additive.batch_tokens),
        "theta_seconds": list(additive.theta_seconds),
        "left_out_error": additive.left_out_error,
    }
    tensorrt = {"token_counts": tokens, "step_time_ms": (1000.0 * seconds).tolist()}
    contents = {SPS: simple, SPS_ADDITIVE: curves, SPS_TENSORRT: tensorrt}
    return {name: write_json({**content, "block_size": block_size}) for name, content in contents.items()}


def check(files: Mapping[str, bytes], block_size: int) -> None:
    """ValueError unless all four files keep the rules of the engines that read them, and tell of one measurement."""
    read_sts(files[CALIBRATION], block_size)
    simple, tensorrt = read_simple(files[SPS], block_size), read_tensorrt(files[SPS_TENSORRT], block_size)
    read_additive(files[SPS_ADDITIVE], block_size)
    if simple.batch_tokens != tensorrt.batch_tokens or not np.allclose(simple.verify_seconds, tensorrt.verify_seconds, AGREEMENT, 0.0):
        raise _error(SPS_TENSORRT, list(tensorrt.verify_seconds), f"the seconds of {SPS}, {list(simple.verify_seconds)}", "publish again")


def read_sts(data: bytes, block_size: int) -> Calibration:
    """ValueError when it is not of blocks of this size, or an engine would refuse or misread it."""
    found = read_json(CALIBRATION, data)
    dataset, temperatures = found.get("dataset", ""), found.get("temperatures")
    if not isinstance(dataset, str):
        raise _error(f"{CALIBRATION} dataset", dataset, "a string", "publish again")
    if found.get("sts_temperatures", temperatures) != temperatures:
        rule = f"equal to temperatures, {temperatures}: TensorRT-LLM prefers it, SGLang reads the other"
        raise _error(f"{CALIBRATION} sts_temperatures", found["sts_temperatures"], rule, "leave sts_temperatures out")
    return Calibration.from_json(data, block_size)


def read_simple(data: bytes, block_size: int) -> SpsTable:
    """sps.json; the seconds of whole steps stand in `verify_seconds`."""
    found = read_json(SPS, data)
    if ADDITIVE_MARK in data:
        raise _error(SPS, "has bias_seconds", "SGLang would read it as the additive form", MEASURE)
    tokens, speeds = _curve(SPS, found, "sample_batch_tokens", "sample_steps_per_sec", is_zero_allowed=False)
    _check_tokens(SPS, found, "sample_batch_tokens", "sample_steps_per_sec", block_size)
    most = found.get("max_batch_tokens")
    if type(most) is not int or most < tokens[-1]:
        raise _error(f"{SPS} max_batch_tokens", most, f"an integer of at least the last probe, {tokens[-1]}", MEASURE)
    return SpsTable(tokens, (0.0,) * len(tokens), tuple(1.0 / speed for speed in speeds))


def read_additive(data: bytes, block_size: int) -> AdditiveSps:
    found = read_json(SPS_ADDITIVE, data)
    bias, left_out = found.get("bias_seconds"), found.get("left_out_error")
    if not _is_number(bias, is_zero_allowed=False):
        raise _error(f"{SPS_ADDITIVE} bias_seconds", bias, "a finite number above 0", MEASURE)
    if not _is_number(left_out, is_zero_allowed=True):
        raise _error(f"{SPS_ADDITIVE} left_out_error", left_out, "a finite number, 0 or more", MEASURE)
    num_requests, alpha = _curve(SPS_ADDITIVE, found, "bs_probes", "alpha_seconds", is_zero_allowed=True)
    tokens, theta = _curve(SPS_ADDITIVE, found, "m_probes", "theta_seconds", is_zero_allowed=True)
    _check_tokens(SPS_ADDITIVE, found, "m_probes", "theta_seconds", block_size)
    return AdditiveSps(float(found["bias_seconds"]), num_requests, alpha, tokens, theta, float(found["left_out_error"]))


def read_tensorrt(data: bytes, block_size: int) -> SpsTable:
    """sps_tensorrt.json; the seconds of whole steps stand in `verify_seconds`."""
    found = read_json(SPS_TENSORRT, data)
    if marks := sorted(TENSORRT_MARKS & found.keys()):
        rule = "TensorRT-LLM would read it as a table of exact graph shapes"
        raise _error(SPS_TENSORRT, f"has {', '.join(marks)}", rule, "leave these keys out")
    tokens, milliseconds = _curve(SPS_TENSORRT, found, "token_counts", "step_time_ms", is_zero_allowed=False)
    _check_tokens(SPS_TENSORRT, found, "token_counts", "step_time_ms", block_size)
    return SpsTable(tokens, (0.0,) * len(tokens), tuple(ms / 1000.0 for ms in milliseconds))


def _curve(
    file: str, found: Mapping[str, Any], probes_key: str, values_key: str, *, is_zero_allowed: bool
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    probes, values = found.get(probes_key), found.get(values_key)
    if not isinstance(probes, list) or not probes or not all(type(n) is int and n >= 1 for n in probes) or probes != sorted(set(probes)):
        rule = "integers of at least 1, strictly increasing: repeated measurements are reduced to their median"
        raise _error(f"{file} {probes_key}", probes, rule, MEASURE)
    are_numbers = isinstance(values, list) and all(_is_number(x, is_zero_allowed=is_zero_allowed) for x in values)
    if not isinstance(values, list) or not are_numbers or len(values) != len(probes):
        rule = f"{len(probes)} finite numbers" + (", 0 or more" if is_zero_allowed else " above 0")
        raise _error(f"{file} {values_key}", values, rule, MEASURE)
    return tuple(probes), tuple(float(x) for x in values)


def _is_number(value: Any, *, is_zero_allowed: bool) -> bool:
    """Finite, and above 0 (or 0, where that is allowed)."""
    return type(value) in (int, float) and (0 < value < math.inf or (is_zero_allowed and value == 0))


def _check_tokens(file: str, found: Mapping[str, Any], probes_key: str, values_key: str, block_size: int) -> None:
    """Of a curve over verified tokens."""
    if found.get("block_size") != block_size:
        rule = f"{block_size}, the block size of the drafter: its steps verify other numbers of tokens"
        raise _error(f"{file} block_size", found.get("block_size"), rule, "use the costs of this drafter")
    probes, values = found[probes_key], found[values_key]
    if len(probes) < 2:
        rule = "at least 2 probes: of one, every token looks free and everything is verified"
        raise _error(f"{file} {probes_key}", probes, rule, "probe larger batches in the step profile_sps")
    if len(set(values)) < 2:
        raise _error(f"{file} {values_key}", values, "at least 2 distinct costs", "probe larger batches in the step profile_sps")
    if probes[-1] < block_size + 1:
        rule = f"up to {block_size + 1} tokens or more, a whole block and its anchor"
        raise _error(f"{file} {probes_key}", probes, rule, "probe larger batches in the step profile_sps")


def read_json(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as wrong:
        raise _error(name, data[:40], f"a JSON object ({wrong})", "publish again") from wrong
    if not isinstance(found, dict):
        raise _error(name, data[:40], "a JSON object", "publish again")
    return found


def write_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _error(field: str, value: Any, rule: str, fix: str) -> ValueError:
    return ValueError(f"{field}: {value}: {rule}. Fix: {fix}")
