"""Draw the architecture picture from the real imports of the packages.

python docs/site/picture.py     writes docs/images/architecture.svg (`make picture`)

A box is a package. A package is drawn above every package that it imports. An arrow is left out if a longer
path of arrows leads to the same package. A box is orange if a module of the package imports torch.
"""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
# Not in the picture: a test suite for plugin authors.
LEFT_OUT = {"testing"}
PURPOSES = {
    "block_store": "KV blocks in a store",
    "checkpoint": "weights and configs on disk",
    "cli": "the mmengine command",
    "core": "decide, fold, snapshots",
    "encoder_cache": "embeddings of media",
    "events": "event types, codec, log files",
    "fleet": "replicas on Ray",
    "gpu": "Triton kernels",
    "hubs": "downloads of checkpoints",
    "models": "networks, plugin port",
    "native": "C++ kernels",
    "plugins": "model families",
    "processing": "chats, tokenizers, media",
    "replay": "verify, why, diff, minimize",
    "runtime": "executor, KV, sampling",
    "serve": "Engine, AsyncEngine, batch",
    "server": "HTTP API",
    "simulation": "the core without a model",
    "spec_decode": "drafters",
    "structured_output": "schemas and grammars",
}
WIDTH, HEIGHT, GAP, RISE = 168, 46, 14, 44
Graph = dict[str, set[str]]


def package_of(parts: tuple[str, ...]) -> str:
    """Return the node of a dotted name: a package, or a module that lies directly in `mmengine`."""
    if parts[0].startswith("mmengine_"):
        return "plugins"
    return parts[1] if parts[0] == "mmengine" and len(parts) > 1 else ""


def imported(tree: ast.AST) -> set[tuple[str, ...]]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {tuple(each.name.split(".")) for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {(*node.module.split("."), each.name) for each in node.names}
    return names


def read_imports() -> tuple[Graph, set[str]]:
    """Return the imports of each package and top-level module, and the packages that import torch."""
    graph: Graph = defaultdict(set)
    with_torch = set()
    for path in sorted([*ROOT.glob("mmengine/**/*.py"), *ROOT.glob("plugins/*/**/*.py")]):
        relative = path.relative_to(ROOT / "plugins" if path.is_relative_to(ROOT / "plugins") else ROOT)
        node = package_of(relative.with_suffix("").parts)
        if not node or node in LEFT_OUT:
            continue
        for parts in imported(ast.parse(path.read_text("utf-8"))):
            target = package_of(parts) if parts[0] == "mmengine" else ""
            graph[node] |= {target} - {"", node} - LEFT_OUT
            if parts[0] == "torch":
                with_torch.add(node)
    return dict(graph), with_torch


def packages_only(graph: Graph) -> Graph:
    """Replace each module that lies directly in `mmengine` by the packages that it imports."""
    packages = {path.parent.name for path in (ROOT / "mmengine").glob("*/__init__.py")} | {"plugins"}
    packages -= LEFT_OUT

    def targets(node: str, seen: frozenset[str]) -> set[str]:
        found = set()
        for each in graph.get(node, set()) - seen:
            found |= {each} if each in packages else targets(each, seen | {each})
        return found

    return {node: targets(node, frozenset({node})) - {node} for node in packages}


def reachable(graph: Graph, node: str) -> set[str]:
    found: set[str] = set()
    waiting = [node]
    while waiting:
        for each in graph[waiting.pop()] - found:
            found.add(each)
            waiting.append(each)
    return found


def levels(graph: Graph) -> list[list[str]]:
    """Group the packages by the length of the longest path of imports that leads to them."""
    importers = {node: {each for each in graph if node in graph[each]} for node in graph}
    depth: dict[str, int] = {}

    def of(node: str, path: tuple[str, ...] = ()) -> int:
        if node in path:
            raise SystemExit(f"the packages import each other: {' -> '.join((*path, node))}")
        if node not in depth:
            depth[node] = max((of(each, (*path, node)) + 1 for each in importers[node]), default=0)
        return depth[node]

    rows: dict[int, list[str]] = defaultdict(list)
    for node in sorted(graph):
        rows[of(node)].append(node)
    return [rows[level] for level in sorted(rows)]


def reduced(graph: Graph) -> Graph:
    """Return the graph without the edges that a longer path replaces."""
    below = {node: reachable(graph, node) for node in graph}
    return {
        node: {each for each in targets if not any(each in below[other] for other in targets - {each})}
        for node, targets in graph.items()
    }


def draw() -> str:
    graph, with_torch = read_imports()
    packages = packages_only(graph)
    rows = levels(packages)
    edges = reduced(packages)
    most = max(map(len, rows))
    width = most * (WIDTH + GAP) + GAP
    height = len(rows) * (HEIGHT + RISE) + RISE / 2
    places: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        above = lambda node: [places[each][0] for each in places if node in edges[each]]  # noqa: E731
        row = sorted(row, key=lambda node: (sum(above(node)) / len(above(node)) if above(node) else 0, node))
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        for index, node in enumerate(row):
            places[node] = (left + index * (WIDTH + GAP), RISE / 2 + level * (HEIGHT + RISE))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Packages of mmengine and their imports</title>",
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
    ]
    for node in sorted(edges):
        x, y = places[node][0] + WIDTH / 2, places[node][1] + HEIGHT
        for target in sorted(edges[node]):
            to_x, to_y = places[target][0] + WIDTH / 2, places[target][1] - 2
            bend = (to_y - y) / 2
            lines.append(
                f'<path d="M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}" '
                'fill="none" stroke="#99a" marker-end="url(#tip)"/>'
            )
    for node, (x, y) in sorted(places.items()):
        fill, stroke = ("#fde9d3", "#c77d2e") if node in with_torch else ("#dcebfa", "#3a78b5")
        name = "plugins/*" if node == "plugins" else f"{node}/"
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="{fill}" stroke="{stroke}"/>',
            f'<text x="{x + WIDTH / 2:g}" y="{y + 19:g}" text-anchor="middle" '
            f'font-weight="bold">{name}</text>',
            f'<text x="{x + WIDTH / 2:g}" y="{y + 36:g}" text-anchor="middle" font-size="11" fill="#334">'
            f"{PURPOSES.get(node, '')}</text>",
        ]
    lines.append(
        f'<text x="{GAP}" y="{height - 12:g}" font-size="11" fill="#334">An arrow: imports. '
        "Orange: imports torch. Arrows that follow from others are left out.</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
