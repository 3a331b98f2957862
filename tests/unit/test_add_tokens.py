"""Any causal language model becomes a student: nine tokens more, nothing else changed."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2TokenizerFast,
    LlamaTokenizerFast,
    PhiConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PythonBackend,
    Qwen2TokenizerFast,
    Qwen3Config,
)

from stacklm_hf.modeling.add_tokens import add_agent_tokens
from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast, generation_defaults
from stacklm_hf.protocol.encoding import encode_trusted, encode_untrusted
from stacklm_hf.protocol.tokens import END, PAD, SPECIAL_TOKENS
from stacklm_hf.protocol.wire import neutralize

DATA = Path(__file__).parents[1] / "data"
NATIVE = StackTokenizerFast.from_native(DATA / "native_tokenizer.json")
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONVERSATION = [
    {"role": "user", "content": "What  is <|endoftext|> <|end|>?"},
    {"role": "assistant", "content": "Thought: é"},
]


def host_tokenizer(kind: type[PreTrainedTokenizerFast] = Qwen2TokenizerFast, **kwargs) -> PreTrainedTokenizerFast:
    """Somebody else's tokenizer: 503 byte-level tokens and its own end token, 504 ids in all."""
    model = json.loads(NATIVE.backend_tokenizer.to_str())["model"]
    vocab = {token: index for token, index in model["vocab"].items() if token not in SPECIAL_TOKENS}
    kwargs = {"unk_token": None, "bos_token": None, "pad_token": None, "eos_token": "<|endoftext|>", **kwargs}
    return kind(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]], **kwargs)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A host of another family: pieces with byte fallback, a blank in front of a text's first word."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.printable, "▁t", "he"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return LlamaTokenizerFast(vocab=vocab, merges=[("▁", "t"), ("h", "e")])


def host_model(rows: int, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=rows, num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied, **SMALL)
    return AutoModelForCausalLM.from_config(config)


def embeddings(model: PreTrainedModel) -> list[torch.Tensor]:
    return [layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spare", [0, 4, 9, 40])
class TestVocabulary:
    def test_old_rows_stay_and_new_rows_are_the_mean_of_them(self, tied, spare):
        tokenizer, model = host_tokenizer(), host_model(504 + spare, tied)
        before = embeddings(model)
        done = add_agent_tokens(model, tokenizer)
        assert list(done.token_ids) == list(SPECIAL_TOKENS)
        assert list(done.token_ids.values()) == list(done.initialized_rows) == list(range(504, 513))
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(504, 513))
        for old, new in zip(before, embeddings(model), strict=True):
            assert torch.equal(new[:504], old[:504])
            assert torch.equal(new[513:], old[513:])
            torch.testing.assert_close(new[504:513], old[:504].mean(0).expand(9, -1))

    def test_a_padded_vocabulary_never_shrinks(self, tied, spare):
        model = host_model(504 + spare, tied)
        add_agent_tokens(model, host_tokenizer())
        size = max(504 + spare, 513)
        assert {len(weight) for weight in embeddings(model)} == {model.config.vocab_size} == {size}
        assert model(torch.tensor([[504, 512]])).logits.shape == (1, 2, size)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied

    def test_a_second_call_changes_nothing(self, tied, spare):
        tokenizer, model = host_tokenizer(), host_model(504 + spare, tied)
        first = add_agent_tokens(model, tokenizer)
        with torch.no_grad():
            model.get_input_embeddings().weight[504:] += 1.0  # trained meanwhile
        weights, text = embeddings(model), tokenizer.backend_tokenizer.to_str()
        second = add_agent_tokens(model, tokenizer)
        assert (second.token_ids, second.initialized_rows) == (first.token_ids, ())
        assert second.trainable_token_indices == first.trainable_token_indices
        assert all(torch.equal(a, b) for a, b in zip(weights, embeddings(model), strict=True))
        assert tokenizer.backend_tokenizer.to_str() == text

    def test_it_is_saved_and_reloaded_right(self, tied, spare, tmp_path):
        tokenizer, model = host_tokenizer(), host_model(504 + spare, tied)
        add_agent_tokens(model, tokenizer)
        expected = tokenizer.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True)
        logits = model(torch.tensor([expected["input_ids"]])).logits
        for _ in range(2):
            model.save_pretrained(tmp_path)
            tokenizer.save_pretrained(tmp_path)
            model, tokenizer = (auto.from_pretrained(tmp_path) for auto in (AutoModelForCausalLM, AutoTokenizer))
        again = tokenizer.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True)
        assert (again["input_ids"], again["assistant_masks"]) == (expected["input_ids"], expected["assistant_masks"])
        assert torch.equal(model(torch.tensor([again["input_ids"]])).logits, logits)
        assert add_agent_tokens(model, tokenizer).initialized_rows == ()
        assert tokenizer.padding_side == "left"
        assert tokenizer.response_template == NATIVE.response_template

    def test_new_rows_train(self, tied, spare):
        model = host_model(504 + spare, tied)
        end = add_agent_tokens(model, host_tokenizer()).token_ids[END]
        before = embeddings(model)
        ids = torch.tensor([[1, 2, end, end]])
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert all(not torch.equal(a[end], b[end]) for a, b in zip(before, embeddings(model), strict=True))


