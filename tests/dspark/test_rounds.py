"""Rounds as Parquet."""

import dataclasses
import io

import pyarrow.parquet as pq
import pytest

from dspark.rounds import Round, from_parquet, to_parquet

FULL = Round(
    request_id="gsm8k-3/0", domain="math", source="gsm8k", round_index=4, temperature=0.7, top_k=20, top_p=0.9,
    draft_mode="probabilistic", variant="", policy="verify_all", context_length_tokens=517, anchor_token=49151, draft_tokens=(3, 1, 4), draft_probs=(0.5, 0.25, 1.0),
    target_probs=(0.125, 0.0, 1.0), confidence_logits=(-2.5, 30.0, 0.0), proposed=3, accepted=1, next_token=9, ended_by_stop=False,
)  # fmt: skip
STOPPED = dataclasses.replace(FULL, round_index=5, confidence_logits=(), draft_mode="greedy", accepted=3, next_token=None)
STOPPED = dataclasses.replace(STOPPED, ended_by_stop=True)


@pytest.mark.parametrize("rounds", [[FULL, STOPPED], [STOPPED], []], ids=["two", "stopped", "none"])
def test_rounds_written_and_read_are_equal(rounds):
    assert from_parquet(to_parquet(rounds)) == rounds


def test_rounds_file_is_readable_by_pyarrow_with_typed_columns():
    table = pq.read_table(io.BytesIO(to_parquet([FULL, STOPPED])))
    assert table.column_names == [field.name for field in dataclasses.fields(Round)]
    types = {"draft_tokens": "list<element: int32>", "draft_probs": "list<element: float>", "next_token": "int32", "temperature": "double"}
    assert {name: str(table.schema.field(name).type) for name in types} == types
    assert table["next_token"].null_count == 1


@pytest.mark.parametrize("metadata", [{"schema_version": "1"}, None], ids=["older", "none"])
def test_rounds_of_another_schema_version_are_refused_with_both(metadata):
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(to_parquet([FULL]))).replace_schema_metadata(metadata), sink)
    with pytest.raises(ValueError, match=rf"schema version {'1' if metadata else 'none'}, this version reads 2"):
        from_parquet(sink.getvalue())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "t0.7-probabilistic-top_k20-top_p0.9"),
        ({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "draft_mode": "greedy"}, "t0-greedy"),
        ({"top_p": 1.0, "variant": "no_markov", "policy": "fixed_3"}, "t0.7-probabilistic-top_k20-no_markov-fixed_3"),
        ({"top_k": 0, "top_p": 1.0, "policy": "threshold_0.5"}, "t0.7-probabilistic-threshold_0.5"),
    ],
)
def test_setting_of_a_round_names_all_that_is_not_the_default(changes, name):
    assert dataclasses.replace(FULL, **changes).setting == name
