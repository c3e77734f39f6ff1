"""The bundled prompt set, and the prompts step."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.storage import LocalStorage
from pipelines import flow
from pipelines.config import PROJECT_ROOT, compose
from pipelines.dag import Outcome
from pipelines.runner import LocalWork
from pipelines.settings import FileData
from pipelines.stages import prompts

BUNDLED = sorted((PROJECT_ROOT / "conf/data/prompts").glob("*.jsonl"))
PAPER_MIX = {"math": 0.394, "code": 0.389, "chat": 0.176, "instruction": 0.041}


def bundled_rows() -> list[dict]:
    return [row for path in BUNDLED for row in prompts.read_prompt_file(str(path))]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def test_bundled_prompts_are_many_distinct_and_near_the_papers_mix() -> None:
    rows = bundled_rows()
    assert len(rows) >= 1000
    assert len({prompts.prompt_id(row) for row in rows}) == len(rows)
    for domain, share in Counter(row["domain"] for row in rows).items():
        assert abs(share / len(rows) - PAPER_MIX[domain]) < 0.02, domain


def test_bundled_prompts_use_no_template_more_than_five_times() -> None:
    skeletons = Counter(
        row["template"] or " ".join(re.sub(r"\d+", "#", w) for w in words(" ".join(row["turns"]))) for row in bundled_rows()
    )
    skeleton, number = skeletons.most_common(1)[0]
    assert number <= 5, skeleton


def test_bundled_prompts_have_no_near_duplicates() -> None:
    """No two prompts share half of their word trigrams."""
    grams = []
    for row in bundled_rows():
        text = words(" ".join(row["turns"]))
        grams.append((row["turns"][0], {tuple(text[i : i + 3]) for i in range(len(text) - 2)}))
    holders: dict[tuple, list[int]] = {}
    for i, (_, found) in enumerate(grams):
        for gram in found:
            holders.setdefault(gram, []).append(i)
    shared = Counter((a, b) for held in holders.values() for j, a in enumerate(held) for b in held[j + 1 :])
    for (a, b), number in shared.items():
        similarity = number / len(grams[a][1] | grams[b][1])
        assert similarity < 0.5, (grams[a][0], grams[b][0])


def run_step(tmp_path: Path, lines: dict[str, list[str]], *overrides: str) -> tuple[LocalStorage, Outcome]:
    (tmp_path / "in").mkdir(exist_ok=True)
    for name, content in lines.items():
        (tmp_path / "in" / name).write_text("\n".join(content))
    settings, _ = compose(["experiment=tiny", *overrides])
    data = FileData("files", "mine", tuple(str(tmp_path / "in" / name) for name in lines))
    # An absolute path is its own uri; flow makes only relative ones absolute.
    identity, uris = flow._identify_data(data)
    config = flow.PromptsConfig(settings.stage.prompts, identity)
    out = LocalStorage(str(tmp_path / "out"))
    resources = replace(flow.build(settings)[0].resources, files=uris)
    return out, prompts.run(config, {}, out, LocalWork(resources, lambda progress: None))


def many(number: int, **more: object) -> list[str]:
    return [json.dumps({"turns": [f"question number {i}"], "domain": "math", **more}) for i in range(number)]


def test_prompts_split_is_disjoint_stable_and_within_limits(tmp_path: Path) -> None:
    out, outcome = run_step(tmp_path, {"a.jsonl": many(300)})
    rows = [json.loads(line) for line in out.read("prompts.jsonl").splitlines()]
    assert Counter(row["split"] for row in rows) == {"train": 24, "select": 8, "calibrate": 4, "test": 8}
    assert len({row["id"] for row in rows}) == len(rows)
    assert len(rows) + len(out.read("dropped.jsonl").splitlines()) == 300
    again, second = run_step(tmp_path, {"a.jsonl": many(300)[::-1]})
    assert again.read("prompts.jsonl") == out.read("prompts.jsonl")  # the order of a file decides nothing
    assert second.files["prompts.jsonl"] == outcome.files["prompts.jsonl"]


def test_prompts_of_one_template_share_one_split(tmp_path: Path) -> None:
    lines = [json.dumps({"turns": [f"add {i} to {t}"], "domain": "math", "template": f"add-{t}"}) for t in range(60) for i in range(5)]
    out, _ = run_step(tmp_path, {"a.jsonl": lines}, "stage.prompts.limits={train: 200, select: 100, calibrate: 100, test: 100}")
    splits: dict[str, set[str]] = {}
    for line in out.read("prompts.jsonl").splitlines():
        row = json.loads(line)
        splits.setdefault(row["template"], set()).add(row["split"])
    assert all(len(found) == 1 for found in splits.values())
    assert len({next(iter(found)) for found in splits.values()}) == 4


def test_prompts_duplicates_are_counted_and_kept_aside(tmp_path: Path) -> None:
    out, outcome = run_step(tmp_path, {"a.jsonl": many(100), "b.jsonl": many(3)})
    assert outcome.metrics["dropped_duplicate"] == 3
    reasons = Counter(json.loads(line)["reason"] for line in out.read("dropped.jsonl").splitlines())
    assert reasons["duplicate"] == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "not JSON"),
        ('{"domain": "math"}', "turns"),
        ('{"turns": [], "domain": "math"}', "turns"),
        ('{"turns": ["  "], "domain": "math"}', "blank"),
        ('{"turns": ["x"]}', "domain"),
        ('{"turns": ["x"], "domain": "math", "sytem": "y"}', "sytem"),
    ],
)
def test_prompts_bad_row_names_file_and_row(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"b\.jsonl row 3") as caught:
        run_step(tmp_path, {"a.jsonl": many(50), "b.jsonl": [*many(2), line]})
    assert problem in str(caught.value)
    assert "Fix:" in str(caught.value)
    assert LocalStorage(str(tmp_path / "out")).list() == []


def test_prompts_empty_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        run_step(tmp_path, {"a.jsonl": [""]})
