"""On which device each node runs, and why: `AnnotatedGraph` to `Assignment`.

In comes a graph with what its caller decided (`annotated_graph`: pins, placed memory, weights in shards) and the
devices with their streams (`target`). `assign` decides by rules: what memory that was placed asks for (`memory`), what
devices say of a signature (`support`) and so of nodes (`capabilities`), which nodes may be computed less than exactly
(`precision`); or a plugin's `strategy`, which may predict (`prediction`). Out goes a target and a cause for every node.
`arguments` checks what callers give to a scheduler.
"""
