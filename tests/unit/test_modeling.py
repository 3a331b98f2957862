"""The architecture: exactly the original's numbers, sizes, initialisation and loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from stacklm_hf.modeling.configuration_stack import PRESETS, StackConfig
from stacklm_hf.modeling.convert import convert_native
from stacklm_hf.modeling.modeling_stack import StackForCausalLM, StackModel, StackRMSNorm

DATA = Path(__file__).parent.parent / "data"
NATIVE = ["native_tiny", "native_tiny_ropeall", "native_tiny_softcap"]
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def tiny(seed: int = 0, **overrides) -> StackForCausalLM:
    torch.manual_seed(seed)
    return StackForCausalLM(StackConfig(**{**TINY, **overrides})).eval()


def ids(batch: int, length: int, seed: int = 1, vocab: int = 300) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


class TestSizes:
    def test_stack_100m_has_the_published_number_of_parameters(self):
        with torch.device("meta"):
            model = StackForCausalLM(StackConfig.from_preset("stack-100m"))
        assert model.num_parameters() == 101_353_728
        assert model.num_parameters() - model.get_input_embeddings().weight.numel() == 84_576_512

    def test_the_defaults_are_stack_100m(self):
        assert StackConfig().to_dict() == StackConfig.from_preset("stack-100m").to_dict()

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_named_size_builds_and_can_be_overridden(self, name):
        config = StackConfig.from_preset(name, num_hidden_layers=1, vocab_size=512)
        assert (config.num_hidden_layers, config.vocab_size) == (1, 512)
        assert StackForCausalLM(config)(ids(1, 3)).logits.shape == (1, 3, 512)

    def test_an_unknown_size_names_the_known_ones(self):
        with pytest.raises(ValueError, match="stack-100m, stack-demo"):
            StackConfig.from_preset("stack-7b")


class TestConfig:
    def test_every_fourth_layer_of_30_goes_without_rope(self):
        assert StackConfig().nope_layers == [3, 7, 11, 15, 19, 23, 27]

    def test_nope_every_0_switches_it_off(self):
        assert StackConfig(nope_every=0).nope_layers == []

    def test_special_ids_are_those_of_the_native_vocabulary(self):
        config = StackConfig(vocab_size=512)
        assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (503, 505, 509)

    def test_special_ids_that_are_given_stay(self):
        config = StackConfig(vocab_size=512, bos_token_id=0, pad_token_id=1, eos_token_id=[2, 3])
        assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, [2, 3])

    def test_a_native_zero_cap_is_no_cap(self):
        assert StackConfig(final_logit_softcapping=0.0).final_logit_softcapping is None

    @pytest.mark.parametrize(
        "wrong",
        [
            {"hidden_size": "512"},
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            {"head_dim": 7},
            {"nope_every": -1},
            {"z_loss_coef": -0.1},
        ],
    )
    def test_what_cannot_be_built_is_refused(self, wrong):
        with pytest.raises(StrictDataclassError, match=next(iter(wrong))):
            StackConfig(**wrong)

    def test_it_round_trips_with_its_auto_map(self, tmp_path):
        config = StackConfig(**TINY, nope_every=3, final_logit_softcapping=30.0, rope_parameters={"rope_theta": 5e5})
        config.save_pretrained(tmp_path)
        again = StackConfig.from_pretrained(tmp_path)
        assert again.to_diff_dict() == config.to_diff_dict()
        assert again.auto_map["AutoModelForCausalLM"] == "modeling_stack.StackForCausalLM"


class TestEqualsTheOriginal:
    @pytest.fixture(params=NATIVE)
    def converted(self, request, tmp_path):
        folder = convert_native(DATA / f"{request.param}.pt", tmp_path / "out")
        return folder, load_file(DATA / f"{request.param}.expected.safetensors")

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_logits(self, converted, attention):
        folder, expected = converted
        model = StackForCausalLM.from_pretrained(folder, attn_implementation=attention)
        with torch.no_grad():
            logits = model(expected["input_ids"]).logits
        torch.testing.assert_close(logits, expected["logits"], atol=2e-6, rtol=0)

    def test_greedy_tokens(self, converted):
        folder, expected = converted
        model = StackForCausalLM.from_pretrained(folder)
        tokens = model.generate(expected["input_ids"][:1, :7], max_new_tokens=12, do_sample=False)
        assert tokens.tolist() == expected["greedy"].tolist()


class TestArchitecture:
    def test_a_nope_layer_alone_does_not_see_positions(self):
        # One NoPE layer: attention over a set, so that the last token's logits ignore the order of those before it.
        model = tiny(num_hidden_layers=1, nope_every=1)
        a = torch.tensor([[5, 6, 7, 8]])
        b = torch.tensor([[7, 5, 6, 8]])
        torch.testing.assert_close(model(a).logits[:, -1], model(b).logits[:, -1])

    def test_a_rope_layer_does(self):
        model = tiny(num_hidden_layers=1, nope_every=0)
        for layer in model.model.layers:  # so that attention weighs positions visibly
            layer.self_attn.q_norm.weight.data.fill_(4)
        a = torch.tensor([[5, 6, 7, 8]])
        b = torch.tensor([[7, 5, 6, 8]])
        assert (model(a).logits[:, -1] - model(b).logits[:, -1]).abs().max() > 1e-5

    def test_the_norm_scales_in_float32_before_it_casts(self):
        norm = StackRMSNorm(64, eps=1e-5).to(torch.bfloat16)
        torch.manual_seed(0)
        norm.weight.data.normal_(1, 0.3)
        x = torch.randn(16, 64, dtype=torch.bfloat16)
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
        assert norm(x).dtype == torch.bfloat16
        # One rounding only: within half a unit in the last place of the exact value.
        assert ((norm(x).double() - exact).abs() <= exact.abs() * 2**-8).all()

    def test_with_rope_everywhere_it_is_a_qwen3(self):
        model = tiny(nope_every=0)
        shared = {k: v for k, v in model.config.to_dict().items() if hasattr(Qwen3Config(), k) and k != "auto_map"}
        qwen3 = Qwen3ForCausalLM(Qwen3Config(**{**shared, "model_type": "qwen3"})).eval()
        qwen3.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(ids(2, 9)).logits, qwen3(ids(2, 9)).logits, atol=1e-6, rtol=0)

    def test_initial_weights(self):
        model = tiny(hidden_size=256, head_dim=64, intermediate_size=512, num_hidden_layers=8)
        narrow = 0.02 / math.sqrt(2 * 8)
        for name, weight in model.named_parameters():
            if "norm" in name:
                assert (weight == 1).all()
            else:
                expected = narrow if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                assert weight.std().item() == pytest.approx(expected, rel=0.03), name
                assert weight.mean().item() == pytest.approx(0, abs=expected / 50), name

    def test_untied_heads_are_weights_of_their_own(self):
        tied, untied = tiny(), tiny(tie_word_embeddings=False)
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
        assert untied.num_parameters() == tied.num_parameters() + 300 * 32


class TestSoftCaps:
    @pytest.mark.parametrize("training", [True, False])
    def test_final_logits_are_capped_in_training_and_inference_alike(self, training):
        capped, plain = tiny(final_logit_softcapping=0.05), tiny()
        capped.train(training)
        x = ids(2, 6)
        logits = plain(x).logits
        torch.testing.assert_close(capped(x).logits, 0.05 * torch.tanh(logits / 0.05))
        loss = capped(x, labels=x).loss
        expected = cross_entropy(0.05 * torch.tanh(logits / 0.05)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        torch.testing.assert_close(loss, expected)

    def test_attention_cap_is_applied_by_eager_the_default_then(self):
        model = tiny(attn_logit_softcapping=0.5, num_hidden_layers=1)
        assert model.config._attn_implementation == "eager_softcap"
        attention = model.model.layers[0].self_attn
        seen = {}
        attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(out=inputs[0]))
        attention.v_proj.register_forward_hook(lambda *call: seen.update(v=call[2]))
        weights = model(ids(1, 5), output_attentions=True).attentions[0]
        # Scores within +-0.5 bound the ratio of two weights in a row by e.
        rows = weights[0, :, -1]
        assert (rows.max(-1).values / rows.min(-1).values).max() <= math.e
        values = seen["v"].view(1, 5, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
        torch.testing.assert_close(seen["out"].view(1, 5, 4, 8), (weights @ values).transpose(1, 2))

    @pytest.mark.parametrize("attention", ["sdpa", "paged|eager", "paged|sdpa"])
    def test_attention_that_cannot_cap_is_refused(self, attention):
        model = tiny(attn_logit_softcapping=0.5)
        with pytest.raises(ValueError, match='attn_implementation="eager"'):
            model.set_attn_implementation(attention)
        with pytest.raises(ValueError, match="attn_logit_softcapping"):
            StackForCausalLM._from_config(model.config, attn_implementation=attention)


class TestLoss:
    @staticmethod
    def expected(logits, labels, coef, items=None):
        """Cross-entropy and z-loss, token by token in float64."""
        total, count = 0.0, 0
        for row, targets in zip(logits[:, :-1].double(), labels[:, 1:], strict=True):
            for scores, target in zip(row, targets, strict=True):
                if target != -100:
                    z = torch.logsumexp(scores, 0)
                    total += z - scores[target] + coef * z**2
                    count += 1
        return total / (items or count)

    @pytest.mark.parametrize("coef", [0.0, 1e-4, 0.3])
    @pytest.mark.parametrize("items", [None, 5, 40])
    def test_z_loss_counts_the_tokens_of_the_cross_entropy(self, coef, items):
        model = tiny(z_loss_coef=coef)
        x = ids(2, 8)
        labels = x.clone()
        labels[0, :5] = -100
        labels[1, 3] = -100
        out = model(x, labels=labels, num_items_in_batch=None if items is None else torch.tensor(items))
        torch.testing.assert_close(out.loss.double(), self.expected(out.logits, labels, coef, items), rtol=1e-6, atol=0)

    def test_shifted_labels_can_be_given(self):
        model = tiny(z_loss_coef=0.1)
        x = ids(2, 8)
        shifted = torch.nn.functional.pad(x, (0, 1), value=-100)[:, 1:].contiguous()
        torch.testing.assert_close(model(x, labels=x, shift_labels=shifted).loss, model(x, labels=x).loss)

    def test_accumulated_steps_make_one_big_batch(self):
        model = tiny(z_loss_coef=0.1).train()
        x = ids(6, 9)
        labels = x.clone()
        for row in range(6):  # parts with very different numbers of tokens
            labels[row, : row + 1] = -100
        items = (labels[:, 1:] != -100).sum()

        def gradients(parts):
            model.zero_grad()
            losses = [model(x[p], labels=labels[p], num_items_in_batch=items).loss for p in parts]
            for loss in losses:
                loss.backward()
            return sum(losses).detach(), [p.grad.clone() for p in model.parameters()]

        one, grads = gradients([slice(0, 6)])
        many, accumulated = gradients([slice(0, 1), slice(1, 4), slice(4, 6)])
        torch.testing.assert_close(one, model(x, labels=labels).loss.detach())
        torch.testing.assert_close(many, one)
        torch.testing.assert_close(accumulated, grads, atol=1e-6, rtol=1e-4)


def test_the_base_model_gives_hidden_states_of_the_last_norm():
    model = tiny()
    base = StackModel(model.config).eval()
    base.load_state_dict(model.model.state_dict())
    hidden = base(ids(1, 4)).last_hidden_state
    torch.testing.assert_close(hidden @ model.lm_head.weight.T, model(ids(1, 4)).logits)
