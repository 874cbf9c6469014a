"""`nanovllm cache`: what a directory of KV blocks holds (`kv_cache_dir`), whether it is whole, and its removal."""

from __future__ import annotations

import argparse
import time
from typing import Any

from nanovllm.apps.cli.arguments import add_command

ACTIONS = {
    "ls": "list models with tokens, bytes and last use",
    "verify": "read everything and compute its checksums; exit status 1 if something is damaged",
    "rm": "delete all KV blocks in it",
}


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """The command's options."""
    parser = add_command(subparsers, "cache", summary, f"Works on KV blocks that engines keep on disk: {summary}.")
    parser.set_defaults(run=run)
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{name}: {does}" for name, does in ACTIONS.items()))
    parser.add_argument("path", metavar="PATH", help="the directory that --kv-cache-dir named")
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if something is damaged."""
    from nanovllm.features import kv_disk

    if args.action == "rm":
        print(f"{kv_disk.remove(args.path):,} bytes deleted")
        return 0
    models = kv_disk.kept_in(args.path, verify=args.action == "verify")
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used)) if model.last_used else "never"
        damaged = f", {model.damaged:,} of them damaged" if model.damaged else ""
        size = f"{model.tokens:,} tokens, {model.size:,} bytes{damaged}"
        print(f"{model.model}: {size}, last used {used} ({model.path.name[:16]})")
    if not models:
        print("no KV blocks")
    return 1 if any(model.damaged for model in models) else 0
