"""Running programs: a `RunList` and what is fed, to what is fetched.

`executor` has the one loop that makes calls, and owns all that changes while programs run, together with `runs`: the
runs that have not ended. `failures` finds the node and the states that a failing call concerns; `trace` shows runs to
tools, `observers` values to observers.
"""
