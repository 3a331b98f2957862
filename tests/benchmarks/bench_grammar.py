"""What the grammar of a turn costs: compiling it once, and each token, against the decode step of stack-100m.

python tests/benchmarks/bench_grammar.py [--vocab 32768]
"""

import argparse
import time

import torch
import xgrammar

from stacklm_hf.modeling import StackConfig, StackForCausalLM, train_stack_tokenizer
from stacklm_hf.protocol import encode_trusted, render_call
from stacklm_hf.protocol.grammar import TurnGrammar
from stacklm_hf.tools import BM25Retriever
from stacklm_hf.tools.research import CalcTool, SearchTool


def decode_seconds(vocabulary: int, batch: int, steps: int = 8) -> float:
    """Seconds of one decode step of stack-100m with 256 tokens in the cache."""
    model = StackForCausalLM(StackConfig.from_preset("stack-100m", vocab_size=vocabulary)).eval()
    with torch.inference_mode():
        cache = model(torch.randint(0, vocabulary, (batch, 256)), use_cache=True).past_key_values
        token = torch.zeros(batch, 1, dtype=torch.long)
        model(token, past_key_values=cache, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(steps):
            model(token, past_key_values=cache, logits_to_keep=1)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=32768)
    options = parser.parse_args()
    tokenizer = train_stack_tokenizer(["the layer count of Stack-100M is 30"] * 4, options.vocab)
    tools = [(tool.spec.name, tool.spec.parameters) for tool in (SearchTool(BM25Retriever([])), CalcTool())]
    start = time.perf_counter()
    grammar = TurnGrammar(tokenizer, tools)
    compiled = time.perf_counter() - start
    turn = "Thought: I need the layer count of Stack-100M.\n" + render_call("search", {"query": "Stack-100M", "k": 2})
    ids = encode_trusted(tokenizer, turn)
    bitmask = xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
    logits = torch.zeros(1, grammar.vocab_size)
    seconds = 0.0
    for repeat in range(21):
        matcher = grammar.matcher()
        start = time.perf_counter()
        for token in ids:
            matcher.fill_next_token_bitmask(bitmask)
            xgrammar.apply_token_bitmask_inplace(logits, bitmask)
            matcher.accept_token(token)
        seconds += (time.perf_counter() - start) * (repeat > 0)  # the first is a warm-up
    per_token = seconds / (20 * len(ids))
    print(f"vocabulary {options.vocab}: compiled once in {compiled * 1e3:.0f} ms, {per_token * 1e6:.0f} us a token")
    for batch in (1, 8):
        step = decode_seconds(options.vocab, batch)
        print(f"  stack-100m, batch {batch}: {per_token * batch / step:.1%} of a decode step of {step * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
