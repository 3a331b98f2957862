"""vLLM for real, on the CPU build: the architecture, the server, and the engine in the episode loop.

Runs where vLLM is installed; `make test-vllm` installs it in an environment of its own.
"""

import asyncio
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

from stacklm_hf.modeling import StackConfig, StackForCausalLM, train_stack_tokenizer
from stacklm_hf.modeling.modeling_stack import StackRMSNorm
from stacklm_hf.protocol.tokens import END, TOOL_CALL, control_ids
from stacklm_hf.rollout import EpisodeSettings, PolicyError, StepKind, StopReason, TurnRequest, run_episodes
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.rollout.vllm_build import build_llm, close_llm
from stacklm_hf.rollout.vllm_policy import VLLMPolicy
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, make_task_pool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: make test-vllm runs this in an environment of its own",
    ),
]

TASK = Task("q", "4", task_id="t")
SETTINGS = EpisodeSettings(max_new_tokens=100, forced_answer_tokens=12, max_steps=3)
SMALL = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
TOLERANCE = 1e-4
CALLS, ENDS = 6.0, 2.5
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 9, [7] * 37, [400, 2, 3]]


@pytest.fixture(scope="module")
def tokenizer():
    return train_stack_tokenizer([passage.text for passage in build_corpus()], 500)


@pytest.fixture(scope="module")
def world():
    return make_task_pool()[1][:8], ResearchEnvironment(build_corpus())


def new_model(tokenizer, seed=1, **changes):
    """A random model that is far from uniform, and given to calling tools and to ending its turns."""
    sizes = {
        "vocab_size": len(tokenizer),  # no multiple of 64, to which vLLM pads it
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    model = StackForCausalLM(StackConfig(**{**sizes, **changes})).eval()
    control = control_ids(tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        rows = model.get_output_embeddings().weight
        rows[control[TOOL_CALL]] *= CALLS / rows[control[TOOL_CALL]].norm()
        rows[control[END]] *= ENDS / rows[control[END]].norm()
    return model


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tokenizer):
    return new_model(tokenizer)


@pytest.fixture(scope="module")
def checkpoint(model, tokenizer, tmp_path_factory):
    return save(model, tokenizer, tmp_path_factory.mktemp("tied"))


class Engines:
    """The one engine that a process may have: kept as long as the next test asks for the same."""

    def __init__(self):
        self.key = self.llm = None

    def __call__(self, path, **options):
        key = (str(path), tuple(sorted(options.items())))
        if key != self.key:
            self.close()
            self.key, self.llm = key, build_llm(path, **{**SMALL, **options})
        return self.llm

    def close(self):
        if self.llm is not None:
            close_llm(self.llm)
        self.key = self.llm = None


@pytest.fixture(scope="module")
def engines():
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture
def llm(engines, checkpoint):
    return engines(checkpoint)


def turns(policy, prompts, max_new_tokens=16, **options):
    async def main():
        requests = [TurnRequest(f"e{i}", ids, max_new_tokens, i, TASK, **options) for i, ids in enumerate(prompts)]
        return await asyncio.gather(*map(policy.turn, requests), return_exceptions=True)

    return asyncio.run(main())


@torch.no_grad()
def own_logprobs(model, token_ids, temperature=1.0):
    """Log-probability that the transformers model gives each token but the first, shape (length - 1,)."""
    logprobs = (model(torch.tensor([token_ids])).logits[0].float() / temperature).log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def largest_difference(trajectories, model, temperature=1.0):
    """Between recorded logprobs and the model's own, over all sampled tokens."""
    worst = 0.0
    for trajectory in trajectories:
        expected = own_logprobs(model, trajectory.token_ids, temperature).tolist()
        for position, sampled in enumerate(trajectory.sampled):
            if sampled:
                worst = max(worst, abs(trajectory.logprobs[position] - expected[position - 1]))
    return worst


class TestArchitecture:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"nope_every": 0, "num_key_value_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-3},
            {
                "nope_every": 2,
                "tie_word_embeddings": False,
                "hidden_size": 96,
                "num_key_value_heads": 1,
                "head_dim": 64,
            },
            {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 1.5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ],
        ids=["tied", "rope-in-every-layer", "untied", "soft-caps", "rope-base"],
    )
    def test_logprobs_and_greedy_tokens_equal_transformers(self, engines, tokenizer, tmp_path, changes):
        from vllm import SamplingParams

        model = new_model(tokenizer, **changes)
        llm = engines(save(model, tokenizer, tmp_path))
        greedy = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            found = [next(iter(position.values())).logprob for position in output.prompt_logprobs[1:]]
            assert found == pytest.approx(own_logprobs(model, prompt).tolist(), abs=TOLERANCE)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer

    def test_norms_round_as_the_model_does(self):
        from stacklm_hf.modeling import vllm_model

        torch.manual_seed(0)
        theirs, ours = StackRMSNorm(64, eps=1e-5).bfloat16(), vllm_model.StackRMSNorm(64, 1e-5).bfloat16()
        theirs.weight.data.uniform_(0.5, 1.5)
        ours.load_state_dict(theirs.state_dict())
        x, residual = torch.randn(2, 50, 64).bfloat16()
        assert torch.equal(ours(x), theirs(x))
        normed, total = ours(x, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, theirs(x + residual))

    def test_an_attention_without_soft_cap_is_refused(self, engines, tokenizer, tmp_path, monkeypatch):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        create = CPUAttentionBackendImpl.__init__

        def without_cap(self, *args, **kwargs):
            create(self, *args, **kwargs)
            self.logits_soft_cap = 0  # as backends do that take the argument and leave it

        path = save(new_model(tokenizer, attn_logit_softcapping=2.0), tokenizer, tmp_path)
        monkeypatch.setattr(CPUAttentionBackendImpl, "__init__", without_cap)
        with pytest.raises(ValueError, match="CPU_ATTN cannot apply attn_logit_softcapping"):
            engines(path)


