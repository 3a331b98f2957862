"""The whole road, small: what a reader sees, what is on the disk afterwards, and what a kill costs (nothing)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stacklm_hf  # noqa: F401 (registers the Auto classes)
from stacklm_hf.data.dataset import load_rows
from stacklm_hf.data.store import read_trajectories
from stacklm_hf.worlds.research import make_task_pool

SMALL = ["--max-steps", "60", "--tasks", "180", "--eval-every", "60", "--save-every", "20"]


def command(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "stacklm_hf.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finish(process, timeout=900):
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A run that is killed while it trains, and goes on."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    first = command("demo", "--out", folder, *SMALL)
    deadline = time.monotonic() + 600
    while not list(folder.glob("sft/checkpoint-20/trainer_state.json")) and first.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint within ten minutes"
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = [trajectory.episode_id for trajectory in read_trajectories(folder / "trajectories.jsonl")]
    output = finish(command("demo", "--out", folder, *SMALL))
    after = [trajectory.episode_id for trajectory in read_trajectories(folder / "trajectories.jsonl")]
    assert before == after
    return folder, output


def test_a_killed_run_goes_on_where_it_stopped(demo):
    folder, output = demo
    assert "Trajectories of the scripted teacher, with the real tools (done before)" in output
    assert "SFT from random weights (done before)" not in output
    rows = json.loads((folder / "training_log.json").read_text())
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps))  # one curve, without a gap or a repetition


def test_the_dataset_holds_verified_trajectories_and_no_held_out_question(demo):
    rows = load_rows(demo[0] / "dataset.parquet")
    assert len(rows) == 180
    assert all(rows["correct"])
    assert all(rows["grounded"])
    assert not {task.question for task in make_task_pool()[1]} & set(rows["question"])


def test_the_loss_falls(demo):
    losses = [row["loss"] for row in json.loads((demo[0] / "training_log.json").read_text()) if "loss" in row]
    assert losses[-1] < losses[0] / 2


def test_the_checkpoint_loads_and_generates(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo[0] / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(demo[0] / "checkpoint")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the layer count of Stack-100M?"}], add_generation_prompt=True,
        return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert output.shape[1] > prompt["input_ids"].shape[1]


def test_it_ends_with_the_table_and_says_where_things_are(demo):
    folder, output = demo
    tail = output[output.index("Tasks never trained on") :]
    for word in ("lookup", "double", "sum", "compare", "all", "before SFT", "after SFT", "50"):
        assert word in tail
    for name in ("checkpoint", "dataset.parquet", "trajectories.jsonl", "report.html"):
        assert str(folder / name) in tail
        assert (folder / name).exists()
    command = re.search(r'(\S*stacklm-hf) ask --model (\S+) "', tail)
    assert command[2] == str(folder / "checkpoint")
    assert (Path.cwd() / command[1]).exists()  # as one would type it here


def test_long_stages_show_a_bar_with_a_rate_and_an_eta(demo):
    assert re.search(r"100%\|.*\d+/\d+ \[.*[,<].*(it/s|s/it)", demo[1])
    assert re.search(r"after-runs: 100%.*ep/s", demo[1])


def test_the_report_is_one_file_without_network(demo):
    page = (demo[0] / "report.html").read_text(encoding="utf-8")
    assert "after SFT" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)


def test_run_again_it_repeats_nothing_and_ends_the_same(demo):
    folder, output = demo
    again = finish(command("demo", "--out", folder, *SMALL))
    assert again.count("(done before)") == 6
    tail = output[output.index("Tasks never trained on") :]
    assert again[again.index("Tasks never trained on") :] == tail


def test_other_settings_in_the_same_folder_are_one_clear_line(demo):
    process = command("demo", "--out", demo[0], *SMALL, "--seed", "5")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "seed was 0, is 5" in output
    assert "Traceback" not in output


def test_ask_streams_thought_call_observation_and_answer(demo):
    question = "What is the RoPE base of Stack-100M, multiplied by 2? Use the corpus."
    output = finish(command("ask", "--model", demo[0] / "checkpoint", question, env={**os.environ, "NO_COLOR": "1"}))
    assert output.strip().splitlines()[-1].startswith("=> ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "--model", "nowhere", "q"], "no checkpoint that can be loaded"),
        (["ask", "--model", "nowhere", "q", "--documents", "missing"], "missing"),
        (["convert", "missing.pt", "out"], "missing.pt"),
        (["export-qwen3", "missing", "out"], "missing"),
    ],
)
def test_mistakes_of_a_user_are_one_line(tmp_path, arguments, message):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = command(*arguments, cwd=tmp_path, env=environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in output
    assert not (Path(tmp_path) / "out").exists()
