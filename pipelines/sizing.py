"""How large a target cache will be, before anything is spent on it.

A cache holds an average row's states for every token, so its size follows from the number of rows and their lengths alone:

    size = estimate(settings, planned, root)      # None when no cache is to be made
    screen.cache_size(size)
    require_room(size, settings.stage.cache_targets)

The step itself asks again once the corpus is there, with its real numbers: `measure(stage, width, num_layers,
corpus_rows(corpus.record["metrics"], stage), out)` and `require_room`. Standard library only, since it is part of a plan.

Bytes of a row of T tokens with S responses' tokens, L tapped layers and width D (layout: dspark/cache.py):

    tapped states    (T - 2) · L · vector      a block sees nothing from the last supervised row on
    final states     S · vector                or S · num_top_logits · 8 (an id and a logit each)
    the rest         4 · S + 5 · T + 1,200     log-sum-exp; token id and mask; Arrow's framing, names and provenance

with vector = 2 · D in bf16, D + 1 in fp8 (codes and an exponent). Compression is not counted: sizes are what it starts from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark.storage import Storage
from pipelines.backends.object_store import open_storage
from pipelines.dag import Step
from pipelines.runner import Planned
from pipelines.settings import CacheTargetsStage, Settings

SPLITS = ("train", "select")  # of the prompts, whose answers are cached
STREAM_FOLDER = "stream"  # of a training's folder, where its window lies (stream.py)
FRAMING_BYTES = 1200  # of a row: eight columns of an Arrow record batch, its footer entry and its receipt
MAX_RECEIPTS = 16  # read of an unfinished corpus: shards are random samples of the prompts


@dataclass(frozen=True)
class Rows:
    """The rows of a corpus: how many, their tokens in all, and `how` it is known, for a person."""

    count: int
    prompt_tokens: int
    response_tokens: int
    how: str


@dataclass(frozen=True)
class CacheSize:
    """What a cache of `rows` takes, in bytes. `forms`: every form that it could have, by name; `chosen` is one of them.

    `stored_bytes` lie in its folder already (of an interrupted step: they are written once). `free_bytes` of its store is None
    where that cannot be known.
    """

    rows: Rows
    forms: Mapping[str, int]
    chosen: str
    deepspec_bytes: int
    stored_bytes: int
    free_bytes: int | None

    @property
    def tokens(self) -> int:
        return self.rows.prompt_tokens + self.rows.response_tokens


def estimate(settings: Settings, planned: Sequence[Planned], root: Storage) -> CacheSize | None:
    """The cache that `planned` is about to make below `root`; None when it makes none (a hit, or not asked for).

    A streamed one is made in passing whenever training runs. Its rows are, first that applies: exact (the corpus is there),
    measured (on shards of an unfinished corpus), or assumed.
    """
    stage, target, by_name = settings.stage.cache_targets, settings.target, {item.step.name: item for item in planned}
    cache, train = by_name.get("cache_targets"), by_name.get("train")
    if cache is None or (cache.verdict.is_hit and not cache.verdict.is_streamed):
        return None
    prefix = f"{cache.step.folder}/"
    if cache.verdict.is_streamed:
        if train is None or train.verdict.is_hit:
            return None
        prefix = f"{train.step.folder}/{STREAM_FOLDER}/"
    corpus = by_name["regenerate"]
    if corpus.verdict.record:
        rows = corpus_rows(corpus.verdict.record["metrics"], stage)
    else:
        num_prompts, said = _num_prompts(settings, by_name["prompts"])
        rows = _sampled_rows(root, corpus.step, num_prompts, said) or _assumed_rows(settings, num_prompts, said)
    return measure(stage, target.width, len(target.tapped_layers), rows, root, prefix)


def corpus_rows(metrics: Mapping[str, float], stage: CacheTargetsStage) -> Rows:
    """From a finished corpus's metrics: exact. One that was made before prompts' tokens were counted leaves these assumed."""
    count, response_tokens = int(metrics["rows"]), int(metrics["response_tokens"])
    if "prompt_tokens" in metrics:
        return Rows(count, int(metrics["prompt_tokens"]), response_tokens, "exact, the corpus is there")
    how = f"the corpus is there; prompts assumed: stage.cache_targets.assumed_prompt_tokens={stage.assumed_prompt_tokens}"
    return Rows(count, count * stage.assumed_prompt_tokens, response_tokens, how)


def measure(stage: CacheTargetsStage, width: int, num_layers: int, rows: Rows, store: Storage, prefix: str = "") -> CacheSize:
    """Every form of the cache. `width` D and `num_layers` L of its states; it lies (in part, perhaps) below `prefix` of `store`."""
    free_bytes = store.free_bytes()
    tokens = rows.prompt_tokens + rows.response_tokens
    num_tapped = max(tokens - 2 * rows.count, 0) * num_layers
    rest = 4 * rows.response_tokens + 5 * tokens + FRAMING_BYTES * rows.count
    forms = {}
    for logits in ("final", "topk"):
        for dtype, vector in (("bf16", 2 * width), ("fp8", width + 1)):
            at_row = vector if logits == "final" else 8 * stage.num_top_logits
            forms[f"{dtype} {logits}"] = num_tapped * vector + rows.response_tokens * at_row + rest
    return CacheSize(
        rows,
        forms,
        f"{stage.dtype} {stage.logits}",
        tokens * (6 + 2 * width * (num_layers + 1)),  # int32 id, two uint8 masks; every layer and the final state of every token
        0 if free_bytes is None else sum(_size_bytes(store, name) for name in store.list(prefix)),
        free_bytes,
    )


def _size_bytes(store: Storage, name: str) -> int:
    try:
        return store.size_bytes(name)
    except FileNotFoundError:  # another driver, whose stream lies here, has removed it since
        return 0


def require_room(size: CacheSize, stage: CacheTargetsStage) -> None:
    """ValueError when the cache is above stage.cache_targets.max_bytes or the free space of its store, with the ways out.

    A stream keeps `window_bytes` at most: only they need room.
    """
    total = size.forms[size.chosen]
    limits = [] if stage.max_bytes is None else [(stage.max_bytes, f"stage.cache_targets.max_bytes={stage.max_bytes}")]
    room = None if size.free_bytes is None else size.free_bytes + size.stored_bytes
    if stage.mode == "stream":
        for limit, said in limits:
            if stage.window_bytes > limit:
                raise ValueError(
                    f"stage.cache_targets.window_bytes: {stage.window_bytes} ({units(stage.window_bytes)}) is above {said}. "
                    f"Fix: stage.cache_targets.window_bytes={limit}, or a larger max_bytes"
                )
        if room is not None and min(stage.window_bytes, total) > room:
            raise ValueError(
                f"stage.cache_targets.window_bytes: {stage.window_bytes} ({units(stage.window_bytes)}) is above the free space, {units(room)}. "
                "Fix: a smaller window, or a cluster.root with more room"
            )
        return
    if room is not None:
        there = f" beside the {units(size.stored_bytes)} that are stored already" if size.stored_bytes else ""
        limits.append((room, f"the free space, {units(size.free_bytes or 0)}{there}"))
    exceeded = [(limit, said) for limit, said in limits if total > limit]
    if not exceeded:
        return
    least = min(limit for limit, _ in limits)
    fp8 = f"fp8 {stage.logits}"
    ways = [f"stage.cache_targets.dtype=fp8 ({units(size.forms[fp8])}, lossy)"] if size.chosen != fp8 and size.forms[fp8] <= least else []
    ways.append("fewer tokens (stage.regenerate.max_new_tokens, stage.prompts.limits.train)")
    window = min(stage.window_bytes, least)
    narrower = f" stage.cache_targets.window_bytes={window}" if window < stage.window_bytes else ""
    ways += [f"stage.cache_targets.mode=stream{narrower} (keeps {units(window)} at most)"] if window else []
    raise ValueError(
        f"stage.cache_targets: its cache would take {units(total)} ({total} bytes, {size.chosen}; {size.rows.count:,} rows, {size.rows.how}), "
        f"above {' and '.join(said for _, said in exceeded)}. Fix: {'; or '.join(ways)}"
    )


def units(num_bytes: float) -> str:
    """Decimal, as disks and object stores are sold: 950 B, 30.7 kB, 38.0 TB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        text = f"{num_bytes:.0f}" if unit == "B" else f"{num_bytes:.1f}"
        if float(text) < 1000:
            return f"{text} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} PB"


