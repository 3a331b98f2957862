"""Episodes per second of the vLLM engine against the transformers engine, and against vLLM's own rate.

    .venv-vllm/bin/python tests/benchmarks/bench_vllm.py [--preset stack-demo] [--episodes 32] [--threads 1]

The work is that of bench_rollout.py: episodes of several turns of a fixed number of tokens, with an observation between
them. vLLM's own rate is that of one `LLM.generate` that reads as many tokens and writes as many, all of an episode's
reading at its start: no turns, no grammar, no logprobs. Also measured: the grammar's share, and a push of all weights.
"""

import argparse
import asyncio
import importlib.util
import tempfile
import time
from collections.abc import Callable

import torch
from bench_rollout import TURNS, engine, episodes

from stacklm_hf.modeling import StackConfig, StackForCausalLM, train_stack_tokenizer
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.rollout.vllm_policy import VLLMPolicy
from stacklm_hf.tools import BM25Retriever
from stacklm_hf.tools.research import CalcTool, SearchTool


def seconds(runs: dict[str, Callable[[], object]], repeats: int = 4) -> dict[str, float]:
    """The fastest of a few calls of each, taken in turns so that they share what else the machine does."""
    fastest: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                fastest[name] = min(fastest.get(name, float("inf")), time.perf_counter() - start)
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="stack-demo")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--threads", type=int, default=1, help="of both engines; set OMP_NUM_THREADS alike")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("skipped: vLLM is not installed (make install-vllm)")
        return
    from vllm import SamplingParams

    torch.set_num_threads(options.threads)
    tokenizer = train_stack_tokenizer(["a bench"], 1024)
    torch.manual_seed(0)
    model = StackForCausalLM(StackConfig.from_preset(options.preset, vocab_size=1024)).eval()
    tools = [SearchTool(BM25Retriever([])).spec, CalcTool().spec]
    work = episodes(options.episodes, 1024)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        start = time.perf_counter()
        policy = VLLMPolicy(folder, tools=tools, temperature=1.0, dtype="float32")
        started = time.perf_counter() - start
        policy.engine.call(lambda: torch.set_num_threads(options.threads))
        llm = policy.engine.llm
        free = VLLMPolicy(llm, temperature=1.0)
        slow = TransformersPolicy(model, tokenizer, tools, temperature=1.0)

        def play(engine_policy: VLLMPolicy | TransformersPolicy) -> int:
            """Plays all episodes; returns the tokens that the policy itself wrote."""
            if engine_policy is not slow:
                llm.reset_prefix_cache()  # or each run but the first would find its prompts there
            histories = asyncio.run(engine(engine_policy, work, options.tokens))
            return sum(map(len, histories)) - sum(len(part) for parts in work for part in parts)

        prompts = [{"prompt_token_ids": [token for part in parts for token in part]} for parts in work]
        raw = SamplingParams(
            temperature=1.0, max_tokens=options.tokens * TURNS, ignore_eos=True, detokenize=False, seed=0
        )

        def generate() -> None:
            llm.reset_prefix_cache()
            llm.generate(prompts, raw, use_tqdm=False)

        taken = seconds(
            {
                "vLLM": lambda: play(policy),
                "vLLM, no grammar": lambda: play(free),
                "transformers": lambda: play(slow),
                "generate": generate,
                "push": lambda: policy.push_weights(model.named_parameters()),
            }
        )
        own = play(policy)
    push, rate = taken.pop("push"), options.tokens * TURNS * options.episodes / taken.pop("generate")
    print(f"{options.preset}, {options.episodes} episodes of {TURNS} turns of {options.tokens} tokens, float32")
    for name, time_taken in taken.items():
        speedup = taken["transformers"] / time_taken
        print(f"  {name:<18} {options.episodes / time_taken:8.2f} episodes/s   {speedup:4.2f}x transformers")
    share = own / taken["vLLM"] / rate
    print(f"  own tokens         {own / taken['vLLM']:8.0f} tokens/s     {share:4.2f} of vLLM's own rate ({rate:.0f})")
    print(f"  the grammar        {1 - taken['vLLM, no grammar'] / taken['vLLM']:8.1%} of the time")
    print(f"  weights pushed in  {push:8.2f} s, engine built in {started:.1f} s")


if __name__ == "__main__":
    main()
