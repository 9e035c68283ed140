"""What the code says of its limits: read from its syntax trees, nothing is imported.

A constant is a limit by its name (LIMIT). What is said when it is reached is the text that it stands in, the
one behind a condition that it stands in, or what a function says of it that it is passed to.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "mmengine",
    "plugins/mmengine_llama",
    "plugins/mmengine_qwen3_5",
    "plugins/mmengine_qwen3_vl",
    "plugins/mmengine_smolvlm",
    "plugins/mmengine_xgrammar",
)
LIMIT = re.compile(r"MAX_[A-Z_]+|(?:[A-Z_]+_)?LIMIT(?:_S)?|[A-Z_]+_TIMEOUT_S")
LEAST_WORDS = 4  # of what counts as a message
DEPTH = 3  # functions that a limit is passed through
Numbers = dict[str, int | float]


@dataclass(frozen=True, eq=False)
class Module:
    path: Path  # below the root
    name: str
    tree: ast.Module
    lines: list[str]
    parents: dict[ast.AST, ast.AST]
    numbers: Numbers  # what its constants are, and those that it imports
    imported: set[tuple[str, str]]  # (module, name)
    uses: dict[str, list[ast.AST]]  # of names and attributes, by what they are called
    functions: list[ast.FunctionDef]
    texts: list[ast.AST]


@dataclass(frozen=True)
class Constant:
    module: Module
    name: str
    value: int | float
    comment: str


class Sources:
    def __init__(self, root: Path):
        found = {}
        for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
            module = _module(path.relative_to(root), path.read_text())
            found[module.name] = module
        self.modules = list(found.values())
        for module in self.modules * 2:  # twice: a constant may be made of one that is read later
            _fill_numbers(module, found)
        self._texts = [
            text for module in self.modules if module.name != "mmengine.config" for text in _texts(module)
        ]
        self._functions: dict[str, list[tuple[Module, ast.FunctionDef]]] = {}
        for module in self.modules:
            for node in module.functions:
                self._functions.setdefault(node.name, []).append((module, node))

    def limits(self) -> Iterator[Constant]:
        for module in self.modules:
            for name, _, line in _assigned(module.tree):
                if LIMIT.fullmatch(name) and name in module.numbers:
                    yield Constant(module, name, module.numbers[name], comment(module.lines, line))

    def said_of_constant(self, limit: Constant) -> list[str]:
        said: list[str] = []
        for module in self.modules:
            if module is limit.module or (limit.module.name, limit.name) in module.imported:
                said += self._said(module, module.uses.get(limit.name, []), module.numbers, DEPTH)
        return list(dict.fromkeys(said))

    def said_of_setting(self, name: str) -> list[str]:
        """Where it is read as an attribute, and the texts that have its name in them; but for what is said of
        settings that contradict each other (mmengine.config)."""
        word = re.compile(rf"(?<![\w.-]){name}(?![\w=])")
        said: list[str] = []
        for module in self.modules:
            if module.name != "mmengine.config":
                uses = [node for node in module.uses.get(name, []) if isinstance(node, ast.Attribute)]
                said += self._said(module, uses, module.numbers, 0)
        said += [text for text in self._texts if word.search(text)]
        each = list(dict.fromkeys(said))
        return [text for text in each if not any(text != other and text in other for other in each)]

    def _said(self, module: Module, uses: list[ast.AST], numbers: Numbers, depth: int) -> list[str]:
        said: list[str] = []
        for node in uses:
            below, above = node, module.parents.get(node)
            while above is not None and not isinstance(above, (ast.JoinedStr, ast.If, ast.stmt)):
                if isinstance(above, ast.Call) and below is node and depth:
                    said += self._said_by(module, above, node, numbers, depth - 1)
                below, above = above, module.parents.get(above)
            if isinstance(above, ast.JoinedStr):
                said.append(text_of(above, numbers))
            elif isinstance(above, ast.If) and below is above.test:
                said += _first_text(above.body, numbers)
        return [text for text in said if _is_message(text)]

    def _said_by(
        self, module: Module, call: ast.Call, argument: ast.AST, numbers: Numbers, depth: int
    ) -> list[str]:
        """What the function says of the argument that it is called with."""
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        found = self._functions.get(name, [])
        home = [each for each in found if each[0] is module] or found
        if len(home) != 1 or argument not in call.args:
            return []
        where, function = home[0]
        names = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
        place = call.args.index(argument)
        value = _number(argument, numbers)
        if place >= len(names) or value is None:
            return []
        inside = set(ast.walk(function))
        uses = [node for node in where.uses.get(names[place], []) if node in inside]
        return self._said(where, uses, where.numbers | {names[place]: value}, depth)


def comment(lines: list[str], line: int) -> str:
    """Behind a line, or in the lines above it."""
    _, found, text = lines[line - 1].partition("  # ")
    above = line - 1
    while not found and above > 0 and lines[above - 1].strip().startswith("# "):
        above -= 1
        text = f"{lines[above].strip()[2:]} {text}".strip()
    return text


def text_of(node: ast.AST, numbers: Numbers) -> str:
    """A message with its limits filled in, and "…" for the rest; empty for what is no text."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return re.sub(r"…+", "…", "".join(text_of(part, numbers) for part in parts))
        case ast.FormattedValue(value=value, format_spec=spec):
            number = _number(value, numbers)
            return "…" if number is None else format(number, "" if spec is None else text_of(spec, numbers))
    return ""


