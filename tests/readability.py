"""How dense code is: the counts that `test_readability.py` keeps from rising.

`python tests/readability.py` prints them; with `--lower` it writes those that have
fallen to `readability.json`. They are evidence, and a reader is the judge: a rewrite
that lowers a count and is harder to read is a defect.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from radon.complexity import cc_visit

SOURCE = Path(__file__).parent.parent / "src" / "rfdlc"
BASELINE = Path(__file__).with_name("readability.json")

MOST_COMPLEX = 12
PRONOUNS = {"both", "each", "found", "given", "known", "more", "own", "told"}
SHORT_LIFE = 3  # lines that a pronoun may live
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TRUTH = (ast.Compare, ast.BoolOp)
TEXT = (ast.JoinedStr, ast.Constant)


def folders() -> dict[str, list[Path]]:
    """The files of every folder that is measured, by its name."""
    named = {"rfdlc": sorted(SOURCE.glob("*.py"))}
    for folder in sorted(SOURCE.iterdir()):
        if folder.is_dir() and any(folder.rglob("*.py")):
            named[folder.name] = sorted(folder.rglob("*.py"))
    return named


def measured(files: list[Path]) -> dict[str, float]:
    """The counts of a folder: rates per 100 statements, and numbers."""
    total = Counter[str]()
    for file in files:
        total.update(counts(file.read_text(encoding="utf-8")))
    statements = max(1, total["statements"])
    assignments = max(1, total["assignments"])
    return {
        "nodes per statement": round(total["nodes"] / statements, 2),
        "conditional expressions": round(100 * total["conditional"] / statements, 2),
        "comprehensions": round(100 * total["comprehensions"] / statements, 2),
        "packed assignments": round(100 * total["packed"] / assignments, 2),
        "conditional += and |=": total["augmented"],
        "multiplied by a truth value": total["multiplied"],
        "packed arguments": total["arguments"],
        "messages before their check": total["messages"],
        "pronouns": total["pronouns"],
        "complex functions": total["complex"],
    }


def counts(text: str) -> Counter[str]:
    """What one file adds to the counts of its folder.

    >>> counts("x += [1] if y else []")["augmented"]
    1
    """
    tree = ast.parse(text)
    total = Counter[str]()
    for node in ast.walk(tree):
        total["nodes"] += 1
        total["statements"] += isinstance(node, ast.stmt)
        total["conditional"] += isinstance(node, ast.IfExp)
        total["comprehensions"] += isinstance(node, COMPREHENSIONS)
        total["multiplied"] += is_multiplied(node)
        if isinstance(node, ast.Assign):
            total["assignments"] += 1
            total["packed"] += is_packed(node)
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.IfExp):
            total["augmented"] += 1
        if isinstance(node, FUNCTIONS):
            total["arguments"] += packed_arguments(node)
            total["messages"] += early_messages(node)
            total["pronouns"] += long_pronouns(node)
    for block in cc_visit(text):
        if not hasattr(block, "methods"):  # a class is judged by its methods
            total["complex"] += block.complexity > MOST_COMPLEX
    return total


def is_packed(node: ast.Assign) -> bool:
    """Whether several values are assigned side by side; a swap is none.

    >>> [is_packed(s) for s in ast.parse("a, b = f(x), g(y); a, b = b, a").body]
    [True, False]
    """
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    left = sorted(ast.unparse(element) for element in target.elts)
    right = sorted(ast.unparse(element) for element in node.value.elts)
    return left != right


def is_multiplied(node: ast.AST) -> bool:
    """Whether a text or a list is multiplied by whether something holds.

    >>> is_multiplied(ast.parse("[line] * (n > 1)", mode="eval").body)
    True
    """
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    left, right = node.left, node.right
    if isinstance(right, ast.List | ast.JoinedStr) or is_text(right):
        left, right = right, left
    if not (isinstance(left, ast.List | ast.JoinedStr) or is_text(left)):
        return False
    is_bool = isinstance(right, ast.Call) and ast.unparse(right.func) == "bool"
    is_not = isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.Not)
    return is_bool or is_not or isinstance(right, TRUTH)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside of it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.Lambda)):
            yield from inside(child)


def packed_arguments(function: ast.AST) -> int:
    """How many calls spread a tuple that was packed for them.

    >>> packed_arguments(ast.parse("def f(x):\\n given = x, 1\\n g(*given)").body[0])
    1
    """
    packed = {
        node.targets[0].id
        for node in inside(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Tuple)
    }
    calls = [node for node in inside(function) if isinstance(node, ast.Call)]
    spread = [
        argument.value.id
        for call in calls
        for argument in call.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)
    ]
    return sum(name in packed for name in spread)


def early_messages(function: ast.AST) -> int:
    """How many messages have a name before the check that may raise them."""
    named = {
        node.targets[0].id
        for node in inside(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, TEXT)
    }
    raised = set[str]()
    for node in inside(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("expect", "Error", "BrokenRows")
        ):
            raised |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return len(named & raised)


def long_pronouns(function: ast.AST) -> int:
    """How many pronouns are the names of what lives longer than three lines."""
    first, last = dict[str, int](), dict[str, int]()
    for node in inside(function):
        if isinstance(node, ast.Name | ast.arg):
            name = node.id if isinstance(node, ast.Name) else node.arg
            first[name] = min(first.get(name, node.lineno), node.lineno)
            last[name] = max(last.get(name, node.lineno), node.lineno)
    return sum(last[name] - first[name] > SHORT_LIFE for name in PRONOUNS & set(first))


def main() -> None:
    now = {name: measured(files) for name, files in folders().items()}
    if "--lower" in sys.argv:
        before = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
        for name, numbers in now.items():
            for count, value in numbers.items():
                allowed = before.get(name, {}).get(count, value)
                numbers[count] = min(value, allowed)
        BASELINE.write_text(json.dumps(now, indent=1) + "\n")
    print(json.dumps(now, indent=1))


if __name__ == "__main__":
    main()
