"""SFT: the mask is the loss, batches are not padding, a run resumes to the same curve."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import ModelConfig

from stacklm_hf.data.dataset import build_dataset, retokenize, supervised_share
from stacklm_hf.modeling import add_agent_tokens
from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.rollout import ScriptedTeacher, run_episodes
from stacklm_hf.training.callbacks import AgentAccuracyCallback
from stacklm_hf.training.optim import MuonFactory, MuonWithAdamW
from stacklm_hf.training.sampler import LengthGroupedBatchSampler
from stacklm_hf.training.sft import default_sft_config, last_checkpoint, make_peft_config, make_trainer
from stacklm_hf.training.student import build_student, build_tokenizer
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, make_task_pool

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.fixture(scope="module")
def world():
    train, heldout = make_task_pool()
    return train, heldout, ResearchEnvironment(build_corpus())


@pytest.fixture(scope="module")
def tokenizer(world, tmp_path_factory):
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), world[0], world[2], 512)


@pytest.fixture(scope="module")
def dataset(world, tokenizer):
    return build_dataset(run_episodes(ScriptedTeacher(tokenizer), world[0], world[2]), tokenizer)[0]


def student(tokenizer, seed=0, **options):
    return build_student(tokenizer, "stack-demo", seed, **{**TINY, **options})


def config(folder, **options):
    defaults = {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1,
                "save_strategy": "no", "report_to": "none", "bf16": False, "disable_tqdm": True}  # fmt: skip
    return default_sft_config(folder, **{**defaults, **options})


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_about_a_third_of_the_published_set_is_supervised(dataset):
    # Published for this set: about 0.32 of the characters. Ours restates each fact that it found, hence a little more.
    assert supervised_share(dataset).characters == pytest.approx(0.33, abs=0.02)


def test_the_loss_falls_and_covers_the_policy_s_tokens_only(tmp_path, tokenizer, dataset):
    model = student(tokenizer)
    rows = dataset.select(range(8))
    trainer = make_trainer(model, tokenizer, rows, config(tmp_path))
    [batch] = trainer.get_train_dataloader()
    expected = sum(map(sum, rows["assistant_masks"])) - sum(mask[0] for mask in rows["assistant_masks"])
    assert int((batch["labels"] != -100).sum()) == expected
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    by_hand = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(by_hand.item(), abs=1e-3)
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_at_most_a_tenth_of_what_is_computed_is_padding(tmp_path, tokenizer, dataset):
    trainer = make_trainer(student(tokenizer), tokenizer, dataset, config(tmp_path, max_steps=24))
    trainer.train()
    assert 0 < trainer.padding_share <= 0.10
    assert "padding_share" in trainer.state.log_history[0]


@pytest.mark.parametrize("muon", [None, 0.02])
def test_a_stopped_run_resumes_to_the_same_curve(tmp_path, tokenizer, dataset, muon):
    options = {"max_steps": 8, "muon_learning_rate": muon, "save_strategy": "steps", "save_steps": 4}
    dataset = dataset.select(range(26))  # four batches, the last not whole, so that the stop is in a later epoch
    whole = make_trainer(student(tokenizer), tokenizer, dataset, config(tmp_path / "a", **options))
    whole.train()

    class Stop(Exception):
        pass

    def stop(*args, **kwargs):
        raise Stop

    first = make_trainer(student(tokenizer), tokenizer, dataset, config(tmp_path / "b", **options))
    first.create_optimizer()
    original, count = first.training_step, iter(range(99))
    first.training_step = lambda *args, **kwargs: stop() if next(count) == 6 else original(*args, **kwargs)
    with pytest.raises(Stop):
        first.train()
    second = make_trainer(student(tokenizer, seed=9), tokenizer, dataset, config(tmp_path / "b", **options))
    second.train(resume_from_checkpoint=last_checkpoint(tmp_path / "b"))
    assert losses(second) == pytest.approx(losses(whole), abs=1e-6)


@given(st.lists(st.integers(1, 500), max_size=200), st.integers(1, 9), st.integers(0, 3))
def test_every_example_comes_once_an_epoch_in_batches_of_like_length(lengths, batch_size, epoch):
    sampler = LengthGroupedBatchSampler(lengths, batch_size, seed=1)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(len(lengths)))
    assert order == list(sampler)
    if len(lengths) <= 16 * batch_size:  # one chunk: batches do not overlap in length
        spans = [sorted(lengths[i] for i in order[at : at + batch_size]) for at in range(0, len(order), batch_size)]
        spans.sort()
        assert all(left[-1] <= right[0] for left, right in itertools.pairwise(spans))


def test_the_order_differs_between_epochs_and_seeds():
    lengths = list(range(64))
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        sampler = LengthGroupedBatchSampler(lengths, 4, seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 3


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(tmp_path):
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert last_checkpoint(tmp_path / "none") is None


def test_measuring_while_it_trains_changes_nothing(tmp_path, tokenizer, dataset, world):
    _, heldout, environment = world
    plain = make_trainer(student(tokenizer), tokenizer, dataset, config(tmp_path))
    plain.train()
    seen = []
    measured = make_trainer(student(tokenizer), tokenizer, dataset, config(tmp_path))
    measured.add_callback(
        AgentAccuracyCallback(
            measured, tokenizer, heldout[:3], environment, every_steps=4, on_result=lambda *r: seen.append(r)
        )
    )
    measured.train()
    assert losses(measured) == losses(plain)
    assert [step for step, _ in seen] == [4, 6]
    assert [row["eval_agent_accuracy"] for row in measured.state.log_history if "eval_agent_accuracy" in row] == [0, 0]


def test_a_z_loss_is_part_of_the_loss(tmp_path, tokenizer, dataset):
    first = []
    for coefficient in (0.0, 0.1):
        trainer = make_trainer(
            student(tokenizer, z_loss_coef=coefficient), tokenizer, dataset, config(tmp_path, max_steps=1)
        )
        trainer.train()
        first += losses(trainer)
    # Random logits are small, so logsumexp is about log(512), and its square times 0.1 about 3.9.
    assert first[1] - first[0] == pytest.approx(0.1 * torch.tensor(512.0).log().item() ** 2, rel=0.1)


class TestBadInput:
    def test_an_empty_dataset(self, tmp_path, tokenizer, dataset):
        with pytest.raises(ValueError, match="the dataset is empty"):
            make_trainer(student(tokenizer), tokenizer, dataset.select([]), config(tmp_path))

    def test_wrong_columns(self, tmp_path, tokenizer, dataset):
        with pytest.raises(ValueError, match="lacks the columns assistant_masks"):
            make_trainer(student(tokenizer), tokenizer, dataset.remove_columns("assistant_masks"), config(tmp_path))

    def test_an_example_that_would_be_cut(self, tmp_path, tokenizer, dataset):
        with pytest.raises(ValueError, match="max_length is 50: raise it"):
            make_trainer(student(tokenizer), tokenizer, dataset, config(tmp_path, max_length=50))


class TestMuon:
    def test_matrices_inside_go_to_muon_and_all_else_to_adamw(self, tokenizer):
        model = student(tokenizer)
        optimizer = MuonFactory()(model, lr=1e-3, muon_lr=1e-2)
        muon, adamw = optimizer.param_groups
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        assert {names[id(p)].rsplit(".", 2)[1] for p in muon["params"]} == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
        assert len(muon["params"]) + len(adamw["params"]) == len(names)

    def test_a_scheduler_reaches_both(self, tokenizer):
        optimizer = MuonFactory()(student(tokenizer), lr=1.0, muon_lr=10.0)
        for _ in range(2):  # also after a resume, which replaces the groups
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
            assert [part.param_groups[0]["lr"] for part in optimizer._parts] == [
                group["lr"] for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(optimizer.state_dict())

    def test_the_state_of_another_optimizer_is_refused(self, tokenizer):
        optimizer = MuonFactory()(student(tokenizer), lr=1.0, muon_lr=10.0)
        assert isinstance(optimizer, MuonWithAdamW)
        with pytest.raises(ValueError, match="another optimizer"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("peft", [False, True])
def test_any_causal_model_can_be_the_student(tmp_path, world, dataset, tied, peft):
    """The nine tokens are added, the embeddings resized, trained, saved and reloaded right."""
    backend = train_stack_tokenizer([row["question"] for row in dataset], 400).backend_tokenizer
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = []
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(plain))
    foreign = PreTrainedTokenizerFast(tokenizer_file=str(path))
    sizes = {"vocab_size": 448, "max_position_embeddings": 2048, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**TINY, **sizes}))
    added = add_agent_tokens(model, foreign)
    rows, dropped = retokenize(dataset, foreign, 2048)
    assert dropped == 0
    assert foreign.decode(rows[0]["input_ids"]) == dataset[0]["text"]
    arguments = ModelConfig(use_peft=peft, lora_target_modules=["q_proj", "v_proj"], lora_r=4)
    trainer = make_trainer(
        model, foreign, rows, config(tmp_path, max_steps=3, max_length=2048, learning_rate=1e-2),
        peft_config=make_peft_config(arguments, added),
    )  # fmt: skip
    row = added.token_ids["<|tool_call|>"]
    before = trainer.model.get_input_embeddings().weight[row].detach().clone() if not peft else None
    trainer.train()
    out = tmp_path / "out"
    if peft:
        trained = trainer.model.merge_and_unload()
        trained.save_pretrained(out)
    else:
        trained = trainer.model
        trainer.save_model(str(out))
        assert not torch.equal(trained.get_input_embeddings().weight[row], before)
    foreign.save_pretrained(out)
    reloaded = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([rows[0]["input_ids"][:40]])
    with torch.no_grad():
        assert torch.allclose(reloaded(ids).logits, trained.eval()(ids).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(out).encode("<|end|>", add_special_tokens=False) == [
        added.token_ids["<|end|>"]
    ]
