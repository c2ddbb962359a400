"""Which external programs a Python file calls, read from its source without running it.

Follows a command line back through names, helpers and wrappers inside one file; what cannot be
followed is reported as UNKNOWN, so that nothing slips through unseen.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

UNKNOWN = "?"
STARTERS = {"run", "Popen", "call", "check_call", "check_output", "execv", "execvp", "which"}
"""Functions of subprocess, os and shutil whose first argument is a program or a command line."""

MODULES = {"subprocess", "os", "shutil"}
DEPTH = 12
"""Names that refer to each other in a circle end here."""


def programs(path: Path) -> set[str]:
    """The programs that `path` calls, also in Python that it holds as text."""
    return calls(path.read_text(encoding="utf-8"))


def calls(source: str) -> set[str]:
    tree = ast.parse(source)
    scopes = [_Scope(tree, tree)]
    scopes += [_Scope(node, tree) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {program for scope in scopes for program in scope.found()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= _inside_text(node.value)
    return found


def _inside_text(text: str) -> set[str]:
    if "subprocess" not in text or "import" not in text:
        return set()
    try:
        return calls(text)
    except SyntaxError:  # a sentence, or a template with gaps
        return set()


class _Scope:
    """One function (or the file's top level): its names, and what its command lines begin with."""

    def __init__(self, home: ast.Module | ast.FunctionDef, tree: ast.Module) -> None:
        self.home, self.tree = home, tree
        self.values: dict[str, list[ast.expr]] = {}
        """Name -> everything that is ever assigned to it here."""

        self.elements: dict[str, list[ast.expr]] = {}
        """Name -> everything that it runs over in a loop."""

        for node in _own(home):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                # `for key, value in table.items()` is about the values.
                targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
                if isinstance(targets[-1], ast.Name):
                    self.elements.setdefault(targets[-1].id, []).append(node.iter)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its)

    def found(self) -> set[str]:
        lines = [_command_line(node) for node in _own(self.home) if isinstance(node, ast.Call)]
        return self._union(lines, DEPTH)

    def line(self, node: ast.expr, depth: int) -> set[str]:
        """Programs of a command line: its head, and what a wrapper such as `ip netns exec` runs."""
        if depth <= 0:
            return {UNKNOWN}
        match node:
            case ast.List(elts=words) | ast.Tuple(elts=words):
                return self._words(words, depth - 1)
            case ast.BinOp(op=ast.Add()):
                return self.line(node.left, depth - 1)
            case ast.Call(func=ast.Attribute(attr="command"), args=[_, inner]):
                return {"ip"} | self.line(inner, depth - 1)  # a tunnel's: inside one of its hosts
            case ast.Call(func=ast.Name(id=name)) if name in self._functions():
                function = self._functions()[name]
                returned = [n.value for n in _own(function) if isinstance(n, ast.Return)]
                return _Scope(function, self.tree)._union(returned, depth)
            case ast.Starred(value=inner):
                return self.line(inner, depth - 1)
        return self.word(node, depth)

    def _words(self, words: Sequence[ast.expr], depth: int) -> set[str]:
        if not words:
            return set()
        texts = [w.value if isinstance(w, ast.Constant) else None for w in words]
        wrapped: Sequence[ast.expr] = ()
        if texts[1:3] == ["netns", "exec"]:
            wrapped = words[4:]
        elif texts[0] == "unshare":
            plain = [w for w, t in zip(words, texts, strict=True) if not str(t).startswith("-")]
            wrapped = plain[1:]
        inner = self.line(ast.List(elts=list(wrapped)), depth) if wrapped else set()
        return self.line(words[0], depth) | inner

    def word(self, node: ast.expr, depth: int) -> set[str]:
        """Programs that one word may name."""
        match node:
            case ast.Constant(value=str() as text):
                return {Path(text).name}
            case ast.Constant():  # None, beside a program that was looked for
                return set()
            case ast.Attribute(value=ast.Name(id="sys"), attr="executable"):
                return {"python"}
            case ast.Name(id=name):
                return self._named(name, depth)
            case ast.BoolOp(values=choices):
                return self._union(choices, depth)
            case ast.IfExp():
                return self._union([node.body, node.orelse], depth)
            case ast.BinOp(op=ast.Div(), right=right):  # folder / "program"
                return self.word(right, depth - 1)
            case ast.Call(func=ast.Attribute(attr="which" | "with_name"), args=[inner, *_]):
                return self.word(inner, depth - 1)
            case ast.Call(func=ast.Name(id="str" | "Path" | "tuple" | "list"), args=[inner]):
                return self.line(inner, depth - 1)
        return {UNKNOWN}

    def _named(self, name: str, depth: int) -> set[str]:
        if depth <= 0:
            return {UNKNOWN}
        found = [self._union(self.values.get(name, []), depth)] if name in self.values else []
        found += [self._each(iterated, depth - 1) for iterated in self.elements.get(name, [])]
        if found:
            return set().union(*found)
        if isinstance(self.home, ast.Module):
            return {UNKNOWN}
        every = [a.arg for a in self.home.args.args]
        every += [self.home.args.vararg.arg] if self.home.args.vararg else []
        if name not in every:
            return _Scope(self.tree, self.tree)._named(name, depth - 1)
        given = list(self._given(self.home, every.index(name)))
        passed = [scope.line(value, depth - 1) for scope, value in given]
        return set().union(*passed) if passed else {UNKNOWN}

    def _each(self, node: ast.expr, depth: int) -> set[str]:
        """Programs that the elements of a literal name, each a word or a command line."""
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Dict(values=elements):
                return self._union(elements, depth)
            case ast.Call(func=ast.Attribute(value=table, attr="items" | "values")):
                return self._each(table, depth)
            case ast.Name(id=name) if depth > 0:
                top = self if name in self.values else _Scope(self.tree, self.tree)
                if name in top.values:
                    return set().union(*(top._each(v, depth - 1) for v in top.values[name]))
        return {UNKNOWN}

    def _given(self, function: ast.FunctionDef, place: int) -> Iterator[tuple["_Scope", ast.expr]]:
        """What calls in this file pass for a parameter; all the rest for one with a star."""
        is_star = place == len(function.args.args)
        is_method = bool(function.args.args) and function.args.args[0].arg == "self"
        for home in ast.walk(self.tree):
            if not isinstance(home, ast.Module | ast.FunctionDef):
                continue
            for node in _own(home):
                match node:
                    case ast.Call(func=ast.Name(id=name)) if not is_method:
                        rest = node.args[place:]
                    case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                        rest = node.args[place - 1 :] if is_method else []
                    case _:
                        continue
                if name == function.name and rest:
                    passed = ast.List(elts=rest) if is_star else rest[0]
                    yield _Scope(home, self.tree), passed

    def _functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def _union(self, nodes: Sequence[ast.expr | None], depth: int) -> set[str]:
        return set().union(*(self.line(node, depth - 1) for node in nodes if node is not None))


def _own(home: ast.Module | ast.FunctionDef) -> Iterator[ast.AST]:
    """Every node of a function or of the top level, without those of functions inside it."""
    waiting: list[ast.AST] = list(home.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)


def _command_line(node: ast.Call) -> ast.expr | None:
    """The argument of a call that holds a command line or a program's name."""
    match node.func:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            if module in MODULES and name in STARTERS and node.args:
                return node.args[0]
        case ast.Name(id="MemberCommand"):
            return next((k.value for k in node.keywords if k.arg == "argv"), None)
    return None