def _module(path: Path, text: str) -> Module:
    tree = ast.parse(text)
    name = ".".join(path.with_suffix("").parts).removeprefix("plugins.")
    module = Module(path, name, tree, text.splitlines(), {}, {}, set(), {}, [], [])
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        for child in _children(node):
            module.parents[child] = node
            waiting.append(child)
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                module.uses.setdefault(name, []).append(node)
            case ast.ImportFrom(module=str() as source, names=names):
                module.imported.update((source, each.name) for each in names)
            case ast.FunctionDef():
                module.functions.append(node)
            case ast.JoinedStr() | ast.Constant(value=str()):
                module.texts.append(node)
    for found in (*module.uses.values(), module.texts):
        found.sort(key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
    return module


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """But for contexts (Load, Store), which are half of all nodes, and shared."""
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            yield from (each for each in value if isinstance(each, ast.AST))
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            yield value


def _fill_numbers(module: Module, of: dict[str, Module]) -> None:
    for name, what in module.imported:
        if name in of and what in of[name].numbers:
            module.numbers[what] = of[name].numbers[what]
    for name, value, _ in _assigned(module.tree):
        number = _number(value, module.numbers)
        if number is not None:
            module.numbers[name] = number


def _texts(module: Module) -> Iterator[str]:
    """What is raised, given back or yielded as a sentence."""
    for node in module.texts:
        if not _is_message(text_of(node, module.numbers)):
            continue
        above = module.parents.get(node)
        while above is not None and not isinstance(above, ast.stmt):
            above = module.parents.get(above)
        is_yield = isinstance(above, ast.Expr) and isinstance(above.value, ast.Yield)
        if isinstance(above, (ast.Raise, ast.Return)) or is_yield:
            yield text_of(node, module.numbers)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value, node.lineno


def _number(node: ast.AST, numbers: Numbers) -> int | float | None:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return numbers.get(name)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _number(left, numbers), _number(right, numbers)
            by = {ast.Mult: "__mul__", ast.Pow: "__pow__", ast.Sub: "__sub__", ast.FloorDiv: "__floordiv__"}
            if a is not None and b is not None and type(op) in by:
                result: int | float = getattr(a, by[type(op)])(b)
                return result
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_message(text: str) -> bool:
    return len(text.split()) >= LEAST_WORDS and "\n" not in text


def _first_text(body: list[ast.stmt], numbers: Numbers) -> list[str]:
    """What is raised, refused or given as a reason behind a condition."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if _is_text(node) and _is_message(text_of(node, numbers)):
            return [text_of(node, numbers)]
    return []
