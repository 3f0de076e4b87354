"""The `baton` command: picks the role and calls its `main`. Each role parses its own options."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from common.runtime.lifecycle import EXIT_OPERATOR_ERROR

_ROLES = {
    "serve": ("common.runtime.local_stack", "the local stack: gateway and workers as separate processes"),
    "gateway": ("gateway.__main__", "one gateway"),
    "prefill": ("prefill_worker.__main__", "one prefill worker"),
    "decode": ("decode_worker.__main__", "one decode worker"),
    "bench": ("benchmarks.load.cli", "load on any OpenAI-compatible endpoint, and its figures"),
    "kv-size": ("common.runtime.kv_size", "the size of a model's KV, from its configuration"),
    "api-key": ("gateway.access.api_keys", "a new API key for clients, and its entry in the gateway's file"),
    "keys": ("common.runtime.curve", "a file of keys for the control channel"),
}


def main() -> None:
    """Entry point."""
    # Until `run` handles the signal there is nothing to end in order. Python's handler would wait for the threads of a
    # download, and print a traceback during imports.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"baton {_version()}")
        return
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: baton ROLE [options]   or: baton --version\n")
        for role, (_, purpose) in _ROLES.items():
            print(f"  {role:<9}{purpose}")
        print("\n`baton ROLE --help` lists a role's options; each is also a variable BATON_<OPTION>,")
        print("of bench BATON_BENCH_<OPTION>, of kv-size BATON_KV_SIZE_<OPTION>.")
        sys.exit(0 if arguments else EXIT_OPERATOR_ERROR)
    role = arguments[0]
    if role not in _ROLES:
        print(f"error: unknown role {role!r}; one of {', '.join(_ROLES)}", file=sys.stderr)
        sys.exit(EXIT_OPERATOR_ERROR)
    sys.argv = [f"baton {role}", *arguments[1:]]
    importlib.import_module(_ROLES[role][0]).main()


def _version() -> str:
    """The installed version and, in a checkout, its commit."""
    from importlib.metadata import PackageNotFoundError, version

    number, commit, root = "of an unknown version", "", Path(__file__).resolve().parents[2]
    with suppress(PackageNotFoundError):  # run from a source tree
        number = version("baton")
    if (root / ".git").exists():  # else git would find the repository of whoever has the environment in theirs
        with suppress(OSError):
            asked = ["git", "rev-parse", "HEAD"]
            done = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=False)  # noqa: S603
            commit = done.stdout.strip()
    return f"{number}, commit {commit}" if commit else number


if __name__ == "__main__":
    main()
