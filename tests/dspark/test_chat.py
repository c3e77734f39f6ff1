"""Conversations, and a tokenizer with a chat template built here."""

import json

import pytest

from dspark.chat import ChatTokenizer, messages


def test_messages_of_a_first_turn_are_the_user_alone():
    assert messages(None, ["a", "b"], []) == [{"role": "user", "content": "a"}]


def test_messages_of_a_later_turn_interleave_the_answers_in_order():
    found = messages("be brief", ["a", "b", "c"], ["A", "B"])
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "be brief"), ("user", "a"), ("assistant", "A"), ("user", "b"), ("assistant", "B"), ("user", "c"),
    ]  # fmt: skip


def test_messages_without_a_system_prompt_have_no_system_turn():
    assert [m["role"] for m in messages("", ["a", "b"], ["A"])] == ["user", "assistant", "user"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<end>", "user", "assistant", "hello", "there", "yes"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' <end> ' }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %} there{% endif %}"
    )
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    return path


def test_prompt_ids_end_with_the_generation_prompt_and_switch_thinking_off(folder):
    assert ChatTokenizer(folder).prompt_ids(messages(None, ["hello there", "hello"], ["yes"])) == [4, 6, 7, 3, 5, 8, 3, 4, 6, 3, 5, 7]


def test_stop_ids_are_those_of_the_generation_config_and_eos(folder, tmp_path):
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.stop_ids == (2, 3)
    assert set(tokenizer.special_ids) == {0, 1, 2, 3}


def test_text_of_a_response_leaves_special_tokens_out(folder):
    assert ChatTokenizer(folder).text([6, 7, 2]) == "hello there"
