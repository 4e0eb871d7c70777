"""The finished classes behind the contract, which authors of backends need not read.

`device`, `stream`, `memory` and `buffer` have the public methods over an author's hooks, with their checks (`checks`);
`submission` counts what a stream was given, and has its events; `plan` is what it compiles, `worker` lets a thread do
its work. `reclaim` waits for the work that may use memory and frees memory after it, `changes` says what makes programs
outdated, `transfers` copies between any two buffers. `fusion`, `listing`, `functional` and `offload` serve streams that
compile. `host` is the memory of this process, and the device that runs references in it.
"""
