"""Correctness that only shows in use: padding, caches, packing, precision, checkpointing, adapters, compilation."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache, Trainer, TrainingArguments

import stacklm_hf
from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.modeling_stack import StackForCausalLM

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that what one token says to another shows in the logits
}
CLOSE = {"atol": 2e-5, "rtol": 0}
both_attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def tiny(attention: str = "sdpa", **overrides) -> StackForCausalLM:
    torch.manual_seed(0)
    config = StackConfig(**{**TINY, **overrides})
    return StackForCausalLM._from_config(config, attn_implementation=attention).eval()


def ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(290, (batch, length), generator=torch.Generator().manual_seed(seed))


def pad(documents: list[torch.Tensor], side: str, pad_id: int = 293) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of shape (length,) to ids and mask of shape (batch, longest)."""
    longest = max(len(d) for d in documents)
    x, mask = torch.full((len(documents), longest), pad_id), torch.zeros(len(documents), longest, dtype=torch.long)
    for row, document in enumerate(documents):
        part = slice(longest - len(document), None) if side == "left" else slice(0, len(document))
        x[row, part], mask[row, part] = document, 1
    return x, mask


def pack(documents: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents to one row of ids and of positions, shape (1, total)."""
    return torch.cat(documents)[None], torch.cat([torch.arange(len(d)) for d in documents])[None]


@both_attentions
class TestPadding:
    @pytest.mark.parametrize("side", ["left", "right"])
    @torch.no_grad()
    def test_padded_rows_equal_the_documents_alone(self, attention, side):
        model = tiny(attention)
        documents = [ids(1, n, seed=n)[0] for n in (3, 9, 1, 6)]
        x, mask = pad(documents, side)
        # NoPE or RoPE, only distances count: positions may start at the padding or at the first token.
        for positions in (None, (mask.cumsum(-1) - 1).clamp(min=0)):
            logits = model(x, attention_mask=mask, position_ids=positions).logits
            for row, document in enumerate(documents):
                torch.testing.assert_close(logits[row][mask[row] == 1], model(document[None]).logits[0], **CLOSE)

    @torch.no_grad()
    def test_batched_generation_equals_single(self, attention):
        model = tiny(attention)
        documents = [ids(1, n, seed=n)[0] for n in (2, 7, 4)]
        x, mask = pad(documents, "left")
        batched = model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, x.shape[1] :]
        for row, document in enumerate(documents):
            single = model.generate(document[None], max_new_tokens=8, do_sample=False)[0, len(document) :]
            assert batched[row].tolist() == single.tolist()


@both_attentions
class TestCache:
    @pytest.mark.parametrize("parts", [[1] * 12, [5, 1, 1, 5], [4, 8], [11, 1]], ids=str)
    @torch.no_grad()
    def test_tokens_fed_in_parts_equal_one_pass(self, attention, parts):
        model = tiny(attention)
        x = ids(2, 12)
        whole = model(x, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
            fed = [model(part, past_key_values=cache).logits for part in x.split(parts, dim=1)]
            torch.testing.assert_close(torch.cat(fed, 1), whole, **CLOSE)

    @torch.no_grad()
    def test_a_second_turn_onto_a_left_padded_cache_equals_the_whole(self, attention):
        model = tiny(attention)
        first, second = [ids(1, n, seed=n)[0] for n in (3, 6)], ids(2, 4, seed=9)
        x, mask = pad(first, "left")
        cache = model(x, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).past_key_values
        mask = torch.cat([mask, torch.ones_like(second)], 1)
        positions = (mask.cumsum(-1) - 1)[:, -4:]
        logits = model(second, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        for row, document in enumerate(first):
            whole = model(torch.cat([document, second[row]])[None]).logits[0, -4:]
            torch.testing.assert_close(logits[row], whole, **CLOSE)


class TestPacking:
    @staticmethod
    def check(model, lengths, **kwargs):
        documents = [ids(1, n, seed=i)[0] for i, n in enumerate(lengths)]
        x, positions = pack(documents)
        alone = torch.cat([model(d[None]).logits[0] for d in documents])
        torch.testing.assert_close(model(x, position_ids=positions, **kwargs).logits[0], alone, **CLOSE)

    @both_attentions
    @pytest.mark.parametrize("use_cache", [None, True, False])
    @pytest.mark.parametrize("full_mask", [False, True])
    @torch.no_grad()
    def test_packed_documents_equal_the_same_alone(self, attention, use_cache, full_mask):
        mask = torch.ones(1, 15, dtype=torch.long) if full_mask else None
        self.check(tiny(attention), [4, 1, 7, 3], use_cache=use_cache, attention_mask=mask)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    @torch.no_grad()
    def test_whatever_their_lengths(self, lengths):
        self.check(tiny(), lengths)

    @both_attentions
    @torch.no_grad()
    def test_packed_rows_may_be_padded_too(self, attention):
        model = tiny(attention)
        rows = [[ids(1, n, seed=n)[0] for n in lengths] for lengths in ([3, 4], [2, 1, 2])]
        x, mask = pad([pack(row)[0][0] for row in rows], "right")
        positions, _ = pad([pack(row)[1][0] for row in rows], "right", pad_id=0)
        logits = model(x, attention_mask=mask, position_ids=positions).logits
        for row, documents in enumerate(rows):
            alone = torch.cat([model(d[None]).logits[0] for d in documents])
            torch.testing.assert_close(logits[row][mask[row] == 1], alone, **CLOSE)

    def test_flash_attention_refuses_what_it_would_mix_up(self):
        model = tiny()
        model.config._attn_implementation_internal = "flash_attention_2"  # as on a GPU; not run
        mask, positions = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 1, 0, 0]])
        with pytest.raises(ValueError, match="pass no attention_mask"):
            model(ids(1, 4), attention_mask=mask, position_ids=positions)

    def test_the_loss_of_packed_rows_is_that_of_a_padded_batch(self):
        model = tiny(z_loss_coef=0.1)
        documents = [ids(1, n, seed=n)[0] for n in (5, 2, 8)]
        x, mask = pad(documents, "right")
        padded = model(x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100)).loss
        x, positions = pack(documents)
        labels = x.masked_fill(positions == 0, -100)  # no document predicts the first token of the next
        torch.testing.assert_close(model(x, position_ids=positions, labels=labels).loss, padded)


class TestPrecision:
    @both_attentions
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @torch.no_grad()
    def test_half_precision_stays_near_float32(self, attention, dtype):
        model, x = tiny(attention), ids(2, 20)
        exact = model(x).logits
        half = copy.deepcopy(model).to(dtype)(x).logits
        assert half.dtype == dtype
        error = (half.float() - exact).norm() / exact.norm()
        assert error < (0.05 if dtype == torch.bfloat16 else 0.01)

    def test_the_loss_is_computed_in_float32(self):
        model = tiny(z_loss_coef=0.1).to(torch.bfloat16)
        assert model(ids(2, 6), labels=ids(2, 6)).loss.dtype == torch.float32

    def test_autocast_trains(self):
        model = tiny().train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids(2, 6), labels=ids(2, 6)).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class TestTraining:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing_gives_the_same_gradients(self, reentrant):
        model, x = tiny(z_loss_coef=0.1).train(), ids(2, 10)

        def gradients():
            model.zero_grad()
            model(x, labels=x).loss.backward()
            return [p.grad.clone() for p in model.parameters()]

        plain = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        calls = []
        model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
        torch.testing.assert_close(gradients(), plain)
        assert len(calls) == 2  # the layer really ran twice

    @pytest.mark.parametrize("parts", [1, 3])
    def test_a_trainer_that_accumulates_steps_alike(self, tmp_path, parts):
        x = ids(6, 9)
        labels = x.clone()
        for row in range(6):  # parts of very different numbers of tokens that count
            labels[row, : row + 1] = -100
        model = tiny(z_loss_coef=0.1)
        reference = copy.deepcopy(model)
        reference(x, labels=labels).loss.backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.1 * parameter.grad
        arguments = TrainingArguments(
            tmp_path,
            per_device_train_batch_size=6 // parts,
            gradient_accumulation_steps=parts,
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
        )
        rows = [{"input_ids": a, "labels": b} for a, b in zip(x, labels, strict=True)]
        Trainer(model, arguments, train_dataset=rows).train()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter, atol=1e-6, rtol=1e-5)

    def test_lora_trains_its_own_weights_alone_and_merges_exactly(self):
        from peft import LoraConfig, get_peft_model

        base, x = tiny(), ids(2, 10)
        before = {name: p.clone() for name, p in base.named_parameters()}
        model = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        losses = []
        for _ in range(5):
            loss = model(x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        model.eval()
        with torch.no_grad():
            adapted = model(x).logits
            merged = model.merge_and_unload()
            torch.testing.assert_close(merged(x).logits, adapted, **CLOSE)
        changed = {name for name, p in merged.named_parameters() if not torch.equal(p, before[name])}
        assert changed == {name for name in before if name.endswith("_proj.weight")}

    def test_the_pad_row_is_trained_like_any_other(self):
        model = tiny(tie_word_embeddings=False)
        x = torch.tensor([[model.config.pad_token_id, 5, 6]])
        model(x, labels=x).loss.backward()
        assert model.model.embed_tokens.weight.grad[model.config.pad_token_id].abs().max() > 0


class TestForward:
    @torch.no_grad()
    def test_logits_to_keep(self):
        model, x = tiny(), ids(2, 8)
        whole = model(x).logits
        torch.testing.assert_close(model(x, logits_to_keep=3).logits, whole[:, -3:])
        torch.testing.assert_close(model(x, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]])

    @torch.no_grad()
    def test_embeddings_in_place_of_ids(self):
        model, x = tiny(), ids(2, 8)
        torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(x)).logits, model(x).logits)

    def test_neither_or_both_is_an_error(self):
        model, x = tiny(), ids(1, 2)
        for arguments in ({}, {"input_ids": x, "inputs_embeds": model.get_input_embeddings()(x)}):
            with pytest.raises(ValueError, match="exactly one"):
                model(**arguments)

    @torch.no_grad()
    def test_hidden_states_and_attentions_can_be_had(self):
        out = tiny("eager")(ids(2, 8), output_hidden_states=True, output_attentions=True)
        assert [h.shape for h in out.hidden_states] == [(2, 8, 32)] * 6
        assert [a.shape for a in out.attentions] == [(2, 4, 8, 8)] * 5

    @torch.no_grad()
    def test_it_returns_a_tuple_on_request(self):
        model, x = tiny(), ids(1, 4)
        torch.testing.assert_close(model(x, return_dict=False)[0], model(x).logits)


class TestEcosystem:
    def test_auto_classes_know_the_architecture(self):
        config = tiny().config
        assert type(AutoModelForCausalLM.from_config(config)) is stacklm_hf.StackForCausalLM
        assert type(AutoModel.from_config(config)) is stacklm_hf.StackModel

    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_save_and_load(self, tied, tmp_path):
        model = tiny(tie_word_embeddings=tied)
        model.save_pretrained(tmp_path)
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
        assert torch.equal(again(ids(1, 9)).logits, model(ids(1, 9)).logits)
        assert again.generation_config.eos_token_id == again.config.eos_token_id == 297
        assert again.generation_config.pad_token_id == again.config.pad_token_id == 293

    def test_resized_embeddings_stay_tied(self):
        model = tiny()
        model.resize_token_embeddings(320)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert model(ids(1, 3)).logits.shape == (1, 3, 320)

    def test_parallel_plans_name_modules_that_exist(self):
        model = tiny()
        modules = {re.sub(r"\.\d+", ".*", name) for name, _ in model.named_modules()}
        assert set(model.tp_plan) <= modules
        planned = {name for name in model.tp_plan if "self_attn." in name or "mlp." in name}
        assert planned == {m for m in modules if re.search(r"(self_attn|mlp)\.\w+$", m) and not m.endswith("act_fn")}
        assert set(model.config.base_model_pp_plan) <= {name for name, _ in model.model.named_children()}

    def test_it_compiles_without_a_graph_break(self):
        model, x = tiny(), ids(2, 8)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, use_cache=False).logits, model(x).logits, **CLOSE)
        torch.testing.assert_close(compiled(x, labels=x, use_cache=False).loss, model(x, labels=x).loss)
