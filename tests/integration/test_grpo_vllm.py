"""GRPO with the vLLM engine in this process, on the CPU: on policy after every push of the weights."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tiny_grpo import LARGEST_GAP, make, rows
from tiny_student import tiny_student, world

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]


@pytest.fixture
def engines():
    """Makes the engine of a trainer; one lives in a process at a time."""
    made = []

    def engine(trainer, grammar=True):
        from stacklm_hf.rollout.vllm_policy import VLLMPolicy

        path, tokenizer = tiny_student()
        tools = world()[2].tools if grammar else None
        options = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
        made.append(VLLMPolicy(path, tokenizer, tools, temperature=trainer.temperature, **options))
        return made[-1]

    yield engine
    for policy in made:
        policy.engine.close()


@pytest.mark.parametrize(("temperature", "grammar"), [(0.7, True), (1.0, False)])
def test_the_importance_ratio_is_1_before_and_after_updates(tmp_path, engines, temperature, grammar):
    trainer = make(
        tmp_path,
        policy=lambda trainer: engines(trainer, grammar),
        options={"temperature": temperature, "max_steps": 3},
    )
    trainer.train()
    gaps = [row[LARGEST_GAP] for row in rows(trainer)]
    assert len(gaps) == 3
    assert math.expm1(max(gaps)) < 1e-4
    assert all(row["time/sync"] > 0 for row in rows(trainer))
    if grammar:
        assert any(row["tokens/trained_share"] < row["tokens/own_share"] for row in rows(trainer))


def test_an_adapter_is_merged_for_the_engine(tmp_path, engines):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = make(tmp_path, policy=engines, peft_config=lora, options={"max_steps": 3})
    trainer.train()
    assert math.expm1(max(row[LARGEST_GAP] for row in rows(trainer))) < 1e-4
