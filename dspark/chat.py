"""Conversation -> token ids, through the target's own chat template.

A prompt is always rendered as a serving engine would render it: the whole conversation so far, then the generation
prompt. Responses are never re-tokenised: a row is the prompt's ids followed by the ids that the engine returned, and only
the latter are supervised.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ChatTokenizer:
    """The target's tokenizer and template. Messages are `{"role": ..., "content": ...}`."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.stop_ids = stop_ids(folder, self._tokenizer)
        self.special_ids = tuple(sorted(set(self._tokenizer.all_special_ids) | set(self.stop_ids)))

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of the rendered conversation with the generation prompt."""
        ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, enable_thinking=False)["input_ids"]
        return [int(i) for i in ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """The response's text without special tokens, as it goes into the history of the next turn."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the generation config's eos ids (a turn's terminator may differ from eos), and eos."""
    import json

    ids = {tokenizer.eos_token_id}
    path = folder / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text()).get("eos_token_id", [])
        ids |= set(eos if isinstance(eos, list) else [eos])
    return tuple(sorted(ids - {None}))


def messages(system: str | None, turns: Sequence[str], responses: Sequence[str]) -> list[dict[str, str]]:
    """The conversation up to user turn len(responses), earlier turns answered."""
    result = [{"role": "system", "content": system}] if system else []
    for turn, response in zip(turns, responses, strict=False):
        result += [{"role": "user", "content": turn}, {"role": "assistant", "content": response}]
    return [*result, {"role": "user", "content": turns[len(responses)]}]
