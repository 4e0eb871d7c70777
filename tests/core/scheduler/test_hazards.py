"""`find_waits`: with the waits that it finds, no queue touches bytes before others are done with them.

The judge knows nothing of how they are found: it plays many runs through, keeps for every queue what it can be sure of
(vector clocks), and remembers every access.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from opweave.scheduler.compile.hazards import HOST_QUEUE, Access, Act, Need, find_waits

QUEUES = 3
accesses = st.builds(
    lambda memory, start, size, write: Access(memory, start, start + size, write),
    st.sampled_from(["a", "b"]),
    st.integers(0, 12),
    st.integers(1, 8),
    st.booleans(),
)
acts = st.builds(Act, st.sampled_from([0, 1, 2, HOST_QUEUE]), st.lists(accesses, max_size=3))
lists = st.lists(acts, min_size=1, max_size=8)


def races(slots: list[list[Act]], waits: list[list[list[Need]]], runs: int) -> list[str]:
    """Conflicting accesses that nothing orders, over so many runs."""
    clocks = {queue: dict.fromkeys([*range(QUEUES), HOST_QUEUE], 0) for queue in [*range(QUEUES), HOST_QUEUE]}
    marks: dict[tuple[int, int], dict[int, int]] = {}
    done: list[tuple[int, int, Access]] = []
    found = []
    for run in range(runs):
        slot = run % len(slots)
        for index, act in enumerate(slots[slot]):
            clock = clocks[act.queue]
            if act.queue != HOST_QUEUE:
                for queue, at in clocks[HOST_QUEUE].items():
                    clock[queue] = max(clock[queue], at)
            for need in waits[slot][index]:
                assert slots[need.slot][need.act].queue != act.queue, "a queue need not wait for itself"
                for queue, at in marks.get((need.slot, need.act), {}).items():
                    clock[queue] = max(clock[queue], at)
            clock[act.queue] += 1
            for access in act.accesses:
                for queue, at, other in done:
                    conflict = (
                        other.memory == access.memory
                        and other.start < access.end
                        and access.start < other.end
                        and (other.write or access.write)
                    )
                    if conflict and queue != act.queue and at > clock[queue]:
                        found.append(f"run {run}, act {index}: {access} against {other} of queue {queue}")
            done += [(act.queue, clock[act.queue], access) for access in act.accesses]
            marks[slot, index] = dict(clock)
    return found


@given(st.lists(lists, min_size=1, max_size=3), st.integers(3, 6))
@settings(max_examples=400, deadline=None)
def test_nothing_races_in_any_number_of_overlapping_runs(slots, runs):
    assert races(slots, find_waits(slots, QUEUES), runs) == []


@given(lists)
@settings(max_examples=200, deadline=None)
def test_nothing_races_in_one_run(acts):
    waits = find_waits([acts], QUEUES, overlapping=False)
    assert races([acts], waits, 1) == []


def test_what_is_ordered_already_is_not_waited_for():
    x = Access("a", 0, 8, True)
    chain = [Act(0, [x]), Act(1, [x]), Act(1, [x]), Act(2, [x]), Act(0, [x])]
    assert find_waits([chain], QUEUES, overlapping=False) == [[[], [Need(0, 0)], [], [Need(0, 2)], [Need(0, 3)]]]


def test_what_the_host_has_seen_done_is_not_waited_for():
    x = Access("a", 0, 8, True)
    acts = [Act(0, [x]), Act(HOST_QUEUE, [x]), Act(1, [x])]
    assert find_waits([acts], QUEUES, overlapping=False) == [[[], [Need(0, 0)], []]]


def test_readers_do_not_wait_for_each_other():
    w, r = Access("a", 0, 8, True), Access("a", 0, 8, False)
    acts = [Act(0, [w]), Act(1, [r]), Act(2, [r]), Act(0, [w])]
    found = find_waits([acts], QUEUES, overlapping=False)[0]
    assert found[1] == [Need(0, 0)]
    assert found[2] == [Need(0, 0)]
    assert sorted(found[3]) == [Need(0, 1), Need(0, 2)]


def test_the_next_run_waits_for_the_readers_of_the_last_one():
    w, r = Access("a", 0, 8, True), Access("a", 0, 8, False)
    acts = [Act(0, [w]), Act(1, [r])]
    assert find_waits([acts], QUEUES) == [[[Need(0, 1)], [Need(0, 0)]]]


def test_slots_with_memory_of_their_own_wait_for_their_own_last_run_only():
    def slot(memory):
        return [Act(0, [Access(memory, 0, 8, True)]), Act(1, [Access(memory, 0, 8, False)])]

    assert find_waits([slot("a"), slot("b")], QUEUES) == [
        [[Need(0, 1)], [Need(0, 0)]],
        [[Need(1, 1)], [Need(1, 0)]],
    ]