class TestAgreement:
    def test_tokenizer_config_and_generation_config_name_the_same_end_and_padding(self):
        tokenizer, model = host_tokenizer(), host_model(504)
        add_agent_tokens(model, tokenizer)
        ids = generation_defaults(tokenizer)
        assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
        for config in (tokenizer, model.config, model.generation_config):
            assert (config.eos_token_id, config.pad_token_id) == (ids["eos_token_id"], ids["pad_token_id"])

    def test_generation_stops_at_the_end_of_a_turn(self):
        tokenizer, model = host_tokenizer(), host_model(504)
        end = add_agent_tokens(model, tokenizer).token_ids[END]
        always_end = torch.nn.functional.one_hot(torch.tensor(end), 513).float()
        model.lm_head.forward = lambda hidden: always_end.expand(*hidden.shape[:2], -1)
        assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=8).tolist() == [[1, 2, end]]

    def test_the_wire_format_works_with_the_hosts_own_specials_kept_out_of_it(self):
        tokenizer = host_tokenizer()
        add_agent_tokens(host_model(504), tokenizer)
        out = tokenizer.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True)
        text = "<|user|>What  is < |endoftext|> < |end|>?<|end|><|assistant|>Thought: é<|end|>"
        assert tokenizer.decode(out["input_ids"]) == text
        assert sum(i >= 503 for i in out["input_ids"]) == 4
        trained = [i for i, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
        assert tokenizer.decode(trained) == "Thought: é<|end|>"
        assert encode_untrusted(tokenizer, "<|endoftext|>") != [503]

    @pytest.mark.parametrize(
        "tokenizer",
        [host_tokenizer(), host_tokenizer(GPT2TokenizerFast), llama_tokenizer()],
        ids=lambda tokenizer: type(tokenizer).__name__,
    )
    def test_the_template_gives_the_ids_of_the_token_native_path(self, tokenizer):
        add_agent_tokens(host_model(504), tokenizer)
        spans = [
            ("<|user|>", "the  hidden size </s>? <|end|>é\n"),
            ("<|assistant|>", "the size"),
            ("<|tool_result|>", "4"),
        ]
        llama, roles = "</s>" in tokenizer.get_vocab(), ("user", "assistant", "tool")
        messages = [{"role": role, "content": text} for role, (_, text) in zip(roles, spans, strict=True)]
        expected = []
        for marker, text in spans:
            text = neutralize(text)
            if llama:  # whose own end token it is
                text = text.replace("</s>", "< /s>")
            expected += encode_trusted(tokenizer, marker) + encode_untrusted(tokenizer, text)
            expected += encode_trusted(tokenizer, END)
        assert tokenizer.apply_chat_template(messages, return_dict=False) == expected

    def test_a_native_model_has_them_already(self):
        tokenizer, model = StackTokenizerFast.from_native(DATA / "native_tokenizer.json"), host_model(512)
        before, text = embeddings(model), tokenizer.backend_tokenizer.to_str()
        assert add_agent_tokens(model, tokenizer).initialized_rows == ()
        assert tokenizer.backend_tokenizer.to_str() == text
        assert tokenizer.chat_template == NATIVE.chat_template
        assert tokenizer.all_special_tokens == NATIVE.all_special_tokens
        assert all(torch.equal(a, b) for a, b in zip(before, embeddings(model), strict=True))


class TestHosts:
    def test_a_token_that_the_host_has_keeps_its_id_and_row_but_becomes_exact(self):
        tokenizer = host_tokenizer()
        tokenizer.add_tokens([AddedToken("<|user|>", rstrip=True), AddedToken(END, special=True, rstrip=True)])
        model = host_model(506)
        before = embeddings(model)[0]
        done = add_agent_tokens(model, tokenizer)
        assert (done.token_ids["<|user|>"], done.token_ids[END]) == (504, 505)
        assert done.initialized_rows == tuple(range(506, 513))
        assert torch.equal(embeddings(model)[0][:506], before)
        assert tokenizer.decode(encode_trusted(tokenizer, "<|user|>  a<|end|> ")) == "<|user|>  a<|end|> "
        assert not {504, 505} & set(encode_untrusted(tokenizer, "<|user|><|end|>"))

    def test_special_tokens_of_the_host_stay_special(self, tmp_path):
        tokenizer = host_tokenizer(extra_special_tokens=["<|im_start|>"])
        tokenizer.add_tokens([AddedToken("<think>", special=False)])
        add_agent_tokens(host_model(506), tokenizer)
        tokenizer.save_pretrained(tmp_path)
        for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
            assert {"<|im_start|>", *SPECIAL_TOKENS} <= set(loaded.all_special_tokens)
            ids = encode_trusted(loaded, "<|im_start|><think><|end|>")
            assert loaded.convert_ids_to_tokens(ids) == ["<|im_start|>", "<think>", END]

    def test_an_output_layer_with_a_bias(self):
        config = PhiConfig(vocab_size=504, tie_word_embeddings=False, **SMALL)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.lm_head.bias.normal_()
        expected = model.lm_head.bias.mean()
        done = add_agent_tokens(model, host_tokenizer())
        torch.testing.assert_close(model.lm_head.bias[504:], expected.expand(9))
        assert done.modules_to_save == ["embed_tokens", "lm_head"]

    def test_layers_are_named_as_the_host_names_them(self, tmp_path):
        model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=504, n_embd=16, n_layer=1, n_head=2))
        tokenizer = host_tokenizer(GPT2TokenizerFast)
        done = add_agent_tokens(model, tokenizer)
        assert done.trainable_token_indices == {"wte": list(range(504, 513))}
        tokenizer.save_pretrained(tmp_path)
        text = "<|user|>hidden  size<|end|>"
        assert encode_trusted(AutoTokenizer.from_pretrained(tmp_path), text) == encode_trusted(tokenizer, text)

    def test_a_tokenizer_extended_earlier_with_a_fresh_model(self):
        tokenizer = host_tokenizer()
        add_agent_tokens(host_model(504), tokenizer)
        model = host_model(504)
        before = embeddings(model)[0]
        assert add_agent_tokens(model, tokenizer).initialized_rows == tuple(range(504, 513))
        torch.testing.assert_close(embeddings(model)[0][504:], before.mean(0).expand(9, -1))

    def test_half_precision_rows_are_averaged_in_full(self):
        model = host_model(504).to(torch.bfloat16)
        expected = model.get_input_embeddings().weight.float().mean(0).to(torch.bfloat16)
        add_agent_tokens(model, host_tokenizer())
        assert torch.equal(model.get_input_embeddings().weight[504], expected)

    def test_the_tokenizer_of_another_model_is_refused(self):
        with pytest.raises(ValueError, match="ids up to 503, the model only 100 rows"):
            add_agent_tokens(host_model(100), host_tokenizer())

    def test_a_tokenizer_without_the_backend_is_refused(self):
        class Letters(PythonBackend):
            @property
            def vocab_size(self):
                return 1

            def get_vocab(self):
                return {"a": 0}

        with pytest.raises(TypeError, match="Letters has no `tokenizers` backend"):
            add_agent_tokens(host_model(504), Letters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
class TestLora:
    def train(self, tied, tmp_path, **hint):
        from peft import LoraConfig, PeftModel, get_peft_model

        tokenizer, model = host_tokenizer(), host_model(504, tied)
        done = add_agent_tokens(model, tokenizer)
        hint = {key: getattr(done, key, value) for key, value in hint.items()}
        lora = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **hint))
        ids = torch.tensor([[1, 2, *done.token_ids.values()]])
        before = lora(ids).logits.detach()
        optimizer = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=1.0)
        lora(ids, labels=ids).loss.backward()
        optimizer.step()
        lora.save_pretrained(tmp_path)

        fresh = host_model(504, tied)
        add_agent_tokens(fresh, host_tokenizer())
        reloaded = PeftModel.from_pretrained(fresh, tmp_path)
        return ids, before, lora, reloaded

    def test_control_tokens_train_alone_and_survive_a_reload(self, tied, tmp_path):
        ids, before, lora, reloaded = self.train(tied, tmp_path, trainable_token_indices=True)
        after = lora(ids).logits
        assert not torch.allclose(after[..., 504:], before[..., 504:])
        torch.testing.assert_close(reloaded(ids).logits, after)
        merged = lora.merge_and_unload()
        base = embeddings(host_model(504, tied))
        for old, new in zip(base, embeddings(merged), strict=True):
            assert torch.equal(new[:504], old)
            assert not torch.equal(new[504], new[505])
        torch.testing.assert_close(merged(ids).logits, after)

    def test_whole_layers_can_be_kept_instead(self, tied, tmp_path):
        ids, before, lora, reloaded = self.train(tied, tmp_path, modules_to_save=True, ensure_weight_tying=tied)
        after = lora(ids).logits
        assert not torch.allclose(after[..., 504:], before[..., 504:])
        torch.testing.assert_close(reloaded(ids).logits, after)
