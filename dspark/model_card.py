"""The README of a release (dspark/release.py): what the drafter is, how it was made, what was measured, how it is served."""

import json
from collections.abc import Mapping
from typing import Any

from dspark.cache import LAYER_CONVENTION
from dspark.calibration import Calibration
from dspark.drafters.base import Drafter
from dspark.release import VLLM_TESTED
from dspark.scheduler import SpsTable
from dspark.serving_files import AdditiveSps


def model_card(
    drafter: Drafter,
    target_name: str,
    calibration: Calibration,
    sps: SpsTable,
    additive: AdditiveSps,
    evaluation: Mapping[str, Any],
    lineage: Mapping[str, Any],
) -> str:
    """The README of a release.

    `lineage`: step name -> what is known of it, any JSON value. `evaluation["settings"]`: decoding setting -> source of the
    prompts -> domain -> its `accepted_length` and `accepted_length_interval`.
    """
    config, num_draft_ids = drafter.config, len(drafter.draft_ids_W)
    is_reduced = num_draft_ids < drafter.shape.vocab_size
    speculative = json.dumps({"method": "dspark", "model": "<this folder>", "num_speculative_tokens": config.block_size})
    fitted = zip(calibration.temperatures_K, calibration.ece_before_K, calibration.ece_after_K, strict=True)
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    sglang = (
        "SGLang serves whole draft vocabularies only, so not this drafter."
        if is_reduced
        else "SGLang: `--speculative-algorithm DSPARK --speculative-draft-model-path <this folder> --speculative-dspark-confidence-sts-path "
        "calibration.json --speculative-dspark-sps-table-path sps_additive.json` (or `sps.json`); it reads these two files when "
        "`SGLANG_RAGGED_VERIFY_MODE=compact`."
    )
    return f"""# DSpark drafter for {target_name}

Drafts blocks of {config.block_size} tokens for speculative decoding with {target_name}. The target verifies them, so the text keeps
the target's own distribution. DSpark is a block-parallel backbone with a sequential Markov head and a confidence head
(arXiv 2607.05147).

- Target: {target_name}. Reads its residual stream after layers {", ".join(map(str, drafter.tapped_layers))} (0-based, `{LAYER_CONVENTION}`).
- Drafter: width {drafter.shape.width}, {num_parameters:,} parameters, bf16, mask token {drafter.mask_token_id}.
- Draft vocabulary: {num_draft_ids:,} of {drafter.shape.vocab_size:,} tokens.

## How it was made

{chr(10).join(f"- {step}: `{json.dumps(facts)}`" for step, facts in lineage.items())}

## Results

Accepted length: tokens a round, bonus included; in brackets the 95 % bootstrap interval over prompts. All figures: `report.json`.

{_results(evaluation["settings"])}

## Serving

```bash
vllm serve <target> --speculative-config '{speculative}'
```

Keep the method explicit: without it vLLM guesses it from words in the folder's path. {sglang}

## Calibration

Sequential Temperature Scaling on {calibration.num_rounds:,} rounds; confidence k is sigmoid(logit / temperature k).

| position | temperature | ECE of the survival before, on the rounds of the fit | after |
|---|---|---|---|
{chr(10).join(f"| {k} | {t:.3g} | {before:.4f} | {after:.4f} |" for k, (t, before, after) in enumerate(fitted, 1))}

It holds for the draft mode and temperature of its rounds. vLLM drafts greedily unless `draft_sample_method` is `probabilistic`.

## Limits

- For this target only: another one, a fine-tune of it too, accepts less.
- vLLM {VLLM_TESTED} reads neither `calibration.json` nor the `sps` files: it measures its own cost tables and uses raw confidences, but
  for an installed `dspark-pipeline`, whose plug-in divides each confidence logit by its `sts_temperatures` in `config.json`.
- The `sps` files were measured on one stack, with {sps.batch_tokens[0]} to {sps.batch_tokens[-1]} tokens a step. Of `sps.json` SGLang takes the
  probe at or below. `sps_additive.json` is linear between probes: an inner probe that is left out is missed by up to
  {additive.left_out_error:.0%} of its seconds. `sps_tensorrt.json` is for TensorRT-LLM's `confidence_sps_table_path`.
- Tested with vLLM {VLLM_TESTED}: its own class loads this layout on a CPU and gives the same Markov bias, confidences and draft
  logits. That says nothing of the speed on a GPU.
"""


def _results(settings: Mapping[str, Any]) -> str:
    domains = sorted(
        {domain for sources in settings.values() for found in sources.values() for domain in found}, key=lambda d: (d == "all", d)
    )
    lines = [f"| decoding | prompts | {' | '.join(domains)} |", "|---" * (2 + len(domains)) + "|"]
    for setting, sources in settings.items():
        for source, found in sources.items():
            cells = [_cell(found[domain]) if domain in found else "-" for domain in domains]
            lines.append(f"| {setting} | {source} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(summary: Mapping[str, Any]) -> str:
    low, high = summary["accepted_length_interval"]
    return f"{summary['accepted_length']:.2f} [{low:.2f}, {high:.2f}]"
