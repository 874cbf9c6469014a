"""Recurrent states: where snapshots are kept, and where a prompt that finds one begins. No torch.

`test_engine_state_machine.py` has them under random requests, with their content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from block_helpers import BLOCK, check_states, new_tokens, one_group, sequence
from engine_helpers import Bench, prompt_of

from nanovllm.data.batch import StateMove
from nanovllm.engine import branch_points
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Sequence
from nanovllm.features.recurrent.snapshots import planned_snapshots
from nanovllm.features.recurrent.states import RecurrentStates


def manager_of(device: int = 4, host: int = 0) -> BlockManager:
    manager = BlockManager(60, 0, one_group(BLOCK))
    manager.hooks.append(RecurrentStates(manager, device, host))
    return manager


def states_of(manager: BlockManager) -> RecurrentStates:
    (states,) = manager.hooks
    assert isinstance(states, RecurrentStates)
    return states


def compute(manager: BlockManager, seq: Sequence) -> list[int]:
    """Compute all tokens of a sequence, chunk by chunk. Returns where the chunks began."""
    begins = []
    while seq.num_remaining:
        begins.append(seq.num_computed)
        states_of(manager).own(seq)
        seq.num_computed += states_of(manager).limit(seq, seq.num_remaining)
        manager.register_computed(seq, begins[-1])
        states_of(manager).computed(seq, begins[-1], ())
    return begins


def answered(manager: BlockManager, prompt: list[int], output: list[int], live: Iterable[Sequence] = ()) -> list[int]:
    """Compute a prompt and decode its output, then free both. Returns where the prompt's chunks began.

    live: the sequences that stay.
    """
    seq = sequence(prompt)
    manager.allocate(seq)
    begins = compute(manager, seq)
    for token in output:
        seq.token_ids.append(token)
        manager.grow([seq])
        compute(manager, seq)
    manager.free(seq)
    check_states(manager, live)
    return begins


def test_the_next_turn_begins_at_the_last_hash_block_of_the_answer(fresh: Iterator[int]) -> None:
    manager = manager_of()
    prompt = new_tokens(fresh, 5, extra=2)
    answer = new_tokens(fresh, 3)
    assert answered(manager, prompt, answer) == [0, 5 * BLOCK]
    following = [*prompt, *answer, *new_tokens(fresh, 2)]
    assert answered(manager, following, [])[0] == (len(prompt) + len(answer)) // BLOCK * BLOCK


def test_an_answer_that_is_computed_again_keeps_its_last_state(fresh: Iterator[int]) -> None:
    """After a preemption, when the prefix cache has lost what it had of it."""
    manager = manager_of()
    seq = sequence(new_tokens(fresh, 2, extra=1))
    manager.allocate(seq)
    compute(manager, seq)
    for token in new_tokens(fresh, 1, extra=1):
        seq.token_ids.append(token)
        manager.grow([seq])
        compute(manager, seq)
    for _ in range(2):
        assert manager.num_cached_tokens(seq) == 3 * BLOCK
        manager.free(seq)
        manager.reset_prefix_cache()
        manager.allocate(seq)
        assert compute(manager, seq) == [0, 3 * BLOCK]
    manager.free(seq)
    check_states(manager, [])


def test_a_prompt_asked_again_begins_at_its_last_whole_hash_block(fresh: Iterator[int]) -> None:
    manager = manager_of()
    prompt = new_tokens(fresh, 5)
    assert answered(manager, prompt, []) == [0, 4 * BLOCK], "the last token is computed to sample from it"
    assert answered(manager, prompt, []) == [4 * BLOCK]


def test_a_prefix_seen_twice_is_kept_where_the_prompts_part(fresh: Iterator[int]) -> None:
    manager = manager_of(device=8)
    shared = new_tokens(fresh, 6)
    prompts = [[*shared, *new_tokens(fresh, 4)] for _ in range(3)]
    assert answered(manager, prompts[0], [])[0] == 0
    assert answered(manager, prompts[1], [])[:2] == [0, 6 * BLOCK]
    assert answered(manager, prompts[2], [])[0] == 6 * BLOCK


def test_the_oldest_snapshot_leaves_for_the_host_and_comes_back(fresh: Iterator[int]) -> None:
    manager = manager_of(device=2, host=1)
    prompts = [new_tokens(fresh, 2, extra=1) for _ in range(3)]
    for prompt in prompts:
        answered(manager, prompt, [])
    states = states_of(manager)
    states.slots.take_moves()
    assert len(states.slots.snapshots) == 2, "one slot is of the running sequence"
    seq = sequence(prompts[1])
    manager.allocate(seq)
    state = states.of(seq).state
    assert seq.num_computed == 2 * BLOCK and state is not None and state.slot == 2, "it is on the host"
    slot = states.own(seq)
    assert slot < 2 and states.slots.take_moves()[-1] == StateMove(2, slot)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_snapshot_on_the_grid_is_forgotten_before_those_of_older_prompts(
    fresh: Iterator[int], monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    """Unless a prompt has begun at it."""
    monkeypatch.setattr(branch_points, "LEAST_INTERVAL", 4 * BLOCK)
    manager = manager_of(device=6)
    old = new_tokens(fresh, 2, extra=1)
    long = new_tokens(fresh, 5, extra=1)
    assert answered(manager, old, []) == [0, 2 * BLOCK]
    assert answered(manager, long, []) == [0, 4 * BLOCK, 5 * BLOCK]
    if is_used:
        assert answered(manager, [*long[: 4 * BLOCK], *new_tokens(fresh, 0, extra=1)], [])[0] == 4 * BLOCK
    for _ in range(3):
        answered(manager, new_tokens(fresh, 1, extra=1), [])
    assert manager.num_cached_tokens(sequence([*long[: 4 * BLOCK], 0])) == (4 * BLOCK if is_used else 0)
    assert manager.num_cached_tokens(sequence(long)) == 5 * BLOCK
    assert (manager.num_cached_tokens(sequence([*old, 0])) == 2 * BLOCK) is not is_used, "it was the oldest"


def ended_late(manager: BlockManager, prompt: list[int], *meanwhile: list[int]) -> None:
    """Compute a prompt, then others, and only then free its blocks: its snapshots are older than theirs."""
    seq = sequence(prompt)
    manager.allocate(seq)
    compute(manager, seq)
    for other in meanwhile:
        answered(manager, other, [], live=[seq])
    manager.free(seq)


def found(manager: BlockManager, prompt: list[int]) -> int:
    """Blocks of a prompt that a longer one would begin with."""
    return manager.num_cached_tokens(sequence([*prompt, 0])) // BLOCK


def test_blocks_with_no_snapshot_behind_them_are_evicted_first(fresh: Iterator[int]) -> None:
    manager = manager_of(device=3)
    late = new_tokens(fresh, 20, extra=1)
    meanwhile = new_tokens(fresh, 20, extra=1)
    ended_late(manager, late, meanwhile)
    assert (found(manager, late), found(manager, meanwhile)) == (0, 20), "there was one slot left for a snapshot"
    manager.allocate(sequence(new_tokens(fresh, 40)))
    assert found(manager, meanwhile) == 20


def test_a_session_goes_on_while_blocks_of_no_use_are_evicted() -> None:
    """As the test before, on the model of KV content."""
    bench = Bench(16, states=(3, 0), block_size=16, max_num_seqs=2, budget=200)
    bench.add("late", prompt_of(81, seed=1))
    bench.step()
    bench.add("meanwhile", prompt_of(81, seed=2), max_tokens=1)
    bench.run()
    assert bench.order == ["meanwhile", "late"]
    bench.add("long", prompt_of(159, seed=3), max_tokens=1)
    bench.run()
    bench.add("again", [*prompt_of(81, seed=2), *bench.tokens("meanwhile"), 0])
    assert bench.run()["again"].num_cached_tokens == 80


def test_blocks_before_the_snapshot_of_a_branch_stay(fresh: Iterator[int]) -> None:
    manager = manager_of(device=4)
    shared = new_tokens(fresh, 10)
    branch = [*shared, *new_tokens(fresh, 8, extra=1)]
    ended_late(manager, [*shared, *new_tokens(fresh, 10, extra=1)], branch)
    assert found(manager, branch) == 18, "the snapshot of the other branch has left its slot"
    answered(manager, new_tokens(fresh, 41, extra=1), [])
    assert found(manager, branch) == 18


@pytest.mark.parametrize("times", [1, 2])
def test_blocks_with_a_snapshot_behind_them_again_are_kept(fresh: Iterator[int], times: int) -> None:
    """A prompt asked again is computed again, its blocks are still cached, and count as used now."""
    manager = manager_of(device=3)
    prompt = new_tokens(fresh, 15, extra=1)
    other = new_tokens(fresh, 15, extra=1)
    answered(manager, prompt, [])
    for _ in range(times):
        for tokens in (other, new_tokens(fresh, 1, extra=1)):
            answered(manager, tokens, [])
        assert found(manager, prompt) == 0, "there are two slots for snapshots"
        assert answered(manager, prompt, [])[0] == 0
        assert found(manager, prompt) == 15
    answered(manager, new_tokens(fresh, 34, extra=1), [])
    assert (found(manager, prompt), found(manager, other)) == (15, 0)


def test_blocks_that_are_computed_again_stay_for_the_snapshot_behind_them(fresh: Iterator[int]) -> None:
    """Of blocks with the same content the cache has the older ones."""
    manager = manager_of(device=3)
    prompt = new_tokens(fresh, 15, extra=1)
    for tokens in (prompt, new_tokens(fresh, 15, extra=1), new_tokens(fresh, 1, extra=1)):
        answered(manager, tokens, [])
    seq = sequence(prompt)
    manager.allocate(seq)
    assert seq.num_computed == 0, "there are two slots for snapshots"
    states_of(manager).own(seq)
    seq.num_computed = 12 * BLOCK
    manager.register_computed(seq, 0)
    manager.allocate(sequence(new_tokens(fresh, 20)))
    compute(manager, seq)
    assert found(manager, prompt) == 15


def test_a_state_that_is_read_may_take_the_slot_of_the_one_before_it(fresh: Iterator[int]) -> None:
    """The other slot is of a sequence that runs."""
    manager = manager_of(device=2)
    prompt = new_tokens(fresh, 3, extra=1)
    answered(manager, prompt, [])
    other = sequence(new_tokens(fresh, 1))
    seq = sequence([*prompt, *new_tokens(fresh, 3)])
    for each in (other, seq):
        manager.allocate(each)
        if each is other:
            states_of(manager).own(other)
    state = states_of(manager).of(seq).state
    assert seq.num_computed == 3 * BLOCK and state is not None
    before = state.slot
    assert states_of(manager).renew(seq) == before and len(states_of(manager).slots.snapshots) == 0
    check_states(manager, [other, seq])


def test_a_state_that_nobody_shares_is_computed_in_place(fresh: Iterator[int]) -> None:
    manager = manager_of(device=3)
    parent = sequence(new_tokens(fresh, 1, extra=1))
    child = sequence([])
    manager.allocate(parent)
    states = states_of(manager)
    slot = states.own(parent)
    assert states.slots.take_moves() == [StateMove(None, slot)]
    assert states.own(parent) == slot and not states.slots.take_moves()
    states.forked(parent, child)
    other = states.own(parent)
    assert states.slots.take_moves() == [StateMove(slot, other)]
    assert states.own(child) == slot and not states.slots.take_moves(), "the last holder keeps it"


@pytest.mark.parametrize(
    ("begin", "end", "branch", "interval", "expected"),
    [
        (0, 40, 0, 100, [36]),
        (0, 41, 0, 100, [40]),
        (0, 40, 12, 100, [12, 36]),
        (12, 40, 12, 100, [36]),
        (0, 40, 0, 10, [12, 24, 36]),
        (24, 40, 0, 10, [36]),
        (0, 4, 0, 10, []),
        (36, 40, 36, 10, []),
    ],
)
def test_planned_snapshots(begin: int, end: int, branch: int, interval: int, expected: list[int]) -> None:
    assert planned_snapshots(begin, end, (branch,), interval, unit=4, chunk=None).fixed == tuple(expected)
    assert planned_snapshots(begin, end, (branch,), interval, unit=4, chunk=10).fixed == tuple(expected), "it is short"


def test_a_state_is_kept_before_the_beginning_of_the_answer() -> None:
    """The next prompt may part from this one just before its end, where templates begin the answer."""
    for end, expected in ((3584, [3328]), (3585, [3328, 3584]), (3600, [3328, 3584]), (3601, [3584])):
        assert planned_snapshots(0, end, (), 4096, unit=256, chunk=None).fixed == (*expected,)
    assert planned_snapshots(3328, 3590, (), 4096, unit=256, chunk=None).fixed == (3584,), "it is kept already"


@pytest.mark.parametrize(
    ("chunk", "interval", "expected"),
    [
        (8, 8, [8, 16, 24, 32, 40, 48]),
        (8, 4, [8, 16, 24, 32, 40, 48]),  # no more often than chunks end
        (8, 12, [16, 24, 40, 48]),
        (8, 100, [48]),
        (7, 8, [12, 16, 28, 32, 44, 48]),  # at multiples of 4: chunks end earlier for them
        (3, 8, [8, 16, 24, 32, 40, 48]),
        (10, 20, [20, 40, 48]),
    ],
)
def test_snapshots_of_a_long_prompt_are_where_its_chunks_end(chunk: int, interval: int, expected: list[int]) -> None:
    plan = planned_snapshots(0, 51, (), interval, unit=4, chunk=chunk)
    assert plan.within(0, 51, chunk) == expected
    assert plan.within(0, expected[0], chunk) == [], "the end is the sequence's own state"
    beside_windows = planned_snapshots(0, 51, (), interval, unit=4, chunk=chunk, has_windows=True)
    assert beside_windows == planned_snapshots(0, 51, (), interval, unit=4, chunk=None), "windows are kept at the grid"


def test_chunks_of_a_long_prompt_are_whole_between_its_snapshots() -> None:
    """Also if others take some tokens of each step: a chunk is shorter by less than a hash block."""
    plan = planned_snapshots(0, 1000, (300,), 64, unit=16, chunk=64)
    at = 0
    chunks = []
    while at < 300:
        chunks.append(plan.chunk(at, 63))
        at += chunks[-1]
    assert at == 300 and chunks == [63, 49, 48, 48, 48, 44]


@pytest.mark.parametrize("chunk", [None, 99])
def test_snapshots_on_the_way_are_where_the_store_takes_them(chunk: int | None) -> None:
    """At multiples of its unit too; unless hash blocks have so little in common with it that few would be left."""
    plan = planned_snapshots(0, 3000, (), 200, unit=12, chunk=chunk, stored_unit=16)
    *found, last = plan.within(0, 3000, chunk or 3000)
    assert last == 2988 and len(found) == 12 and not any(position % 48 for position in found)
    alone = planned_snapshots(0, 3000, (), 200, unit=25, chunk=chunk)
    assert planned_snapshots(0, 3000, (), 200, unit=25, chunk=chunk, stored_unit=16) == alone


def test_a_layer_by_layer_prefill_holds_slots_until_it_ends(fresh: Iterator[int]) -> None:
    """Two of three positions, since the host has two slots. Once all layers have passed, prompts begin there."""
    manager = manager_of(device=1, host=2)
    prompt = new_tokens(fresh, 9)
    states = states_of(manager)
    seq = sequence(prompt)
    for ends in (False, True):
        manager.allocate(seq)
        held = states.begin_snapshots(seq, [2 * BLOCK, 4 * BLOCK, 6 * BLOCK])
        states.own(seq)
        assert [position for position, _ in held] == [4 * BLOCK, 6 * BLOCK] and {slot for _, slot in held} == {1, 2}
        check_states(manager, [seq])
        if ends:
            seq.num_computed = 8 * BLOCK
            manager.register_computed(seq, 0)
            states.computed(seq, 0, ())
        manager.free(seq)
        check_states(manager, [])
        assert len(states.slots.snapshots) == (3 if ends else 0)
    for length in (5, 7, 9):
        assert manager.num_cached_tokens(sequence(prompt[: length * BLOCK])) == (length - 1) * BLOCK
