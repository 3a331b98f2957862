"""The `stacklm-hf` command: thin, one function call for each subcommand.

Contract: an error that a user can make is one line on standard error and exit status 2; a traceback is a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path


def _demo(options: argparse.Namespace) -> int:
    from stacklm_hf.demo import Demo, DemoSettings

    names = {item.name for item in fields(DemoSettings)}
    settings = DemoSettings(**{name: value for name, value in vars(options).items() if name in names})
    Demo(options.out, settings).run()
    return 0


def _ask(options: argparse.Namespace) -> int:
    from stacklm_hf.ask import ask, load_policy
    from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, load_documents

    passages = load_documents(options.documents) if options.documents else build_corpus(options.world_seed)
    environment = ResearchEnvironment(passages)
    policy = load_policy(options.model, environment, options.temperature)
    asyncio.run(ask(options.question, policy, environment, color=sys.stdout.isatty() and not os.getenv("NO_COLOR")))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from stacklm_hf.modeling.convert import convert_native

    path = convert_native(options.checkpoint, options.out, config=options.config, tokenizer=options.tokenizer)
    print(f"wrote {path or options.out}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from stacklm_hf.modeling.export import export_qwen3

    print(f"wrote {export_qwen3(options.model, options.out)}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="stacklm-hf", description="Small models that use tools reliably.")
    parser.add_argument("--verbose", action="store_true", help="log what the libraries say, and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the whole road on this machine's CPU, in minutes")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: runs/demo)")
    demo.add_argument("--seed", type=_natural, default=0, help="seed of weights and data order (default: 0)")
    for name in ("max_steps", "tasks", "vocab_size", "batch_size", "eval_every", "save_every"):
        demo.add_argument(
            f"--{name.replace('_', '-')}", type=_positive, default=argparse.SUPPRESS, help="tuned; see DemoSettings"
        )
    demo.set_defaults(run=_demo)

    ask = commands.add_parser("ask", help="ask a question and watch the model use its tools")
    ask.add_argument("question", help="what to ask")
    ask.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    ask.add_argument("--documents", type=Path, help="folder of .txt and .md files to search (default: built-in corpus)")
    ask.add_argument("--world-seed", type=int, default=0, help="seed of the built-in corpus (default: 0)")
    ask.add_argument("--temperature", type=float, default=0.0, help="0 for greedy (default)")
    ask.set_defaults(run=_ask)

    convert = commands.add_parser("convert", help="import a checkpoint of the original PyTorch implementation")
    convert.add_argument("checkpoint", type=Path, help="native .pt file")
    convert.add_argument("out", type=Path, help="folder to write")
    convert.add_argument("--config", type=Path, help="native config JSON, where the checkpoint holds none")
    convert.add_argument("--tokenizer", type=Path, help="native tokenizer JSON (stacklm-bpe-v1)")
    convert.set_defaults(run=_convert)

    export = commands.add_parser("export-qwen3", help="write a model without NoPE layers as a stock Qwen3 checkpoint")
    export.add_argument("model", help="Stack checkpoint with nope_every = 0")
    export.add_argument("out", type=Path, help="folder to write")
    export.set_defaults(run=_export)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _user_errors() -> tuple[type[Exception], ...]:
    """What a wrong argument or a broken file raises; asked for only once something did, since it imports."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return ValueError, OSError, RuntimeError, ImportError, SafetensorError, StrictDataclassError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    # Threads that spin at every barrier make a small model ten times slower on a machine that does something else
    # too. Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not options.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        # The bars of downloads, conversions and saves would interleave with this command's own.
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    except _user_errors() as error:
        if options.verbose:
            raise
        print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
