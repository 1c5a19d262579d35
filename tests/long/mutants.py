"""Sixty small mistakes in the code. `make test` notices those that have a test beside them.

    PYTHONPATH=tests/help python tests/long/mutants.py [--only NAME ...] [--part K/N] [--jobs N] [--all]

Each mistake is put into a copy of the tree, and the test files run there that somebody who knows the room
would look into, as `make test` selects them. `--only` runs those with a word in their names, `--part 1/4`
each fourth of them. `--all` runs all of `make test` for what the named files have not noticed: that takes
as long as `make test` for each. The exit code is 1 if a mistake is not noticed any more that a test is
named for. A change of the suite may lose none.

A mistake of another kind is welcome. One whose line is gone is reported as such: give it another line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from mutation import Mutant, Outcome, tried

_WORKER = "worker/distruntime_worker"

MUTANTS = [
    # -- the command logs ------------------------------------------------------------------------------------
    Mutant(
        "a stream's first read of a memory counts, and not its last",
        "distruntime/log/order.py",
        "            use.readers[stream] = end",
        "            use.readers.setdefault(stream, end)",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
        "tests/streams/test_stream_order.py::test_every_read_sees_what_a_serial_run_gives",
    ),
    Mutant(
        "a read waits for the value's maker, and not for its last writer",
        "distruntime/log/order.py",
        "if use.writer != stream and implicit:",
        "if use.writer == maker and implicit:",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
        "tests/streams/test_stream_order.py::test_every_read_sees_what_a_serial_run_gives",
    ),
    Mutant(
        "who waits for a stream knows all that it knows now, and not what it knew there",
        "distruntime/log/order.py",
        "past[k - 1][1] if k else {}",
        "past[-1][1] if past else {}",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
        "tests/streams/test_stream_order.py::test_every_read_sees_what_a_serial_run_gives",
    ),
    Mutant(
        "a value that two streams have used is never freed",
        "distruntime/log/order.py",
        "(RELEASE, ref, len(streams))",
        "(RELEASE, ref, len(streams) + 1)",
        ("tests/streams/test_streams.py", "tests/tensors/test_leaks.py"),
        "tests/streams/test_streams.py::test_cancel_drops_what_has_not_begun",
    ),
    Mutant(
        "the bytes of an upload that has run still fill the window",
        "distruntime/log/progress.py",
        "    log.nbytes -= flight.nbytes\n    log.heavy",
        "    log.heavy",
        ("tests/session/test_announce.py", "tests/log/test_back_pressure.py"),
        "tests/session/test_announce.py::test_what_an_upload_waits_for_is_an_upload",
    ),
    Mutant(
        "a read of one worker does not come after what its mesh was given",
        "distruntime/log/node.py",
        "            if self.overtaken:\n",
        "            if self.overtaken and self.order is not None:\n",
        ("tests/mesh/test_mesh.py", "tests/log/test_moments.py"),
        "tests/mesh/test_mesh.py::test_a_member_is_the_same_memory",
    ),
    Mutant(
        "what is called when a segment has run is called only if it is the log's own",
        "distruntime/log/node.py",
        "                for release in flight.releases:\n                    release()\n"
        "                if flight.log is self:\n",
        "                if flight.log is self:\n                    for release in flight.releases:\n"
        "                        release()\n",
        ("tests/log/test_log.py", "tests/mesh/test_mesh.py"),
        "tests/log/test_log.py::test_a_segment_that_ctrl_c_kept_from_going_goes_by_itself",
    ),
    Mutant(
        "a failure that was read is told once more at the end",
        "distruntime/log/failure_log.py",
        "self.unread.pop(key, None)",
        "self.unread.get(key)",
        ("tests/log/test_log.py", "tests/session/test_failures.py"),
        "tests/log/test_log.py::test_a_failure_that_was_read_stays_for_who_reads_again",
    ),
    Mutant(
        "what is issued after a seed does not wait for it on other streams",
        "distruntime/log/issue.py",
        "                node.order.spread()\n",
        "",
        ("tests/streams/test_streams.py", "tests/streams/test_streams_hard.py"),
        "tests/streams/test_streams_hard.py::test_what_is_issued_after_a_seed_comes_after_it_on_every_stream",
    ),
    Mutant(
        "the first line of a program is not named when it fails",
        "distruntime/log/line.py",
        "or not 0 <= part < len(call.lines)",
        "or not 0 < part < len(call.lines)",
        ("tests/programs/test_parts.py", "tests/programs/test_hard_times.py"),
        "tests/programs/test_parts.py::test_a_failure_crosses_to_the_other_node_and_names_both_lines",
    ),
    # -- operators and tensors -------------------------------------------------------------------------------
    Mutant(
        "a view loses its conjugate bit when the call is known",
        "distruntime/operators/signatures.py",
        "or any(r.spec.bits for r in new)",
        "or False",
        ("tests/operators/test_feasibility.py", "tests/torch_db/test_op_db.py"),
        "tests/torch_db/test_op_db.py::test_entries",
    ),
    Mutant(
        "1 and True are one argument",
        "distruntime/operators/dispatch.py",
        "            key.append(kind)\n            key.append(a)",
        "            key.append(a)",
        ("tests/operators/test_plain_twin.py", "tests/tensors/test_values.py"),
        "tests/operators/test_plain_twin.py::test_signature_and_instruction",
    ),
    Mutant(
        "a factory of 2.0 gives the dtype that one of 2 gave before",
        "distruntime/operators/dispatch.py",
        "            key.append(kind)\n            if kind is int and",
        "            if kind is int and",
        ("tests/tensors/test_factories.py", "tests/tensors/test_values.py"),
        "tests/tensors/test_factories.py::test_a_factory_waits_for_nobody",
    ),
    Mutant(
        "what Ctrl-C has cut short counts as unwritten for autograd",
        "distruntime/operators/signatures.py",
        "that returns.\n            count_writes([operands[k] for k in outcome.written])",
        "that returns.\n            pass",
        ("tests/log/test_interrupted_issue.py",),
        "tests/log/test_interrupted_issue.py::test_what_was_written_is_noted_for_autograd",
    ),
    Mutant(
        "lists that are written to count no version",
        "distruntime/operators/signatures.py",
        "    if outcome.listed:",
        "    if outcome.listed and False:",
        ("tests/operators/test_autograd.py",),
        "tests/operators/test_autograd.py::test_a_step_between_the_passes_is_caught",
    ),
    Mutant(
        "two values that one call makes are no kin",
        "distruntime/operators/signatures.py",
        "if len(own) > 1:",
        "if len(own) > 2:",
        ("tests/session/test_failures.py", "tests/programs/test_traps.py"),
        "tests/session/test_failures.py::test_a_failed_check_poisons_what_it_checks_and_nothing_else",
    ),
    Mutant(
        "an upload sends memory that the user may write again",
        "distruntime/operators/transfer.py",
        "issue_bytes(head, data if lasts else bytes(data), fresh",
        "issue_bytes(head, data, fresh",
        ("tests/tensors/test_reading.py", "tests/operators/test_feasibility.py"),
        "tests/tensors/test_reading.py::test_memory_that_was_sent_may_be_written_at_once",
    ),
    Mutant(
        "a value that is read has no strides of its own",
        "distruntime/operators/transfer.py",
        "if wanted != tensor.stride():",
        "if len(wanted) != len(tensor.stride()):",
        ("tests/tensors/test_reading.py", "tests/torch_db/test_op_db.py"),
        "tests/tensors/test_reading.py::test_views_are_read_as_they_are",
    ),
    Mutant(
        "a mesh's value is read of its last member",
        "distruntime/operators/transfer.py",
        "handle = member_of(handle, 0)",
        "handle = member_of(handle, len(handle.place.node.members) - 1)",
        ("tests/mesh/test_mesh.py",),
        "tests/mesh/test_mesh.py::test_gradients_of_what_is_sent_to_all_are_the_first_members",
    ),
    Mutant(
        "a shape that depends on data is remembered",
        "distruntime/operators/ask_worker.py",
        "if deterministic and not schema.is_mutable else None",
        "if not schema.is_mutable else None",
        ("tests/tensors/test_values.py", "tests/operators/test_feasibility.py"),
        "tests/tensors/test_values.py::test_shapes_that_depend_on_data",
    ),
    Mutant(
        "tied tensors come untied",
        "distruntime/tensors/fetch.py",
        "key = id(handle.storage), handle.spec",
        "key = id(handle), handle.spec",
        ("tests/tensors/test_reading.py", "tests/backend/test_torch_save.py"),
        "tests/tensors/test_reading.py::test_fetch_keeps_the_trees_shape_and_its_ties",
    ),
    Mutant(
        "data_ptr counts elements and not bytes",
        "distruntime/tensors/tensor.py",
        "offset = self._handle.spec.offset * self.element_size()",
        "offset = self._handle.spec.offset",
        ("tests/backend/test_torch_save.py",),
        "tests/backend/test_torch_save.py::test_a_storage_tells_who_shares_memory",
    ),
    # -- the wire and the session ----------------------------------------------------------------------------
    Mutant(
        "an acknowledgement comes one message late",
        "distruntime/wire/link.py",
        "if self._since < EVERY and",
        "if self._since <= EVERY and",
        ("tests/wire/test_link.py",),
        "tests/wire/test_link.py::test_one_in_so_many_small_messages_is_acknowledged",
    ),
    Mutant(
        "a count that goes back is believed",
        "distruntime/wire/link.py",
        "if not self.acknowledged <= received <= self.sent:",
        "if received > self.sent:",
        ("tests/wire/test_link.py",),
        "tests/wire/test_link.py::test_counts_that_cannot_be",
    ),
    Mutant(
        "a key file that the group may read is taken",
        "distruntime/wire/keys.py",
        "if mode & 0o077:",
        "if mode & 0o007:",
        ("tests/wire/test_keys.py",),
        "tests/wire/test_keys.py::test_a_key_that_others_may_read_is_refused",
    ),
    Mutant(
        "a key may lie in a folder that others write",
        "distruntime/wire/keys.py",
        "in ((path, path.stat()), (folder := path.resolve().parent, folder.stat())):",
        "in ((path, path.stat()),):",
        ("tests/wire/test_keys.py", "tests/publishing/test_signing.py"),
        "tests/wire/test_keys.py::test_a_file_that_another_user_can_replace_is_refused",
    ),
    Mutant(
        "whoever has some key is let in",
        "distruntime/wire/zeromq/options.py",
        "return hmac.compare_digest(key, self._public)",
        "return len(key) == len(self._public)",
        ("tests/wire/test_channel.py", "tests/hostile/test_security.py"),
        "tests/wire/test_channel.py::test_a_stranger_who_knows_only_the_public_half_is_refused",
    ),
    Mutant(
        "pieces of a frame are taken in any order",
        "distruntime/wire/zeromq/frames.py",
        "or start != got or",
        "or",
        ("tests/wire/test_channel.py", "tests/hostile/test_security.py"),
        "tests/wire/test_channel.py::test_pieces_that_do_not_fit_together_are_a_message_that_is_none",
    ),
    Mutant(
        "a worker reads to its master what another process holds",
        "distruntime/wire/shared.py",
        "if int(named[1]) != self._pid:",
        "if self._pid is None:",
        ("tests/wire/test_shared_memory.py", "tests/hostile/test_security.py"),
        "tests/wire/test_shared_memory.py::test_what_is_no_segment_of_the_master_is_refused",
    ),
    Mutant(
        "a new connection brings again what the old one has brought",
        "distruntime/wire/zeromq/sender.py",
        "            link.acknowledge(received)\n",
        "",
        ("tests/wire/test_channel.py", "tests/cluster/test_cuts.py"),
        "tests/wire/test_channel.py::test_a_large_message_is_sent_again_whole_on_the_next_connection",
    ),
    Mutant(
        "a worker may answer for another",
        "distruntime/session/requests.py",
        "request.node is not node:",
        "request.node is None:",
        ("tests/hostile/test_security.py",),
        "tests/hostile/test_security.py::test_a_worker_cannot_answer_for_another",
    ),
    Mutant(
        "a node's output goes on in another node's line",
        "distruntime/session/output.py",
        "found = [] if begun in (None, node) else",
        "found = [] if node >= 0 else",
        ("tests/python/test_output.py",),
        "tests/python/test_output.py::test_each_line_has_its_node_and_lines_of_two_nodes_do_not_mix",
    ),
    # -- programs and guards ---------------------------------------------------------------------------------
    Mutant(
        "requires_grad may change under a program",
        "distruntime/guards/guards.py",
        '            "list(map(grad, tensors)) == gradients",\n',
        "",
        ("tests/programs/test_traps.py",),
        "tests/programs/test_traps.py::test_a_parameter_that_is_frozen_gets_no_gradient_any_more",
    ),
    Mutant(
        "somebody may hold what a replay changes",
        "distruntime/guards/guards.py",
        '"    return list(map(count, map(thing, kept))) == counts or dropped()"',
        '"    return len(kept) == len(counts) or dropped()"',
        ("tests/programs/test_holders.py",),
        "tests/programs/test_holders.py::test_a_holder_is_noticed_and_keeps_its_value",
    ),
    Mutant(
        "0.0 and -0.0 are one number to a guard",
        "distruntime/guards/seen.py",
        "return repr(one) == repr(other)",
        "return one == other",
        ("tests/programs/test_traps.py", "tests/programs/test_states.py"),
        "tests/programs/test_traps.py::test_a_zero_has_a_sign",
    ),
    Mutant(
        "an argument that a replay changes keeps its version",
        "distruntime/programs/plan.py",
        "        if self._changed_arguments:\n",
        "        if self._changed_arguments and changed:\n",
        ("tests/programs/test_replays.py",),
        "tests/programs/test_replays.py::test_an_argument_that_a_replay_changes_counts_for_graphs_outside",
    ),
    Mutant(
        "a replay counts two steps of an optimizer",
        "distruntime/programs/plan.py",
        "torch._foreach_add_(self._steps, 1)",
        "torch._foreach_add_(self._steps, 2)",
        ("tests/programs/test_traps.py",),
        "tests/programs/test_traps.py::test_an_optimizer_is_replayed_as_it_is",
    ),
    Mutant(
        "a float that has decided something may be another one",
        "distruntime/programs/plan.py",
        "            if not same(leaves[k], value):",
        "            if not same(leaves[k], value) and k > 9:",
        ("tests/programs/test_traps.py", "tests/programs/test_callers.py"),
        "tests/programs/test_traps.py::test_a_float_that_decides_something",
    ),
    Mutant(
        "a replay does not show that recordings are worth it",
        "distruntime/programs/program.py",
        "            plan.tries.in_vain = 0\n",
        "",
        ("tests/programs/test_in_vain.py",),
        "tests/programs/test_in_vain.py::test_a_plan_that_fits_is_replayed_again",
    ),
    Mutant(
        "a part renews what a later part still reads",
        "distruntime/programs/layout.py",
        "needs += self._users.get((HELD, path), ())",
        "needs += ()",
        ("tests/programs/test_parts.py",),
        "tests/programs/test_parts.py::test_what_was_there_is_copied_after_something_else_is_there",
    ),
    Mutant(
        "what a float has decided is not decided again",
        "distruntime/guards/arithmetic.py",
        "if any(value_of(term, leaves, known) != value for term, value in decided):",
        "if any(value_of(term, leaves, known) is None for term, value in decided):",
        ("tests/programs/test_traps.py",),
        "tests/programs/test_traps.py::test_a_float_decides_anew_in_each_call",
    ),
    # -- meshes and collectives ------------------------------------------------------------------------------
    Mutant(
        "the lines of a mesh go along the other dimensions",
        "distruntime/mesh/mesh.py",
        "rows.setdefault(tuple(n for d, n in enumerate(at) if d not in wanted), [])",
        "rows.setdefault(tuple(n for d, n in enumerate(at) if d in wanted), [])",
        ("tests/mesh/test_mesh.py",),
        "tests/mesh/test_mesh.py::test_groups_by_modes_are_dimensions",
    ),
    Mutant(
        "a shift without wrapping leaves out a member too many",
        "distruntime/mesh/lines.py",
        "inside = ranks >= by if by > 0",
        "inside = ranks > by if by > 0",
        ("tests/mesh/test_shift.py",),
        "tests/mesh/test_shift.py::test_tensors_move_along_every_line",
    ),
    Mutant(
        "causal attention leaves out one member's keys",
        "distruntime/mesh/attention.py",
        "earlier = self.lines.ranks() >= step",
        "earlier = self.lines.ranks() > step",
        ("tests/mesh/test_attention.py",),
        "tests/mesh/test_attention.py::test_values_and_gradients",
    ),
    Mutant(
        "a flattened dimension counts the wrong way round",
        "distruntime/mesh/shape.py",
        "found * sizes[dim] + at[dim], dims, 0)",
        "found * sizes[dim] + at[dim], dims[::-1], 0)",
        ("tests/mesh/test_mesh.py", "tests/mesh/test_dtensor.py"),
        "tests/mesh/test_dtensor.py::test_a_replica_is_cut_along_flattened_dimensions",
    ),
    Mutant(
        "lines run along the other dimensions",
        "distruntime/mesh/mesh.py",
        "enumerate(at) if d not in wanted)",
        "enumerate(at) if d in wanted)",
        ("tests/mesh/test_lines_module.py", "tests/mesh/test_mesh.py"),
        "tests/mesh/test_mesh.py::test_gradients_of_a_scalar_along_lines_are_scalars",
    ),
    Mutant(
        "generators go back to their seed behind a DTensor's draw",
        "distruntime/mesh/mesh.py",
        "self._seed(base + len(self.places))",
        "self._seed(base)",
        ("tests/mesh/test_dtensor.py", "tests/mesh/test_tensor_parallel.py"),
        "tests/mesh/test_dtensor.py::test_what_is_drawn_behind_a_dtensor_is_something_else",
    ),
    Mutant(
        "the gradient of an average is that of a sum",
        "distruntime/collectives/adjoints.py",
        "return 1 / size",
        "return 1",
        ("tests/collectives/test_collective_gradients.py", "tests/mesh/test_mesh.py"),
        "tests/mesh/test_mesh.py::test_adjoints_of_collectives",
    ),
    Mutant(
        "members that have one maximum get its whole gradient each",
        "distruntime/collectives/adjoints.py",
        "return [g * c / n for",
        "return [g * c for",
        ("tests/collectives/test_collective_gradients.py",),
        "tests/collectives/test_collective_gradients.py::test_a_product_with_zeros_and_a_tie_of_extremes",
    ),
    Mutant(
        "an upload takes a memory from the views that look at it",
        "distruntime/operators/transfer.py",
        "and sys.getrefcount(handle.storage) == 2",
        "and sys.getrefcount(handle.storage) <= 3",
        ("tests/tensors/test_values.py", "tests/collectives/test_copies.py"),
        "tests/tensors/test_values.py::test_views_see_what_is_sent_into_their_memory",
    ),
    Mutant(
        "meshes of the same shape are one mesh",
        "distruntime/mesh/torch_dtensor.py",
        "return mine is theirs and equal(one, other)",
        "return equal(one, other)",
        ("tests/mesh/test_dtensor.py", "tests/mesh/test_mesh_uses.py"),
        "tests/mesh/test_dtensor.py::test_two_meshes_do_not_mix",
    ),
    # -- the worker ------------------------------------------------------------------------------------------
    Mutant(
        "a stream steps over a wait",
        f"{_WORKER}/log/waits.py",
        "for target, position in due:",
        "for target, position in due[1:]:",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
        "tests/streams/test_stream_order.py::test_every_read_sees_what_a_serial_run_gives",
    ),
    Mutant(
        "the views of what a failed write has spoilt stay as they are",
        f"{_WORKER}/log/state.py",
        "            if written is not None:\n                self.spread(slots, written, cause)\n",
        "",
        ("tests/session/test_failures.py",),
        "tests/session/test_failures.py::test_a_failed_write_poisons_the_tensor_its_base_and_its_views",
    ),
    Mutant(
        "a check that fails is swallowed",
        f"{_WORKER}/log/state.py",
        "        if kin is None:\n            self.orphans.append(cause)\n",
        "        if kin is None:\n",
        ("tests/session/test_failures.py",),
        "tests/session/test_failures.py::test_an_assertion_that_fails_is_raised_by_the_next_read",
    ),
    Mutant(
        "a mesh's member shares its sizes with the mesh's tensor",
        f"{_WORKER}/log/instructions.py",
        "value.detach() if isinstance(value, torch.Tensor) else value",
        "value",
        ("tests/mesh/test_mesh_uses.py", "tests/mesh/test_mesh.py"),
        "tests/mesh/test_mesh.py::test_a_member_has_sizes_and_strides_of_its_own",
    ),
    Mutant(
        "a segment is missing and nobody sees it",
        f"{_WORKER}/session/session.py",
        "if segment.seq != self.executor.received + 1:",
        "if segment.seq < self.executor.received + 1:",
        ("tests/log/test_log.py", "tests/hostile/test_security.py"),
        "tests/log/test_log.py::test_a_segment_that_is_missing_ends_the_session",
    ),
    Mutant(
        "a segment that comes twice runs twice",
        f"{_WORKER}/session/session.py",
        "if segment.seq <= self.executor.received:\n            return\n"
        "        if segment.seq != self.executor.received + 1:",
        "if segment.seq < self.executor.received:\n            return\n"
        "        if segment.seq > self.executor.received + 1:",
        ("tests/log/test_log.py",),
        "tests/log/test_log.py::test_a_segment_that_ctrl_c_kept_from_going_goes_by_itself",
    ),
    Mutant(
        "a session that was idle claims the time that it did not use",
        f"{_WORKER}/log/turns.py",
        "turn._account = max(turn._account, self._floor - _CREDIT)",
        "turn._account = min(turn._account, self._floor)",
        ("tests/worker/test_turns.py",),
        "tests/worker/test_turns.py::test_one_that_was_idle_has_no_claim_to_the_time_that_it_did_not_use",
    ),
    Mutant(
        "members on one device need memory once",
        f"{_WORKER}/log/budget.py",
        "more = nbytes * devices.count(device)",
        "more = nbytes",
        ("tests/worker/test_budget.py",),
        "tests/worker/test_budget.py::test_members_of_a_mesh_on_one_device_share_it",
    ),
    Mutant(
        "the last reason why a group has ended is told, and not the first",
        f"{_WORKER}/collectives/store.py",
        "self._ended = self._ended or reason",
        "self._ended = reason",
        ("tests/worker/test_store.py",),
        "tests/worker/test_store.py::test_the_end_of_the_group_wakes_who_waits",
    ),
    Mutant(
        "a poisoned value goes through a collective as zeros",
        f"{_WORKER}/collectives/taking_part.py",
        "begun.group.taint(begun.sequence, cause, self.node, self._tell)",
        "begun.group.tainted(begun.sequence, cause)",
        ("tests/collectives/test_groups.py",),
        "tests/collectives/test_groups.py::test_what_is_dropped_keeps_its_place_among_the_groups_operations",
    ),
]


def _told(outcomes: Iterable[Outcome], tests: dict[str, str]) -> None:
    """Print what has become of each mutant, and note the test that has noticed it."""
    for mutant, test, said in outcomes:
        tests[mutant.name] = test
        last = test or said.rstrip().rpartition("\n")[2]
        print(f"{'caught    ' if test else 'NOT CAUGHT'}  {mutant.name}  {last}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="those with this in their names"
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each Nth of them, from the Kth on")
    parser.add_argument("--jobs", type=int, default=2, help="so many at the same time")
    parser.add_argument("--all", action="store_true", help="run all of `make test` for those that live on")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or any(word in m.name for word in given.only)]
    part, parts = map(int, given.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    tests: dict[str, str] = {}
    print(f"{len(chosen)} mutants, {given.jobs} at a time", flush=True)
    _told(tried(chosen, jobs=given.jobs), tests)
    if given.all and (alive := [m._replace(tests=("tests",)) for m in chosen if not tests[m.name]]):
        _told(tried(alive, jobs=1, options=["-n", "3", "--dist", "worksteal"], limit=3600), tests)
    print(f"{sum(map(bool, tests.values()))} of {len(chosen)} caught")
    lost = [m for m in chosen if m.by and not tests[m.name]]
    for mutant in lost:
        print(f"lost: {mutant.name}, which {mutant.by} has caught")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
