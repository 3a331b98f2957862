"""Exports to stock architectures, and model cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from stacklm_hf.modeling import StackConfig, StackForCausalLM, convert_native, export_qwen3
from stacklm_hf.modeling.model_card import render_model_card, write_model_card

DATA = Path(__file__).parent.parent / "data"
TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8}


def tiny(**overrides) -> StackForCausalLM:
    torch.manual_seed(0)
    return StackForCausalLM(StackConfig(**{**TINY, **overrides})).eval()


class TestQwen3:
    @pytest.fixture(scope="class")
    def folders(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("export")
        stack = convert_native(
            DATA / "native_tiny_ropeall.pt", root / "stack", tokenizer=DATA / "native_tokenizer.json"
        )
        return stack, export_qwen3(stack, root / "qwen3")

    def test_stock_transformers_gives_the_same_logits(self, folders):
        expected = load_file(DATA / "native_tiny_ropeall.expected.safetensors")
        model, info = AutoModelForCausalLM.from_pretrained(folders[1], output_loading_info=True)
        assert type(model) is Qwen3ForCausalLM
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            torch.testing.assert_close(model(expected["input_ids"]).logits, expected["logits"], atol=1e-5, rtol=0)

    def test_nothing_of_stack_is_left_in_the_folder(self, folders):
        text = (folders[1] / "config.json").read_text()
        assert "auto_map" not in text
        assert "stack" not in text
        assert not list(folders[1].glob("*.py"))
        assert (folders[1] / "model.safetensors").is_file()

    def test_tokenizer_and_generation_settings_come_along(self, folders):
        stack, qwen3 = (AutoTokenizer.from_pretrained(folder) for folder in folders)
        text = "<|user|>What is 2021 * 2?<|end|>"
        assert qwen3(text).input_ids == stack(text).input_ids
        generation = json.loads((folders[1] / "generation_config.json").read_text())
        assert (generation["eos_token_id"], generation["pad_token_id"]) == (stack.eos_token_id, stack.pad_token_id)

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_model_in_memory(self, tmp_path, tied):
        model = tiny(nope_every=0, tie_word_embeddings=tied, rope_parameters={"rope_theta": 4e4})
        with torch.no_grad():
            expected = model(torch.arange(9)[None]).logits
            exported = Qwen3ForCausalLM.from_pretrained(export_qwen3(model, tmp_path / "out"))
            torch.testing.assert_close(exported(torch.arange(9)[None]).logits, expected, atol=1e-5, rtol=0)
            assert torch.equal(model(torch.arange(9)[None]).logits, expected)  # the source is left as it was
        assert (exported.lm_head.weight is exported.model.embed_tokens.weight) is tied

    def test_half_precision_stays(self, tmp_path):
        folder = export_qwen3(tiny(nope_every=0).to(torch.bfloat16), tmp_path / "out")
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"nope_every": 4}, "layers 3 have no rotary embedding"),
            ({"nope_every": 0, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
            ({"nope_every": 0, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ],
    )
    def test_what_qwen3_cannot_express_is_refused_with_what_to_do(self, tmp_path, settings, reason):
        with pytest.raises(ValueError, match=f"{reason}.*load the Stack checkpoint itself.*train with"):
            export_qwen3(tiny(**settings), tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_what_is_no_stack_model_is_refused(self, folders, tmp_path):
        with pytest.raises(ValueError, match="is a qwen3 model"):
            export_qwen3(folders[1], tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_nope_layers_beyond_the_last_one_do_not_matter(self, tmp_path):
        assert export_qwen3(tiny(nope_every=9), tmp_path / "out").is_dir()


class TestModelCard:
    RESULTS = {  # noqa: RUF012
        "held-out": {"n": 50, "accuracy": 0.98, "low": 0.895, "pass_at": {1: 0.98}},
        "new words|here": {"n": 12, "accuracy": 0.5, "calls": 2.25},
    }

    def test_the_hub_can_read_it(self):
        card = ModelCard(
            render_model_card(StackConfig(), self.RESULTS, name="me/stack", license="mit", datasets=["me/d"])
        )
        assert (card.data.library_name, card.data.license) == ("transformers", "mit")
        assert card.data.datasets == ["me/d"]
        assert [(r.dataset_split, r.metric_value) for r in card.data.eval_results] == [
            ("held-out", 0.98),
            ("new words|here", 0.5),
        ]

    def test_it_is_filled_from_the_config_and_the_evaluation(self):
        text = render_model_card(StackConfig(final_logit_softcapping=30.0), self.RESULTS)
        for part in ("101,353,728 (84,576,512 without", "3, 7, 11, 15, 19, 23, 27", "| logit soft cap | 30 |", "2,048"):
            assert part in text
        assert "| held-out | 50 | 0.980 | 0.895 |  |" in text
        assert "| new words\\|here | 12 | 0.500 |  | 2.250 |" in text

    def test_its_first_lines_ask_no_questions(self):
        text = render_model_card(StackConfig(), name="me/model")
        assert text.count('from_pretrained("me/model", trust_remote_code=True)') == text.count("from_pretrained(") == 2

    def test_without_an_evaluation_it_says_so(self, tmp_path):
        text = write_model_card(tmp_path, StackConfig(**TINY, nope_every=0)).read_text()
        assert "Not evaluated." in text
        assert "layers without RoPE | none" in text
        assert ModelCard(text).data.eval_results is None
        assert ModelCard(text).data.license is None  # the owner's to choose