def _num_prompts(settings: Settings, prompts: Planned) -> tuple[int, str]:
    """Prompts that will be answered, and in words how surely."""
    if prompts.verdict.record:
        return sum(int(prompts.verdict.record["metrics"].get(split, 0)) for split in SPLITS), "one row a prompt"
    data, limits = prompts.step.config.data, settings.stage.prompts.limits
    most = data.hub.max_rows if data.hub else sum(_num_lines(uri) for uri in prompts.step.resources.files.values())
    return min(sum(limits.get(split, most) for split in SPLITS), most), "at most (stage.prompts.limits), one row a prompt"


def _num_lines(uri: str) -> int:
    folder, _, name = uri.rpartition("/")
    return sum(bool(line.strip()) for line in open_storage(folder).read(name).splitlines())


def _sampled_rows(root: Storage, corpus: Step, num_prompts: int, said: str) -> Rows | None:
    """Measured on the finished shards of a corpus; None without any, or when they do not count their prompts' tokens."""
    names = [name for name in root.list(f"{corpus.folder}/rows-") if name.endswith(".json")]
    some = names[:: max(-(-len(names) // MAX_RECEIPTS), 1)]
    receipts = [receipt for receipt in (json.loads(root.read(name)) for name in some) if "num_prompt_tokens" in receipt]
    counts = ("num_prompts", "num_rows", "num_prompt_tokens", "num_response_tokens")
    sampled, rows, prompt_tokens, response_tokens = (sum(receipt[count] for receipt in receipts) for count in counts)
    if not rows:
        return None
    share = num_prompts / sampled
    how = f"{said.removesuffix('one row a prompt')}measured on {rows:,} rows of the unfinished corpus"
    return Rows(round(rows * share), round(prompt_tokens * share), round(response_tokens * share), how)


def _assumed_rows(settings: Settings, num_prompts: int, said: str) -> Rows:
    """Nothing to measure yet: the mean lengths that the settings assume."""
    stage, most = settings.stage.cache_targets, settings.stage.regenerate.max_new_tokens
    prompt, response = stage.assumed_prompt_tokens, min(stage.assumed_response_tokens, most)
    cap = f" (stage.regenerate.max_new_tokens={most})" if response < stage.assumed_response_tokens else ""
    how = (
        f"{said}; lengths assumed: stage.cache_targets.assumed_prompt_tokens={prompt}, "
        f"assumed_response_tokens={stage.assumed_response_tokens}{cap}"
    )
    return Rows(num_prompts, num_prompts * prompt, num_prompts * response, how)
