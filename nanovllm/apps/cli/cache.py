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
    found = kv_disk.kept_in(args.path) if args.action == "ls" else kv_disk.verify(args.path)
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.last_used)) if each.last_used else "never"
        damaged = f", {each.damaged:,} of them damaged" if each.damaged else ""
        size = f"{each.tokens:,} tokens, {each.size:,} bytes{damaged}"
        rank = f", rank {each.rank} of {each.ranks}" if each.ranks > 1 else ""
        print(f"{each.model}{rank}: {size}, last used {used} ({each.path.name[:16]})")
    if not found:
        print("no KV blocks")
    return 1 if any(each.damaged for each in found) else 0
