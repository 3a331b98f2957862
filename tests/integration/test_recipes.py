"""The recipes, run as README says, each for a few steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from stacklm_hf.data.dataset import load_rows
from stacklm_hf.data.store import read_trajectories

ROOT = Path(__file__).parent.parent.parent
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
SHORT = ["--max_steps", 4, "--save_steps", 2, "--logging_steps", 1, "--eval_every", 0]


def run(*command, expect=0):
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert process.returncode == expect, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout + process.stderr


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    command = [sys.executable, "recipes/collect.py", "--out", folder, "--tasks_per_shape", 20, "--world_seeds", 2]
    output = run(*command)
    assert "kept 80 of 80 trajectories (rejected: none)" in output
    ids = [trajectory.episode_id for trajectory in read_trajectories(folder / "trajectories.jsonl")]
    run(*command, "--tokenizer", folder / "tokenizer")  # run again: nothing is collected twice
    assert [trajectory.episode_id for trajectory in read_trajectories(folder / "trajectories.jsonl")] == ids
    return folder


@pytest.fixture(scope="module")
def trained(collected):
    out = collected / "sft"
    command = [*LAUNCH, "recipes/sft.py", "--config", "recipes/sft_research.yaml", *SHORT,
               "--dataset", collected / "dataset.parquet", "--tokenizer", collected / "tokenizer",
               "--output_dir", out]  # fmt: skip
    run(*command)
    return out


def test_sft_leaves_checkpoints_metrics_and_a_model(trained):
    assert (trained / "model.safetensors").is_file()
    assert (trained / "tokenizer.json").is_file()
    assert (trained / "checkpoint-4" / "trainer_state.json").is_file()
    assert list(trained.rglob("events.out.tfevents*"))


def test_evaluate_samples_and_writes_a_report(trained, tmp_path):
    command = [sys.executable, "recipes/evaluate.py", "--model", trained, "--out", tmp_path,
               "--splits", "heldout", "shape:lookup", "--samples", 2, "--temperature", 1.0]  # fmt: skip
    output = run(*command)
    assert "heldout" in output
    assert (tmp_path / "report.html").is_file()
    assert len(list(read_trajectories(tmp_path / "heldout.jsonl"))) == 100
    assert len(list(read_trajectories(tmp_path / "shape-lookup.jsonl"))) == 56


def test_a_lora_of_any_model_with_use_peft(trained, collected, tmp_path):
    command = [*LAUNCH, "recipes/sft.py", "--config", "recipes/sft_research.yaml", *SHORT, "--use_peft",
               "--dataset", collected / "dataset.parquet", "--model_name_or_path", trained,
               "--output_dir", tmp_path, "--muon_learning_rate", 0]  # fmt: skip
    run(*command)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_model_that_is_not_named_is_one_clear_line(collected, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"dataset: {collected / 'dataset.parquet'}\noutput_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n")
    output = run(sys.executable, "recipes/sft.py", "--config", config, expect=1)
    assert "error: say which model to train" in output
    assert len(load_rows(collected / "dataset.parquet")) == 80
