"""Lint the wording of Python files; each offence is printed as `file:line: message`.

Usage: `python .ci/words.py FOLDER ...`.

Rules:
    * a docstring begins with a verb or a term, not with What, Whether, How, Who, Where, Which, Why;
    * no variable or argument is named `found`: name the thing that was found;
    * no identifier or module bears a retired word of the tables below;
    * a public class name is defined once over all folders of the library.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Several test files may define classes of one name: they never meet in one import.
LOCAL_CLASSES = ("tests",)

QUESTION = re.compile(r"(What|Whether|How|Who|Whose|Where|Which|Why)\b")

RETIRED_NAMES = {
    "apart": "separate, unsharded or asynchronous",
    "apart_bytes": "unsharded_bytes",
    "apart_s": "small_collectives_s",
    "back_bytes": "gradient_bytes",
    "beside": "concurrent, overlapped or extra",
    "fleet": "resize or cluster",
    "held": "allocated, resident or peak",
    "HeldMemory": "PeakMemory",
    "in_contact": "rank_error_context",
    "Kept": "CheckpointMixin, SearchCache or SavedBytes",
    "kept": "saved, cached or retained",
    "laps": "intervals or durations",
    "leave_word": "publish_failure",
    "SameDraws": "SharedRNG",
    "there_bytes": "activation_bytes",
    "together": "all_ranks_succeed, combined or total",
    "told": "first_failure, given or reported",
}

# Fields that are keys of saved files keep their names.
SAVED_FIELDS = {("profiles/model/crossings.py", "back_bytes")}

RETIRED_MODULES = {
    "boxes": "shard_spec",
    "double": "block_substitute",
    "draws": "shared_rng",
    "flip": "sensitivity",
    "gauges": "monitoring",
    "look": "trace_step",
    "outside": "offload",
    "pace": "straggler_stats",
    "parts": "manual_placement",
    "pieces": "stage_segments",
    "pretence": "fake_mode",
    "travel": "token_dispatch",
    "way": "input_sharding",
    "ways_out": "infeasible",
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a file binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, node.lineno


def questions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the docstrings that begin as a question does, with their lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text and QUESTION.match(text):
                yield text.splitlines()[0], node.body[0].lineno


def check_file(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield `file:line: message` for each offence inside one file."""
    retired = RETIRED_MODULES | RETIRED_NAMES
    stem = path.stem.removeprefix("test_")
    if stem in retired:
        yield f"{path}:1: module `{stem}`: say {retired[stem]}"
    for text, line in questions(tree):
        yield f"{path}:{line}: docstring begins with a question word: {text}"
    for name, line in names(tree):
        if name == "found":
            yield f"{path}:{line}: `found` says nothing: name the thing that was found"
        elif name in RETIRED_NAMES and (path.as_posix(), name) not in SAVED_FIELDS:
            yield f"{path}:{line}: `{name}` is retired: say {RETIRED_NAMES[name]}"


def check_folders(folders: list[Path]) -> list[str]:
    """Return the offences of all files below some folders, in the order of their paths."""
    offences: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            tree = ast.parse(path.read_text())
            offences += check_file(path, tree)
            if folder.name not in LOCAL_CLASSES:
                for node in ast.walk(tree):
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        classes[node.name].append(f"{path}:{node.lineno}")
    for name, places in sorted(classes.items()):
        if len(places) > 1:
            offences.append(f"{places[-1]}: class {name} is also at {', '.join(places[:-1])}")
    return offences


def main(arguments: list[str]) -> int:
    """Print the offences in the folders named; return 1 if there are any."""
    offences = check_folders([Path(each) for each in arguments])
    sys.stdout.writelines(f"{offence}\n" for offence in offences)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
