"""Memory and calls: `MemoryPlan` to one `RunList` for each slot.

`bind` takes memory (`arena`) and says where every operand lies; `lower` has the streams compile plans and puts calls,
copies and waits (`hazards`) into the list (`run_list`), with inputs that are read where they are fed (`feeds`), runs
that are one call (`launch`) and the calling thread's share (`caller_runs`). What an earlier program has is used again:
its calls (`reuse`), or its structure in another size (`template`). Out goes what a run does, ready to be made.
"""
