"""Episodes per second of the transformers engine, against a plain loop that calls `generate` for every turn.

    python tests/benchmarks/bench_rollout.py [--preset stack-demo] [--episodes 32]

Both write the same turns of the same model: each episode has a prompt, then turns of a fixed number of tokens with an
observation between them, as episodes with two searches and a calculation have. The plain loop feeds the whole
episode again at each turn; a second one does so for all episodes at once, waiting for all of them at every turn.
"""

import argparse
import asyncio
import random
import time

import torch

from stacklm_hf.modeling import StackConfig, StackForCausalLM, train_stack_tokenizer
from stacklm_hf.protocol.tokens import END, control_ids
from stacklm_hf.rollout import TurnRequest
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.worlds.base import Task

PROMPT, OBSERVATION, TURNS = 60, 40, 4
TASK = Task("q", "a", task_id="bench")


def episodes(count: int, vocabulary: int) -> list[list[list[int]]]:
    """For each episode its prompt and its observations, as random ids; lengths vary as real ones do."""
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(256, vocabulary - 9) for _ in range(length + rng.randrange(length // 2))]

    return [[ids(PROMPT), *(ids(OBSERVATION) for _ in range(TURNS - 1))] for _ in range(count)]


async def engine(policy: TransformersPolicy, work: list[list[list[int]]], tokens: int) -> list[list[int]]:
    async def one(number: int, parts: list[list[int]]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            ids += part
            output = await policy.turn(TurnRequest(f"e{number}", list(ids), tokens, 0, TASK))
            ids += output.token_ids
        policy.release(f"e{number}")
        return ids

    return await asyncio.gather(*(one(number, parts) for number, parts in enumerate(work)))


def plain(model: StackForCausalLM, work: list[list[list[int]]], tokens: int, end: int, batch: int) -> list[list[int]]:
    """Turn by turn with `generate`, `batch` episodes at a time, left-padded."""
    results = []
    for start in range(0, len(work), batch):
        group = work[start : start + batch]
        ids: list[list[int]] = [[] for _ in group]
        for turn in range(TURNS):
            for episode, parts in zip(ids, group, strict=True):
                episode += parts[turn]
            width = max(map(len, ids))
            inputs = torch.tensor([[0] * (width - len(row)) + row for row in ids])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
            output = model.generate(
                inputs, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=end, pad_token_id=end
            )
            for episode, row in zip(ids, output[:, width:].tolist(), strict=True):
                episode += row[: row.index(end) + 1] if end in row else row
        results += ids
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="stack-demo")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a turn")
    options = parser.parse_args()
    tokenizer = train_stack_tokenizer(["a bench"], 1024)
    torch.manual_seed(0)
    model = StackForCausalLM(StackConfig.from_preset(options.preset, vocab_size=1024)).eval()
    end, work = control_ids(tokenizer)[END], episodes(options.episodes, 1024)
    runs = {
        "engine": lambda work: asyncio.run(
            engine(TransformersPolicy(model, tokenizer, max_batch=64), work, options.tokens)
        ),
        "generate, one by one": lambda work: plain(model, work, options.tokens, end, 1),
        "generate, all at once": lambda work: plain(model, work, options.tokens, end, len(work)),
    }
    seconds, written = {}, {}
    for name, run in runs.items():
        run(work[:2])
        start = time.perf_counter()
        written[name] = run(work)
        seconds[name] = time.perf_counter() - start
    same = sum(a == b for a, b in zip(written["engine"], written["generate, one by one"], strict=True))
    print(f"{options.preset}, {options.episodes} episodes of {TURNS} turns of {options.tokens} tokens")
    for name, taken in seconds.items():
        print(f"  {name:<22} {options.episodes / taken:8.2f} episodes/s   engine is {taken / seconds['engine']:.1f}x")
    print(f"  same tokens as one by one: {same} of {options.episodes} episodes")


if __name__ == "__main__":
    main()
