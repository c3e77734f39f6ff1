"""The paper's nine benchmarks on the Hugging Face Hub, as data: where each lies and how a row becomes a prompt.

`stage.evaluate.benchmarks={gsm8k: hub}` takes one from here; the stage loads it with `datasets`. Prompts read as in DeepSpec's files
(`eval_datasets/*.jsonl`), and domains are those of the paper's Table 1. All of it is part of evaluate's fingerprint. The names on
the Hub come from public code that loads these sets; nothing here has been loaded from the Hub itself yet.
"""

from dataclasses import dataclass

HUB = "hub"  # a benchmark's uri that stands for its data set here
PAPER_SUBSET_SEED = 980406  # DeepSpec shuffles a benchmark's rows with it before it takes the first


@dataclass(frozen=True)
class HubBenchmark:
    """`prompt`: a format string over a row's columns; `optional` is another one for rows whose column of that name is not empty.
    Or, in their place, the column that holds the list of all turns. `files`: JSONL files of a repository that `datasets` cannot
    load by its name."""

    repository: str
    subset: str | None
    split: str
    prompt: str | None
    turns_column: str | None = None
    optional: tuple[str, str] | None = None
    files: tuple[str, ...] = ()
    revision: str = "main"


_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
_PROBLEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests. You will NOT return anything except for the program\n\n"
    "### Question:\n{question_content}\n\n"
)
_ANSWER = "\n```\n\n### Answer: (use the provided format with backticks)"
_STDIN = _PROBLEM + "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE" + _ANSWER
_STARTER = _PROBLEM + "### Format: Use the following code structure:\n```python\n{starter_code}" + _ANSWER

DOMAINS = {
    "gsm8k": "math", "math500": "math", "aime25": "math", "mbpp": "code", "humaneval": "code", "livecodebench": "code",
    "mt-bench": "chat", "alpaca": "chat", "arena-hard-v2": "chat",
}  # fmt: skip
ON_HUB = {
    "gsm8k": HubBenchmark("openai/gsm8k", "main", "test", "{question}" + _REASON),
    "math500": HubBenchmark("HuggingFaceH4/MATH-500", None, "test", "{problem}" + _REASON),
    "aime25": HubBenchmark("MathArena/aime_2025", None, "train", "{problem}" + _REASON),
    "mbpp": HubBenchmark("google-research-datasets/mbpp", "sanitized", "test", "{prompt}"),
    "humaneval": HubBenchmark("openai/openai_humaneval", None, "test", _HUMANEVAL),
    "livecodebench": HubBenchmark(
        "livecodebench/code_generation_lite",
        None,
        "train",
        _STDIN,
        optional=("starter_code", _STARTER),
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
    ),
    "mt-bench": HubBenchmark("HuggingFaceH4/mt_bench_prompts", None, "train", None, turns_column="prompt"),
    "alpaca": HubBenchmark("tatsu-lab/alpaca", None, "train", "{instruction}", optional=("input", "{instruction}\n\nInput:\n{input}")),
    "arena-hard-v2": HubBenchmark("lmarena-ai/arena-hard-auto", None, "train", "{prompt}", files=("data/arena-hard-v2.0/question.jsonl",)),
}
