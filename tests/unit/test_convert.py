"""Importing native checkpoints: every tensor in its place, or an error that names it and nothing written."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stacklm_hf.modeling import StackTokenizerFast, convert_native
from stacklm_hf.modeling.convert import native_config
from stacklm_hf.protocol import SPECIAL_TOKENS

DATA = Path(__file__).parent.parent / "data"
CHECKPOINT = DATA / "native_tiny.pt"
CONFIG = json.loads((DATA / "native_tiny.config.json").read_text())
TOKENIZER = DATA / "native_tokenizer.json"
EXPECTED = load_file(DATA / "native_tiny.expected.safetensors")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return dict(torch.load(CHECKPOINT, weights_only=True)["model"])


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(EXPECTED["input_ids"]).logits


def refused(tmp_path: Path, checkpoint, **kwargs) -> str:
    """The one-line reason for which `checkpoint` is refused, once it is sure that nothing was written."""
    if not isinstance(checkpoint, Path):
        torch.save(checkpoint, path := tmp_path / "checkpoint.pt")
        checkpoint = path
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        convert_native(checkpoint, tmp_path / "out", **kwargs)
    assert sorted(tmp_path.rglob("*")) == before
    assert "\n" not in str(error.value)
    return str(error.value)


class TestConverts:
    def test_a_training_checkpoint_with_optimizer_and_rng_state(self, tmp_path):
        folder = convert_native(CHECKPOINT, tmp_path / "out", config=DATA / "native_tiny.config.json")
        torch.testing.assert_close(logits_of(folder), EXPECTED["logits"], atol=1e-5, rtol=0)

    def test_a_training_checkpoint_with_the_random_states_of_numpy_and_python(self, tmp_path, state):
        random_state = {"numpy": np.random.get_state(), "python": random.getstate(), "cuda": [torch.get_rng_state()]}
        torch.save({"model": state, "rng": random_state, "loss": np.float64(2.5)}, tmp_path / "training.pt")
        folder = convert_native(tmp_path / "training.pt", tmp_path / "out", config=CONFIG)
        torch.testing.assert_close(logits_of(folder), EXPECTED["logits"], atol=1e-5, rtol=0)

    def test_the_config_that_the_checkpoint_carries_where_none_is_given(self, tmp_path):
        folder = convert_native(CHECKPOINT, tmp_path / "out")
        torch.testing.assert_close(logits_of(folder), EXPECTED["logits"], atol=1e-5, rtol=0)

    @pytest.mark.parametrize("head", ["kept", "left out"])
    def test_a_bare_state_dict_with_or_without_its_tied_head(self, tmp_path, state, head):
        if head == "left out":
            del state["lm_head.weight"]
        torch.save(state, tmp_path / "state.pt")
        folder = convert_native(tmp_path / "state.pt", tmp_path / "out", config=CONFIG)
        torch.testing.assert_close(logits_of(folder), EXPECTED["logits"], atol=1e-5, rtol=0)

    def test_an_untied_head(self, tmp_path, state):
        state["lm_head.weight"] = 2 * state["lm_head.weight"]
        torch.save(state, tmp_path / "state.pt")
        folder = convert_native(tmp_path / "state.pt", tmp_path / "out", config={**CONFIG, "tie_embeddings": False})
        torch.testing.assert_close(logits_of(folder), 2 * EXPECTED["logits"], atol=2e-5, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_dtype_is_kept(self, tmp_path, state, dtype):
        torch.save({name: tensor.to(dtype) for name, tensor in state.items()}, tmp_path / "half.pt")
        folder = convert_native(tmp_path / "half.pt", tmp_path / "out", config=CONFIG)
        assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype

    def test_mixed_dtypes_lose_nothing(self, tmp_path, state):
        state["blocks.0.mlp.up.weight"] = state["blocks.0.mlp.up.weight"].half()
        torch.save(state, tmp_path / "mixed.pt")
        folder = convert_native(tmp_path / "mixed.pt", tmp_path / "out", config=CONFIG)
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32

    def test_tokenizer_config_and_generation_config_agree(self, tmp_path):
        folder = convert_native(CHECKPOINT, tmp_path / "out", tokenizer=TOKENIZER)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        end, pad = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>"])
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(503, 512))
        assert tokenizer.eos_token_id == model.config.eos_token_id == end
        assert tokenizer.pad_token_id == model.config.pad_token_id == pad
        saved = GenerationConfig.from_pretrained(folder)
        assert (saved.eos_token_id, saved.pad_token_id) == (end, pad)
        assert tokenizer.model_max_length == model.config.max_position_embeddings == 128

    def test_a_tokenizer_object(self, tmp_path):
        folder = convert_native(CHECKPOINT, tmp_path / "out", tokenizer=StackTokenizerFast.from_native(TOKENIZER))
        assert len(AutoTokenizer.from_pretrained(folder)) == 512

    def test_the_folder_is_complete_and_has_no_pickle(self, tmp_path):
        folder = convert_native(CHECKPOINT, tmp_path / "a" / "out", tokenizer=TOKENIZER)
        files = {file.name for file in folder.iterdir()}
        assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
        assert files >= {"configuration_stack.py", "modeling_stack.py"}
        assert not [name for name in files if name.endswith((".pt", ".bin", ".pkl"))]
        assert [entry.name for entry in folder.parent.iterdir()] == ["out"]
        assert "217,952" in (folder / "README.md").read_text()

    def test_again_into_the_same_folder(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        for checkpoint in ("native_tiny_ropeall.pt", "native_tiny.pt"):
            folder = convert_native(DATA / checkpoint, tmp_path / "out")
        torch.testing.assert_close(logits_of(folder), EXPECTED["logits"], atol=1e-5, rtol=0)
        assert (folder / "notes.txt").read_text() == "mine"


class TestConfig:
    def test_every_setting_is_translated(self):
        config = native_config({**CONFIG, "rope_theta": 40000.0, "attn_soft_cap": 20.0, "logit_soft_cap": 30.0})
        assert config.rope_parameters["rope_theta"] == 40000.0
        assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 30.0)
        assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 128, 5)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
        assert (config.vocab_size, config.max_position_embeddings, config.nope_every) == (512, 128, 4)
        assert (config.rms_norm_eps, config.z_loss_coef, config.tie_word_embeddings) == (1e-5, 1e-4, True)

    def test_an_empty_one_is_stack_100m(self):
        assert native_config({}).to_diff_dict() == {**native_config({}).to_diff_dict(), "model_type": "stack"}
        assert native_config({}).num_hidden_layers == 30

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"use_mla": True}, "latent attention"),
            ({"mtp_heads": 2}, "multi-token prediction heads"),
            ({"qk_norm": False}, "QK-norm"),
            ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
            ({"d_model": "wide"}, "hidden_size"),
            ({"n_heads": 3}, "num_attention_heads"),
            ({"n_heads": 0}, "num_attention_heads"),
            ({"n_kv_heads": 0}, "num_key_value_heads"),
            ({"d_model": -64}, "hidden_size"),
            ({"max_seq_len": 0}, "max_position_embeddings"),
            ({"norm_eps": float("nan")}, "rms_norm_eps"),
            ({"logit_soft_cap": float("inf")}, "final_logit_softcapping"),
            ({"rope_theta": None}, "rope_theta"),
            ({"rope_theta": "10000"}, "rope_theta"),
            ({"rope_theta": -1.0}, "rope_theta"),
        ],
    )
    def test_what_the_architecture_does_not_have_is_refused_by_name(self, tmp_path, settings, reason):
        assert reason in refused(tmp_path, CHECKPOINT, config={**CONFIG, **settings})

    def test_unknown_settings_that_are_off_do_not_matter(self):
        assert native_config({**CONFIG, "dropout": 0.0, "new_thing": False}).hidden_size == 64

    def test_a_given_config_counts_more_than_the_carried_one_and_says_so(self, tmp_path, caplog):
        folder = convert_native(CHECKPOINT, tmp_path / "out", config={**CONFIG, "max_seq_len": 256})
        assert AutoModelForCausalLM.from_pretrained(folder).config.max_position_embeddings == 256
        assert "max_seq_len" in caplog.text


class TestRefusesNamingTheTensors:
    def test_missing(self, tmp_path, state):
        del state["blocks.2.attn.q_norm.weight"], state["final_norm.weight"]
        reason = refused(tmp_path, state, config=CONFIG)
        assert "missing: final_norm.weight, blocks.2.attn.q_norm.weight" in reason

    @pytest.mark.parametrize("extra", ["blocks.0.attn.w_dkv.weight", "mtp.0.proj.weight", "blocks.5.mlp.up.weight"])
    def test_extra(self, tmp_path, state, extra):
        state[extra] = torch.zeros(2, 2)
        assert f"not part of a Stack model: {extra}" in refused(tmp_path, {"model": state}, config=CONFIG)

    def test_misshaped(self, tmp_path, state):
        state["blocks.1.mlp.up.weight"] = torch.zeros(127, 64)
        reason = refused(tmp_path, state, config=CONFIG)
        assert "blocks.1.mlp.up.weight has shape (127, 64), expected (128, 64)" in reason

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, tmp_path, state, value):
        for name in ("tok_emb.weight", "blocks.1.mlp.up.weight"):
            state[name] = state[name].clone().index_fill(0, torch.tensor(3), value)
        del state["lm_head.weight"]
        reason = refused(tmp_path, state, config=CONFIG)
        assert "NaN or infinity: tok_emb.weight, lm_head.weight, blocks.1.mlp.up.weight" in reason

    @pytest.mark.parametrize(
        "change", [torch.Tensor.to_sparse, lambda x: x.to("meta"), lambda x: x.to(torch.complex64)]
    )
    def test_what_is_no_plain_tensor(self, tmp_path, state, change):
        state["tok_emb.weight"] = change(state["tok_emb.weight"])
        assert "floating point: tok_emb.weight" in refused(tmp_path, state, config=CONFIG)

    def test_without_a_name(self, tmp_path, state):
        assert "not named tensors: 5" in refused(tmp_path, {**state, 5: torch.zeros(2)}, config=CONFIG)

    def test_all_at_once(self, tmp_path, state):
        del state["blocks.0.attn.wq.weight"]
        state["blocks.0.attn.wq.bias"] = torch.zeros(64)
        state["final_norm.weight"] = torch.ones(32)
        state["blocks.4.mlp.gate.weight"] = torch.zeros(128, 64, dtype=torch.int8)
        reason = refused(tmp_path, state, config=CONFIG)
        for name in ("attn.wq.weight", "attn.wq.bias", "final_norm.weight has shape (32,)", "blocks.4.mlp.gate.weight"):
            assert name in reason

    def test_the_wrong_size_altogether(self, tmp_path):
        assert "more" in refused(tmp_path, CHECKPOINT, config={})

    def test_a_head_that_is_not_tied_though_the_config_says_so(self, tmp_path, state):
        state["lm_head.weight"] = 2 * state["lm_head.weight"]
        assert "tie_embeddings" in refused(tmp_path, state, config=CONFIG)


class TestRefusesFiles:
    def test_a_checkpoint_that_would_run_code_does_not_run_it(self, tmp_path, state):
        class Trap:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "sprung"),)

        reason = refused(tmp_path, {"model": state, "extra": Trap()}, config=CONFIG)
        assert "without running code" in reason
        assert "mkdir" in reason

    @pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04" + bytes(50)])
    def test_what_is_no_checkpoint(self, tmp_path, content):
        (path := tmp_path / "broken.pt").write_bytes(content)
        assert "broken.pt" in refused(tmp_path, path)

    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_cut_checkpoint(self, tmp_path, state, zipped):
        torch.save(state, path := tmp_path / "cut.pt", _use_new_zipfile_serialization=zipped)
        content = path.read_bytes()
        for length in (*range(0, len(content), 30_011), len(content) - 10):
            path.write_bytes(content[:length])
            assert "cut.pt" in refused(tmp_path, path)

    def test_a_damaged_checkpoint_is_refused_wherever_the_reader_stumbles(self, tmp_path, monkeypatch):
        for error in (AssertionError("storage key"), TypeError("set_()"), OSError(22, "Invalid argument")):
            monkeypatch.setattr("torch.load", Mock(side_effect=error))
            assert "native_tiny.pt is not a PyTorch checkpoint, or a damaged one" in refused(tmp_path, CHECKPOINT)

    @pytest.mark.parametrize("content", [[1, 2], {}, {"model": {}}, {"model": None}, {"step": 3}, torch.zeros(2)])
    def test_a_file_without_a_state_dict(self, tmp_path, content):
        assert "state dict" in refused(tmp_path, content)

    def test_files_that_do_not_exist(self, tmp_path):
        assert "no checkpoint at" in refused(tmp_path, tmp_path / "absent.pt")
        assert "no native config at" in refused(tmp_path, CHECKPOINT, config=tmp_path / "absent.json")

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_a_config_that_is_no_json_object(self, tmp_path, text):
        (path := tmp_path / "config.json").write_text(text)
        assert "config.json" in refused(tmp_path, CHECKPOINT, config=path)

    def test_a_tokenizer_of_another_size(self, tmp_path):
        reason = refused(tmp_path, CHECKPOINT, tokenizer=DATA / "native_tokenizer_padded.json")
        assert "700" in reason
        assert "512" in reason

    def test_a_tokenizer_that_is_none(self, tmp_path):
        (path := tmp_path / "tokenizer.json").write_text("{}")
        assert "tokenizer.json" in refused(tmp_path, CHECKPOINT, tokenizer=path)

    def test_an_output_that_is_a_file(self, tmp_path):
        (tmp_path / "out").write_text("mine")
        assert "is a file" in refused(tmp_path, CHECKPOINT)

    def test_a_failure_while_writing_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(*_, **__):
            raise ValueError("the disk is full")

        monkeypatch.setattr("stacklm_hf.modeling.convert.write_model_card", fail)
        assert "disk" in refused(tmp_path, CHECKPOINT)


class TestKilledWhileWriting:
    """Whatever loads afterwards is whole: the old or the new, never some of each."""

    OLD: ClassVar = {"checkpoint": DATA / "native_tiny_ropeall.pt", "tokenizer": TOKENIZER}
    NEW: ClassVar = {"checkpoint": CHECKPOINT, "tokenizer": TOKENIZER}

    def killed(self, out: Path, monkeypatch, after: int) -> bool:
        """Convert, but die after so many changes to the folder; whether it died."""
        left = iter(range(after))

        def dying(change):
            def call(*args, **kwargs):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return change(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying(os.replace))
            patch.setattr(Path, "rename", dying(Path.rename))
            patch.setattr(Path, "unlink", dying(Path.unlink))
            try:
                convert_native(out_dir=out, **self.NEW)
            except KeyboardInterrupt:
                return True
        return False

    def test_a_new_folder_appears_in_one_step(self, tmp_path, monkeypatch):
        assert self.killed(tmp_path / "out", monkeypatch, after=0)
        assert list(tmp_path.iterdir()) == []
        assert not self.killed(tmp_path / "out", monkeypatch, after=1)

    def test_an_old_folder_loads_as_it_was_or_not_at_all_or_as_the_new_one(self, tmp_path, monkeypatch):
        old = convert_native(out_dir=tmp_path / "old", **self.OLD)
        new = convert_native(out_dir=tmp_path / "new", **self.NEW)
        whole = [logits_of(old), logits_of(new)]
        seen = []
        for after in range(100):
            shutil.copytree(old, out := tmp_path / f"out{after}")
            died = self.killed(out, monkeypatch, after)
            try:
                logits = logits_of(out)
            except (OSError, ValueError):
                seen.append("nothing")
            else:
                assert AutoTokenizer.from_pretrained(out).chat_template  # a model that loads has its tokenizer
                seen.append(["old", "new"][[torch.equal(logits, one) for one in whole].index(True)])
            if not died:
                break
        assert seen[0] == "old"
        assert set(seen[1:-1]) == {"nothing"}
        assert seen[-1] == "new"

    def test_a_tokenizer_is_never_half_there(self, tmp_path, monkeypatch):
        (tmp_path / "out").mkdir()
        for after in range(100):
            if not self.killed(tmp_path / "out", monkeypatch, after):
                break
            try:
                tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
            except (OSError, ValueError):
                continue
            assert tokenizer.chat_template
            assert len(tokenizer) == 512
            assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")

    def test_weights_of_another_model_do_not_stay(self, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(convert_native(out_dir=tmp_path / "out", **self.OLD))
        (tmp_path / "out" / "model.safetensors").unlink()
        model.save_pretrained(tmp_path / "out", max_shard_size="200KB")
        assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
        folder = convert_native(out_dir=tmp_path / "out", **self.NEW)
        assert [file.name for file in folder.glob("model*.safetensors*")] == ["model.safetensors"]