@pytest.fixture(scope="class")
def server(checkpoint, tmp_path_factory):
    """vLLM's own server on the checkpoint, started outside the repository: it has only the entry point to go by."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", "stack", "--dtype", "float32", "--enforce-eager",
        "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail("the server did not start:\n" + (folder / "log").read_text()[-3000:])
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


class TestServer:
    def ask(self, server, path, **body):
        request = urllib.request.Request(
            f"{server}{path}", json.dumps({"model": "stack", **body}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def test_a_chat_is_answered_by_the_chat_template(self, server, model, tokenizer):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many layers?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = self.ask(
            server, "/v1/chat/completions", messages=messages, max_tokens=4, temperature=0, ignore_eos=True,
            logprobs=True, return_token_ids=True,
        )  # fmt: skip
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == prompt
        expected = own_logprobs(model, prompt + choice["token_ids"])[-len(choice["token_ids"]) :]
        found = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert len(found) == 4
        assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)

    def test_a_turn_can_be_constrained_by_our_structural_tag(self, server, tokenizer, world):
        from stacklm_hf.protocol import parse_turn
        from stacklm_hf.protocol.grammar import TurnGrammar

        grammar = TurnGrammar(tokenizer, [(tool.name, tool.parameters) for tool in world[1].tools], max_tokens=0)
        call = control_ids(tokenizer)[TOOL_CALL]
        answer = self.ask(
            server, "/v1/completions", prompt=[*PROMPTS[2], call], max_tokens=200, temperature=0,
            structured_outputs={"structural_tag": json.dumps(grammar.tag)}, return_token_ids=True,
        )  # fmt: skip
        ids = answer["choices"][0]["token_ids"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert parse_turn(tokenizer.decode(ids[:-1])).kind != "malformed"


class TestEpisodes:
    def test_greedy_episodes_equal_the_transformers_engine_token_for_token(self, llm, model, tokenizer, world):
        tasks, environment = world
        ours = run_episodes(VLLMPolicy(llm, tools=environment.tools), tasks, environment, SETTINGS)
        theirs = run_episodes(TransformersPolicy(model, tokenizer, environment.tools), tasks, environment, SETTINGS)
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.sampled == other.sampled
            assert one.forced == other.forced
            assert one.stop_reason is other.stop_reason
        # The comparison is worth something only if turns follow on observations and the grammar leads them.
        assert sum(len(trajectory.observations) for trajectory in ours) > len(tasks)
        assert any(any(trajectory.forced) for trajectory in ours)

    @pytest.mark.parametrize("temperature", [0.7, 1.0])
    @pytest.mark.parametrize("grammar", [False, True])
    def test_logprobs_are_those_at_the_temperature_without_the_grammar(self, llm, model, world, temperature, grammar):
        tasks, environment = world
        policy = VLLMPolicy(llm, tools=environment.tools if grammar else None, temperature=temperature)
        trajectories = run_episodes(policy, tasks, environment, SETTINGS, samples=2)
        assert largest_difference(trajectories, model, temperature) < TOLERANCE
        assert largest_difference(trajectories, model, 2 * temperature) > 0.1
        forced = [p for t in trajectories for p, forced in zip(t.logprobs, t.forced, strict=True) if forced]
        if grammar:
            # Renormalised by the grammar, the only choice would have the logprob 0.
            assert forced
            assert min(forced) < -0.1
            assert all(step.kind is not StepKind.MALFORMED for t in trajectories for step in t.steps if not step.cut)
        else:
            assert not forced

    def test_a_cache_too_small_for_all_changes_nothing(self, engines, checkpoint, model, world):
        tasks, environment = world
        runs = []
        for size in (3 << 20, 32 << 20):
            llm = engines(checkpoint, kv_cache_memory_bytes=size)
            policy = VLLMPolicy(llm, tools=environment.tools)
            runs.append(run_episodes(policy, tasks, environment, SETTINGS))
        assert [t.token_ids for t in runs[0]] == [t.token_ids for t in runs[1]]
        assert largest_difference(runs[0], model) < TOLERANCE

    def test_an_engine_that_schedules_ahead_gives_the_same(self, engines, checkpoint, model, world, monkeypatch):
        """As one that TRL has built on a GPU; on a CPU vLLM switches it off."""
        from vllm.platforms.cpu import CpuPlatform

        tasks, environment = world
        expected = run_episodes(VLLMPolicy(engines(checkpoint), tools=environment.tools), tasks, environment, SETTINGS)
        configure = CpuPlatform.check_and_update_config

        def ahead(config):
            configure(config)
            config.scheduler_config.async_scheduling = True

        monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(ahead))
        llm = engines(checkpoint, async_scheduling=True)
        assert llm.llm_engine.engine_core.engine_core.batch_queue is not None
        trajectories = run_episodes(VLLMPolicy(llm, tools=environment.tools), tasks, environment, SETTINGS)
        assert [t.token_ids for t in trajectories] == [t.token_ids for t in expected]
        assert largest_difference(trajectories, model) < TOLERANCE

    def test_more_prompts_than_one_step_can_read(self, engines, checkpoint):
        prompts = [[number + 1, *PROMPTS[0]] for number in range(40)]
        policy = VLLMPolicy(engines(checkpoint, max_num_batched_tokens=1024), temperature=1.0)
        together = turns(policy, prompts)
        assert [output.token_ids for output in together[-3:]] == [
            turns(policy, prompts[: number + 1])[-1].token_ids for number in (37, 38, 39)
        ]

    def test_a_turn_depends_on_its_seed_and_not_on_its_neighbours(self, llm, world):
        tasks, environment = world
        policy = VLLMPolicy(llm, tools=environment.tools, temperature=1.0)
        runs = [
            [t.token_ids for t in run_episodes(policy, tasks, environment, SETTINGS, seed=seed, concurrency=width)]
            for seed, width in ((3, 64), (3, 2), (4, 64))
        ]
        assert runs[0] == runs[1]
        assert all(one != other for one, other in zip(runs[0], runs[2], strict=True))

    def test_a_last_turn_cannot_call(self, llm, tokenizer, world):
        tasks, environment = world
        settings = EpisodeSettings(max_new_tokens=100, forced_answer_tokens=30, max_steps=1)
        policy = VLLMPolicy(llm, tools=environment.tools, temperature=1.0)
        last = [t for t in run_episodes(policy, tasks, environment, settings) if t.stop_reason is StopReason.STEP_LIMIT]
        assert last
        assert all(TOOL_CALL not in t.steps[-1].text for t in last)

    def test_an_episode_goes_on_at_the_step_after_its_turn(self, engines, checkpoint, world):
        tasks, environment = world
        engines.close()
        policy = VLLMPolicy(checkpoint, tools=environment.tools, temperature=1.0, max_num_seqs=4, **SMALL)
        widths, step = [], policy.engine.step

        def counted(*arguments):
            output = step(*arguments)
            widths.append(len(output.tokens))
            return output

        policy.engine.step = counted
        run_episodes(policy, tasks, environment, SETTINGS)
        # Full until fewer episodes are left than fit, and never a gap.
        assert widths[0] == 4
        assert widths == sorted(widths, reverse=True)
        policy.engine.close()

    def test_tokens_are_shown_as_they_are_chosen(self, llm):
        seen = []
        (output,) = turns(VLLMPolicy(llm), [[1, 2]], on_token=seen.append)
        assert output.token_ids == seen

    def test_settings_are_recorded(self, llm, world):
        assert VLLMPolicy(llm, tools=world[1].tools, temperature=0.7, top_p=0.9, top_k=5).sampling == {
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "grammar": True, "engine": "vllm",
        }  # fmt: skip


class TestWeights:
    @pytest.mark.parametrize("tied", [True, False])
    def test_after_each_push_the_engine_is_the_new_model(self, engines, tokenizer, tmp_path, world, tied):
        tasks, environment = world
        model = new_model(tokenizer, tie_word_embeddings=tied)
        llm = engines(save(model, tokenizer, tmp_path))
        policy = VLLMPolicy(llm, tools=environment.tools, temperature=0.7)
        for _ in range(2):
            before = run_episodes(policy, tasks, environment, SETTINGS)
            assert largest_difference(before, model, 0.7) < TOLERANCE
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
            assert largest_difference(before, model, 0.7) > 0.05
            policy.push_weights(model.state_dict().items() if tied else model.named_parameters())
        # The same prompts again: prefixes cached under the old weights would show.
        after = run_episodes(policy, tasks, environment, SETTINGS)
        assert largest_difference(after, model, 0.7) < TOLERANCE

    def test_weights_that_do_not_fit_are_refused_and_change_nothing(self, llm, model, world):
        tasks, environment = world
        policy = VLLMPolicy(llm, tools=environment.tools)
        weights = dict(new_model(policy.tokenizer, seed=2).named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"
        for what, wrong in {
            rf"missing: {name}": {key: value for key, value in weights.items() if key != name},
            r"not of this model: base\.x": {**weights, "base.x": weights[name]},
            rf"of another shape: {name}": {**weights, name: weights[name][:5]},
        }.items():
            with pytest.raises(ValueError, match=what):
                policy.push_weights(wrong.items())
        assert largest_difference(run_episodes(policy, tasks[:2], environment, SETTINGS), model) < TOLERANCE

    def test_weights_are_not_changed_under_a_turn(self, llm, model):
        policy = VLLMPolicy(llm)
        with_push = turns(policy, [[1, 2, 3]], on_token=lambda _: policy.push_weights(model.named_parameters()))
        assert isinstance(with_push[0], RuntimeError)
        assert "while turns are being written" in str(with_push[0])
        assert turns(policy, [[1, 2, 3]])[0].token_ids


class TestFaults:
    @pytest.fixture
    def policy(self, engines, checkpoint):
        """On an engine of its own, which is lost."""
        yield VLLMPolicy(engines(checkpoint))
        engines.close()

    def test_a_refused_request_names_its_episode_and_leaves_the_others(self, policy, tokenizer):
        good, bad = turns(policy, [[1, 2, 3], [len(tokenizer) + 5]])
        assert good.token_ids
        assert isinstance(bad, PolicyError)
        assert "episode e1" in str(bad)
        assert turns(policy, [[1, 2, 3]])[0].token_ids == good.token_ids

    def test_a_request_that_is_broken_off_names_its_episode(self, policy):
        from vllm.v1.engine.output_processor import OutputProcessor

        engine = policy.engine.llm.llm_engine
        step, calls = engine.step, []

        def broken():
            results = step()
            calls.append(len(results))
            if len(calls) == 3:
                results[0].outputs[0].finish_reason = "abort"
            return results

        assert isinstance(engine.output_processor, OutputProcessor)
        engine.step = broken
        outputs = turns(policy, [[1, 2, 3], [4, 5, 6]], max_new_tokens=9)
        failed = [output for output in outputs if isinstance(output, PolicyError)]
        assert len(failed) == 1
        assert "abort" in str(failed[0])
        assert "episode e" in str(failed[0])
        assert not engine.has_unfinished_requests()

    def test_an_engine_that_dies_ends_every_open_turn_and_names_it(self, policy):
        def dead():
            raise OSError("no memory")

        policy.engine.llm.llm_engine.step = dead
        for number, error in enumerate(turns(policy, PROMPTS)):
            assert isinstance(error, RuntimeError)
            assert f"episode e{number}" in str(error)
            assert "no memory" in str(error)
        (later,) = turns(policy, [[1, 2]])
        assert "cannot be used any more" in str(later)
        with pytest.raises(RuntimeError, match="cannot be used any more"):
            policy.push_weights(new_model(policy.tokenizer).named_parameters())

    @pytest.mark.parametrize("kind", ["hangs", "gives nothing"])
    def test_an_engine_that_gives_no_token_is_not_waited_for(self, policy, kind):
        let_go = threading.Event()
        policy.engine.timeout = 2.0
        policy.engine.llm.llm_engine.step = lambda: let_go.wait(60) and [] if kind == "hangs" else []
        start = time.monotonic()
        (error,) = turns(policy, [[1, 2]])
        assert time.monotonic() - start < 30
        assert isinstance(error, RuntimeError)
        assert "episode e0" in str(error)
        assert "in 2 s" in str(error)
        let_go.set()

    def test_a_fault_in_one_episode_leaves_nothing_in_the_engine(self, llm, world):
        tasks, environment = world
        policy = VLLMPolicy(llm, tools=environment.tools, temperature=1.0)

        def fault(trajectory):
            raise LookupError(trajectory.episode_id)

        with pytest.raises(LookupError):
            run_episodes(policy, tasks, environment, SETTINGS, on_trajectory=fault)
        assert not policy.engine.call(llm.llm_engine.has_unfinished_requests)
        assert len(run_episodes(policy, tasks, environment, SETTINGS)) == len(tasks)

    def test_requests_that_cannot_be_served_say_so(self, llm):
        for prompt, budget in (([], 5), ([1], 0), ([1] * 1020, 10)):
            assert isinstance(turns(VLLMPolicy(llm), [prompt], max_new_tokens=budget)[0], PolicyError)


class TestRefusals:
    @pytest.mark.parametrize(
        "options", [{"temperature": -1}, {"temperature": 0.001}, {"temperature": 3}, {"top_p": 0}, {"top_k": -1}]
    )
    def test_options_out_of_range(self, llm, options):
        with pytest.raises(ValueError, match="must be"):
            VLLMPolicy(llm, **options)

    def test_options_of_an_engine_that_is_built(self, llm):
        with pytest.raises(ValueError, match="max_num_seqs: an engine that is built already"):
            VLLMPolicy(llm, max_num_seqs=3)

    @pytest.mark.parametrize(
        ("section", "name", "value", "reason"),
        [
            ("scheduler_config", "enable_chunked_prefill", True, "enable_chunked_prefill=False"),
            ("parallel_config", "world_size", 2, "in this process"),
        ],
    )
    def test_engines_whose_tokens_could_not_be_matched(self, llm, monkeypatch, section, name, value, reason):
        monkeypatch.setattr(getattr(llm.llm_engine.vllm_config, section), name, value)
        with pytest.raises(ValueError, match=reason):
            VLLMPolicy(llm)

    def test_a_checkpoint_that_also_ends_elsewhere(self, engines, model, tokenizer, tmp_path, world):
        path = save(model, tokenizer, tmp_path)
        config = json.loads((tmp_path / "generation_config.json").read_text())
        config["eos_token_id"] = [config["eos_token_id"], 5]
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        VLLMPolicy(engines(path))  # without a grammar it does not matter
        with pytest.raises(ValueError, match="add_agent_tokens"):
            VLLMPolicy(engines(path), tools=world[1].tools)


class TestProcess:
    """What building an engine leaves as it was."""

    def test_a_second_engine_is_refused_while_one_is_in_use(self, llm, checkpoint):
        with pytest.raises(RuntimeError, match="has a vLLM engine already"):
            VLLMPolicy(checkpoint, **SMALL)

    def test_an_engine_that_was_dropped_makes_room(self, engines, checkpoint):
        engines.close()
        policy = VLLMPolicy(checkpoint, **SMALL)
        del policy
        assert turns(VLLMPolicy(engines(checkpoint)), [[1, 2]])[0].token_ids

    def test_random_numbers_threads_and_environment(self, engines, checkpoint, monkeypatch):
        def state():
            names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER")
            numbers = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
            return numbers, torch.get_num_threads(), torch.set_num_threads, [os.environ.get(name) for name in names]

        engines.close()
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        before = state()
        engines(checkpoint)
        assert state() == before

    def test_the_trainers_process_group(self, engines, checkpoint):
        from vllm.distributed import cleanup_dist_env_and_memory

        engines.close()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            assert turns(VLLMPolicy(engines(checkpoint)), [[1, 2]])[0].token_ids
            engines.close()
            assert torch.distributed.is_initialized()
        finally:
            cleanup_dist_env_and_memory()
