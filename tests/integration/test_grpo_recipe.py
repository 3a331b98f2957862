"""The GRPO recipe, run as README says, for two steps from a tiny student."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import stacklm_hf  # noqa: F401 (registers the Auto classes)
from stacklm_hf.data.store import read_trajectories

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tiny_student import tiny_student

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
SHORT = ["--max_steps", 2, "--eval_steps", 1, "--save_steps", 1, "--gradient_accumulation_steps", 1,
         "--num_generations", 4, "--max_turns", 2, "--max_turn_tokens", 24, "--forced_answer_tokens", 8,
         "--tasks_per_shape", 20, "--world_seeds", 2, "--report_to", "none"]  # fmt: skip


def run(*options, expect=0):
    command = [*LAUNCH, "recipes/grpo.py", "--config", "recipes/grpo_research.yaml", *SHORT, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=600, check=False, env=environment
    )
    assert done.returncode == expect, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_it_leaves_the_best_model_the_episodes_and_what_it_was_worth(tmp_path):
    output = run("--model_name_or_path", tiny_student()[0], "--output_dir", tmp_path)
    before, best = (
        float(re.search(rf"{name} \(step \d+\): accuracy (\S+),", output)[1]) for name in ("before", "best")
    )
    assert best >= before
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 512
    steps = [episode.sampling["step"] for episode in read_trajectories(tmp_path / "episodes.jsonl")]
    assert set(steps) == {0, 1}


def test_a_lora_is_saved_as_an_adapter(tmp_path):
    run("--model_name_or_path", tiny_student()[0], "--output_dir", tmp_path, "--use_peft",
        "--lora_target_modules", "all-linear", "--dynamic_sampling", "false")  # fmt: skip
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("options", [["--model_name_or_path", ""], ["--model_name_or_path", "x", "--engine", "sglang"]])
def test_what_is_missing_is_one_clear_line(tmp_path, options):
    assert "error: say what to train from" in run(*options, "--output_dir", tmp_path, expect=1)
