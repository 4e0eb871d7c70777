"""Memory and calls: `MemoryPlan` to one `RunList` for each slot.

`bind` takes memory (`arena`) and says where every operand lies; `lower` has the streams compile plans (`listing`: what
their groups read and write) and puts calls, copies and waits (`hazards`) into the list (`run_list`), where a run may be
one call (`launch`). Calls of an earlier program are used again (`reuse`). Out goes what a run does, ready to be made.
"""
