"""A tiny Llama of random weights with a byte tokenizer and a ChatML template, made on the spot: the target of tests."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipelines.settings import RandomSource

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(source: RandomSource, folder: Path) -> None:
    """Writes model and tokenizer; the same seed gives the same weights."""
    special = ["<|im_start|>", "<|im_end|>", "<|mask|>", "<|pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=special[:3]
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=source.width, num_hidden_layers=source.num_layers, num_attention_heads=source.num_heads,
        num_key_value_heads=source.num_kv_heads, intermediate_size=source.mlp_width, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=0, pad_token_id=3, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(source.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Like a trained model it must never say its mask token: width 0 carries a positive constant through every layer,
        # which only the logits of special tokens other than the stop token read, and read as very unlikely.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        for token in (0, 2, 3):
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = -1000.0
    model.bfloat16().save_pretrained(folder)
