"""A graph in DOT, the language of Graphviz."""

from __future__ import annotations

from collections.abc import Sequence

from opweave.graph.tensor import Tensor

__all__ = ["dot"]


def dot(order: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """The graph as text in DOT; `opweave.Graph.to_dot` says what it shows.

    Args:
        order: all tensors of the graph, sources first.
        outputs: those of them that are outputs.
    """
    numbers = {tensor: i for i, tensor in enumerate(order)}
    scopes: dict[str, list[Tensor]] = {}
    for tensor in order:
        scopes.setdefault(tensor.scope, []).append(tensor)
    parts = [scope.split("/") for scope in scopes if scope]
    paths = sorted({"/".join(names[:n]) for names in parts for n in range(1, len(names) + 1)})

    def cluster(scope: str, indent: str) -> list[str]:
        lines = [f"{indent}t{numbers[tensor]} {_node(tensor)};" for tensor in scopes.get(scope, ())]
        for path in paths:
            outer, _, own = path.rpartition("/")
            if outer == scope:
                inside = cluster(path, indent + "  ")
                label = f"{indent}  label={_quoted(own)};"
                lines += [f"{indent}subgraph {_quoted('cluster ' + path)} {{", label, *inside, f"{indent}}}"]
        return lines

    lines = ["digraph {", '  node [shape=box fontname="sans-serif"];', *cluster("", "  ")]
    lines += [f"  t{numbers[source]} -> t{i};" for tensor, i in numbers.items() for source in tensor.srcs]
    for i, output in enumerate(outputs):
        lines += [f"  o{i} [shape=plaintext label={_quoted(f'output {i}')}];", f"  t{numbers[output]} -> o{i};"]
    return "\n".join([*lines, "}", ""])


def _node(tensor: Tensor) -> str:
    kind = tensor.op.name if tensor.op is not None else tensor.leaf.kind if tensor.leaf is not None else ""
    own = tensor.name.removeprefix(f"{tensor.scope}/")
    label = f"{kind if own == kind else f'{kind} {own}'}\n{tensor.dtype}{list(tensor.shape)}"
    return f"[label={_quoted(label)}{'' if tensor.op is not None else ' shape=oval'}]"


def _quoted(text: str) -> str:
    """A text as a quoted string of DOT; a new line is the escape ``\\n`` of labels."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
