"""Runs in stages: what is done stays done, and a run is never continued with other settings."""

import json

import pytest

from stacklm_hf.stages import STATE_FILE, Stages


def test_a_finished_stage_is_known_to_the_next_run(tmp_path):
    with Stages(tmp_path, {"seed": 0}).stage("collect") as facts:
        facts["trajectories"] = 7
    again = Stages(tmp_path, {"seed": 0})
    assert "collect" in again
    assert again.facts("collect")["trajectories"] == 7
    assert again.seconds == again.facts("collect")["seconds"]


def test_a_stage_that_fails_is_not_finished(tmp_path):
    stages = Stages(tmp_path, {})
    with pytest.raises(RuntimeError), stages.stage("sft"):
        raise RuntimeError("killed")
    assert "sft" not in stages
    assert "sft" not in Stages(tmp_path, {})


def test_other_settings_are_refused_and_named(tmp_path):
    Stages(tmp_path, {"seed": 0, "steps": 5})
    with pytest.raises(ValueError, match=r"other settings \(seed was 0, is 1\): choose another folder"):
        Stages(tmp_path, {"seed": 1, "steps": 5})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"settings": 1, "stages": {}}', '{"settings": {}}'])
def test_a_broken_state_file_is_one_clear_line(tmp_path, content):
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(ValueError, match="cannot be read"):
        Stages(tmp_path, {})


def test_the_state_is_replaced_in_one_step(tmp_path):
    stages = Stages(tmp_path, {"seed": 0})
    (tmp_path / "state.tmp").write_text("half a fi")  # what a kill leaves behind
    with stages.stage("a"):
        pass
    assert json.loads((tmp_path / STATE_FILE).read_text())["stages"].keys() == {"a"}


def test_two_processes_do_not_run_stages_in_one_folder(tmp_path):
    with Stages(tmp_path, {}).stage("collect"):
        other = Stages(tmp_path, {})
        with pytest.raises(ValueError, match="another process is at work"), other.stage("collect"):
            pytest.fail("it ran")
    with Stages(tmp_path, {}).stage("sft"):
        pass
