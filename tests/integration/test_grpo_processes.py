"""GRPO in two processes over gloo, launched as a user does, against one process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tiny_student import tiny_student

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("grpo_worker.py")


def launch(mode, out, processes=2):
    """Runs the worker; returns what each process wrote, or the finished command where it failed."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
               ROOT / "accelerate_configs" / ("multi_cpu.yaml" if processes > 1 else "cpu.yaml"),
               "--main_process_port", "0", WORKER, mode, tiny_student()[0], out]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        return done
    return [json.loads((out / f"{mode}-{rank}.json").read_text()) for rank in range(processes)]


def losses(seen):
    return [row["loss"] for row in seen["log"] if "loss" in row]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch("train", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return launch("train", tmp_path_factory.mktemp("one"), processes=1)


def test_two_processes_have_the_same_advantages_and_losses_as_one(one, two):
    """A group spans both, the tasks and the held-out tasks do not come out even, and stale groups are replaced."""
    joined = [left + right for left, right in zip(*(seen["advantages"] for seen in two), strict=True)]
    assert len(joined) == 3
    for together, alone in zip(joined, one[0]["advantages"], strict=True):
        assert together == pytest.approx(alone, abs=1e-4)
        assert any(alone)
    assert [seen["episodes"] for seen in two] == [one[0]["episodes"]] * 2
    assert losses(two[0]) == pytest.approx(losses(one[0]), abs=1e-4)
    for name in ("eval_agent_score", "agent/steps", "tokens/own_share", "groups/degenerate"):
        values = [[row[name] for row in seen["log"] if name in row] for seen in (one[0], two[0])]
        assert len(values[0]) >= 3
        assert values[0] == pytest.approx(values[1])
    assert sum(row.get("groups/fresh", 0) for row in two[0]["log"]) > 0


def test_two_processes_resume_to_the_same_tasks_and_losses(two, tmp_path):
    launch("stop", tmp_path)
    resumed = launch("resume", tmp_path)
    assert resumed[0]["episodes"] == two[0]["episodes"][1:]
    assert losses(resumed[0]) == pytest.approx(losses(two[0]), abs=1e-6)


def test_one_process_that_raises_ends_them_all(tmp_path):
    start = time.monotonic()
    done = launch("raise", tmp_path)
    assert done.returncode != 0
    assert "the second process has had enough" in done.stderr
    assert time.monotonic() - start < 180
    assert not list(tmp_path.glob("raise-*.json"))


def test_a_model_under_fsdp_2_is_whole_while_it_samples(tmp_path):
    for seen in launch("shard", tmp_path):
        assert seen == {"same": True, "whole": True, "sharded": True}
