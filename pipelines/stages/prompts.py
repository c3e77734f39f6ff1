"""prompts: reads prompt data, names each prompt by its content, and splits them.

A prompt's id hashes its content (turns and system prompt), never its place in a file, so that a reordered source resumes
correctly. The split is decided by a hash of the id - of the template where a row names one, so that no template is in two
splits - and each split is filled up to its limit in hash order, domain by domain after the mix.

`prompts.jsonl`, one a line: id, turns, domain, system, template, split. `dropped.jsonl`: the row and a reason.
A malformed row of a file of one's own is an error (it names file and row); rows of public data sets are dropped, counted
and kept aside.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dspark.storage import Storage
from pipelines.artifacts import PromptSet
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.flow import PromptsConfig
from pipelines.runner import Progress, Work
from pipelines.settings import SPLITS, HubData

ROW_KEYS = {"turns", "domain", "system", "template"}


def run(config: PromptsConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    dropped: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    rows = _hub_rows(config.data.hub, dropped) if config.data.hub else _file_rows(work.resources.files)
    for row in rows:
        row["id"] = prompt_id(row)
        if row["id"] in found:
            dropped.append({"reason": "duplicate", "row": row})
        else:
            found[row["id"]] = row
    if not found:
        raise ValueError(f"data: {config.data.name!r} holds no prompt. Fix: give files with at least one row, for example data=bundled")
    kept = _split(list(found.values()), config, dropped)
    for split in SPLITS:
        if not any(row["split"] == split for row in kept):
            raise ValueError(
                f"data: split {split!r} got none of {len(found)} prompts. Fix: more prompts, or a larger stage.prompts.fractions.{split}"
            )
    out.put(PromptSet.PROMPTS, _jsonl(kept))
    out.put(PromptSet.DROPPED, _jsonl(dropped))
    work.report(Progress(len(kept), len(kept), "prompts"))
    names = [row["split"] for row in kept] + [f"{row['split']}_{row['domain']}" for row in kept]
    names += [f"dropped_{item['reason'].replace(' ', '_')}" for item in dropped]
    metrics = {name: float(number) for name, number in sorted(Counter(names).items())}
    return Outcome(file_checksums(out, [PromptSet.PROMPTS, PromptSet.DROPPED]), metrics)


def prompt_id(row: Mapping[str, Any]) -> str:
    """16 hex digits of the content; domain and template are labels, not content."""
    content = json.dumps([row["system"], row["turns"]], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_prompt_file(uri: str, default_domain: str | None = None) -> Iterator[dict[str, Any]]:
    """Validated rows of a JSONL file; ValueError names file and row."""
    for number, line, row in parse_prompt_file(uri, default_domain):
        if isinstance(row, str):
            raise ValueError(f'{uri} row {number}: {row}: {line[:80]!r}. Fix: one {{"turns": ["..."], "domain": "..."}} a line')
        yield row


def parse_prompt_file(uri: str, default_domain: str | None) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """Number, text and row of every line that is not blank; of a bad line what is wrong with it, in place of a row."""
    folder, _, name = uri.rpartition("/")
    # Not splitlines(): a text may hold U+2028 and its like, which JSON does not escape.
    for number, line in enumerate(open_storage(folder).read(name).decode("utf-8", "replace").split("\n"), 1):
        if line.strip():
            yield number, line, parse_row(line, default_domain)


def parse_row(line: str, default_domain: str | None) -> dict[str, Any] | str:
    """The row, or what is wrong with it; in brackets what only this line is about."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    if not isinstance(row, dict) or not isinstance(row.get("turns"), list) or not row["turns"]:
        return '"turns" must be a list with at least one text'
    if not all(isinstance(turn, str) and turn.strip() for turn in row["turns"]):
        return "every turn must be a text that is not blank"
    domain = row.get("domain", default_domain)
    if not isinstance(domain, str) or not domain:
        return '"domain" must be a text'
    for key in ("system", "template"):
        if not isinstance(row.get(key), str | None):
            return f'"{key}" must be a text'
    if default_domain is None and row.keys() - ROW_KEYS:
        return f"unknown key {sorted(row.keys() - ROW_KEYS)[0]!r} (known: {', '.join(sorted(ROW_KEYS))})"
    return {"turns": row["turns"], "domain": domain, "system": row.get("system"), "template": row.get("template")}


def _file_rows(files: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for name in sorted(files):
        yield from read_prompt_file(files[name])


def _hub_rows(data: HubData, dropped: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """User turns (and system prompt) of a `conversations` data set; the recorded answers are not used."""
    from datasets import load_dataset

    for number, row in enumerate(load_dataset(data.repository, revision=data.revision, split=data.split, streaming=True)):
        if number == data.max_rows:
            break
        turns = [(turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content")) for turn in row["conversations"]]
        system = turns.pop(0)[1] if turns and turns[0][0] == "system" else None
        roles = ["user" if role in ("human", "user") else "assistant" for role, _ in turns]
        texts = [text for role, (_, text) in zip(roles, turns, strict=True) if role == "user"]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2):
            dropped.append({"reason": "roles do not alternate", "row": number})
        elif not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            dropped.append({"reason": "blank turn", "row": number})
        else:
            yield {"turns": texts, "domain": data.domains.get(row.get("source", ""), "chat"), "system": system, "template": None}


def _split(rows: list[dict[str, Any]], config: PromptsConfig, dropped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stage, kept = config.prompts, []
    for row in sorted(rows, key=lambda row: _uniform("order", row["id"])):
        place = _uniform("split", row["template"] or row["id"])
        for split in SPLITS:
            row["split"] = split
            if (place := place - stage.fractions[split]) < 0:
                break
    for split in SPLITS:
        mine = [row for row in rows if row["split"] == split]
        mine.sort(key=lambda row: _uniform("order", row["id"]))
        limit = stage.limits.get(split, len(mine))
        room = {domain: round(limit * share) for domain, share in stage.mix.items()}
        chosen, spare = [], []
        for row in mine:
            if room.get(row["domain"], 0) > 0:
                room[row["domain"]] -= 1
                chosen.append(row)
            else:
                spare.append(row)
        # Domains that the mix asks for and the data lack leave room for the others.
        free = max(limit - len(chosen), 0)
        kept += (chosen + spare[:free])[:limit]
        dropped += [{"reason": "over the limit", "row": row} for row in spare[free:] + (chosen + spare[:free])[limit:]]
    return kept


def _uniform(purpose: str, key: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{purpose}/{key}".encode()).digest()[:8], "big") / 2**64


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
