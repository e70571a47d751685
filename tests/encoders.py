"""An encoder small enough for seconds, in the form of a pretrained one."""

import torch


def write_tiny_encoder(folder, words):
    """Write an untrained encoder that reads whole words, and its tokenizer, to a folder."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    specials["sep_token"] = "[SEP]"
    tokens = [*specials.values(), *words]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(
            BertConfig(
                vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=32, max_position_embeddings=200,
            )
        ).save_pretrained(folder)  # fmt: skip
