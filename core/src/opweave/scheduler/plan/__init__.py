"""What runs in which order, what is copied, and where values lie: `Assignment` to `MemoryPlan`.

`partition` cuts the graph into splits (`splits`) with copies between devices over numbered storages (`storages`), and
exchanges between several devices (`collectives`); `fuse` asks streams which steps run as one call; `allocate` packs
what lives at the same time into chunks (`chunks`). No memory is taken here: out go the splits, their groups, and chunk
and offset of every storage.
"""
