"""Small mistakes in the code, each of which `make test` must notice. Some 15 minutes on two quiet cores.

    PYTHONPATH=tests/help python tests/long/mutants.py [--only NAME ...] [--jobs N] [--all]

Each mistake is put into a copy of the tree, and the test files run there that somebody who knows the room
would look into, as `make test` selects them. `--only` runs those with a word in their names. `--all` runs all
of `make test` for what the named files have not noticed: that takes as long as `make test` for each. The exit
code is 1 if a mistake is not noticed any more that a test is named for. A change of the suite may lose none.

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
    ),
    Mutant(
        "a read waits for the value's maker, and not for its last writer",
        "distruntime/log/order.py",
        "if use.writer != stream and implicit:",
        "if use.writer == maker and implicit:",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
    ),
    Mutant(
        "who waits for a stream knows all that it knows now, and not what it knew there",
        "distruntime/log/order.py",
        "past[k - 1][1] if k else {}",
        "past[-1][1] if past else {}",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
    ),
    Mutant(
        "a value that two streams have used is never freed",
        "distruntime/log/order.py",
        "(RELEASE, ref, len(streams))",
        "(RELEASE, ref, len(streams) + 1)",
        ("tests/streams/test_streams.py", "tests/tensors/test_leaks.py"),
    ),
    Mutant(
        "the bytes of an upload that has run still fill the window",
        "distruntime/log/log.py",
        "        self._nbytes -= flight.nbytes\n        self._heavy",
        "        self._heavy",
        ("tests/session/test_announce.py", "tests/log/test_back_pressure.py"),
    ),
    Mutant(
        "a read of one worker does not come after what its mesh was given",
        "distruntime/log/node.py",
        "            if self.overtaken:\n",
        "            if self.overtaken and self.order is not None:\n",
        ("tests/mesh/test_mesh.py", "tests/log/test_moments.py"),
    ),
    Mutant(
        "what is called when a segment has run is called only if it is the log's own",
        "distruntime/log/node.py",
        "                for release in flight.releases:\n                    release()\n"
        "                if flight.log is self:\n",
        "                if flight.log is self:\n                    for release in flight.releases:\n"
        "                        release()\n",
        ("tests/log/test_log.py", "tests/mesh/test_mesh.py"),
    ),
    Mutant(
        "a failure that was read is told once more at the end",
        "distruntime/log/ledger.py",
        "self.unread.pop(key, None)",
        "self.unread.get(key)",
        ("tests/log/test_log.py", "tests/session/test_failures.py"),
    ),
    Mutant(
        "a cancellation is told as a failure at the end",
        "distruntime/log/ledger.py",
        "quiet = cause.failure.kind == _CANCELLED or cause",
        "quiet = cause",
        ("tests/log/test_log.py", "tests/streams/test_cancel.py"),
    ),
    Mutant(
        "what is issued after a seed does not wait for it on other streams",
        "distruntime/log/issue.py",
        "                node.order.spread()\n",
        "",
        ("tests/streams/test_streams.py", "tests/streams/test_streams_hard.py"),
    ),
    Mutant(
        "the first line of a program is not named when it fails",
        "distruntime/log/line.py",
        "or not 0 <= part < len(call.lines)",
        "or not 0 < part < len(call.lines)",
        ("tests/programs/test_parts.py", "tests/programs/test_hard_times.py"),
    ),
    # -- operators and tensors -------------------------------------------------------------------------------
    Mutant(
        "a view loses its conjugate bit when the call is known",
        "distruntime/operators/signatures.py",
        "isinstance(only, New) and not only.spec.bits and not",
        "isinstance(only, New) and not",
        ("tests/operators/test_feasibility.py", "tests/torch_db/test_op_db.py"),
    ),
    Mutant(
        "1 and True are one argument",
        "distruntime/operators/dispatch.py",
        "            key.append(kind)\n            key.append(a)",
        "            key.append(a)",
        ("tests/operators/test_plain_twin.py", "tests/tensors/test_values.py"),
    ),
    Mutant(
        "a factory of 2.0 gives the dtype that one of 2 gave before",
        "distruntime/operators/new_calls.py",
        "*(tuple(a) if isinstance(a, list) else (type(a), a) for a in args)",
        "*(tuple(a) if isinstance(a, list) else a for a in args)",
        ("tests/tensors/test_factories.py", "tests/tensors/test_values.py"),
    ),
    Mutant(
        "what Ctrl-C has cut short counts as unwritten for autograd",
        "distruntime/operators/signatures.py",
        "torch.autograd.graph.increment_version(operands[k])",
        "pass",
        ("tests/log/test_interrupted_issue.py",),
    ),
    Mutant(
        "two values that one call makes are no kin",
        "distruntime/operators/signatures.py",
        "if len(own) > 1:",
        "if len(own) > 2:",
        ("tests/session/test_failures.py", "tests/programs/test_traps.py"),
    ),
    Mutant(
        "an upload sends memory that the user may write again",
        "distruntime/operators/transfer.py",
        "issue_bytes(head, data if lasts else bytes(data), fresh",
        "issue_bytes(head, data, fresh",
        ("tests/tensors/test_reading.py", "tests/operators/test_feasibility.py"),
    ),
    Mutant(
        "a value that is read has no strides of its own",
        "distruntime/operators/transfer.py",
        "if wanted != tensor.stride():",
        "if len(wanted) != len(tensor.stride()):",
        ("tests/tensors/test_reading.py", "tests/torch_db/test_op_db.py"),
    ),
    Mutant(
        "a mesh's value is read of its last member",
        "distruntime/operators/transfer.py",
        "handle = member_of(handle, 0)",
        "handle = member_of(handle, len(handle.place.node.members) - 1)",
        ("tests/mesh/test_mesh.py",),
    ),
    Mutant(
        "a shape that depends on data is remembered",
        "distruntime/operators/ask_worker.py",
        "if deterministic and not schema.is_mutable else None",
        "if not schema.is_mutable else None",
        ("tests/tensors/test_values.py", "tests/operators/test_feasibility.py"),
    ),
    Mutant(
        "tied tensors come untied",
        "distruntime/tensors/fetch.py",
        "key = id(handle.storage), handle.spec",
        "key = id(handle), handle.spec",
        ("tests/tensors/test_reading.py", "tests/backend/test_torch_save.py"),
    ),
    Mutant(
        "data_ptr counts elements and not bytes",
        "distruntime/tensors/tensor.py",
        "offset = self._handle.spec.offset * self.element_size()",
        "offset = self._handle.spec.offset",
        ("tests/backend/test_torch_save.py",),
    ),
    # -- the wire and the session ----------------------------------------------------------------------------
    Mutant(
        "an acknowledgement comes one message late",
        "distruntime/wire/link.py",
        "if self._since < EVERY and",
        "if self._since <= EVERY and",
        ("tests/wire/test_link.py",),
    ),
    Mutant(
        "the last part of a value is not acknowledged",
        "distruntime/wire/link.py",
        "            self._pending = more\n            return False",
        "            return False",
        ("tests/wire/test_link.py",),
    ),
    Mutant(
        "a count that goes back is believed",
        "distruntime/wire/link.py",
        "if not self.acknowledged <= received <= self.sent:",
        "if received > self.sent:",
        ("tests/wire/test_link.py",),
    ),
    Mutant(
        "a key file that the group may read is taken",
        "distruntime/wire/keys.py",
        "if mode & 0o077:",
        "if mode & 0o007:",
        ("tests/wire/test_keys.py",),
    ),
    Mutant(
        "a key may lie in a folder that others write",
        "distruntime/wire/keys.py",
        "in ((path, path.stat()), (folder := path.resolve().parent, folder.stat())):",
        "in ((path, path.stat()),):",
        ("tests/wire/test_keys.py", "tests/publishing/test_signing.py"),
    ),
    Mutant(
        "whoever has some key is let in",
        "distruntime/wire/channel.py",
        "return hmac.compare_digest(key, self._public)",
        "return len(key) == len(self._public)",
        ("tests/wire/test_channel.py", "tests/hostile/test_security.py"),
    ),
    Mutant(
        "a deadline of 0 seconds is taken",
        "distruntime/wire/deadlines.py",
        "not 0 < seconds <= 1e9",
        "not 0 <= seconds <= 1e9",
        ("tests/wire/test_deadlines.py", "tests/session/test_timeouts.py"),
    ),
    Mutant(
        "pieces of a frame are taken in any order",
        "distruntime/wire/frames.py",
        "or start != got or",
        "or",
        ("tests/wire/test_channel.py", "tests/hostile/test_security.py"),
    ),
    Mutant(
        "a worker reads to its master what another process holds",
        "distruntime/wire/shared.py",
        "if int(named[1]) != self._pid:",
        "if self._pid is None:",
        ("tests/wire/test_shared_memory.py", "tests/hostile/test_security.py"),
    ),
    Mutant(
        "a new connection brings again what the old one has brought",
        "distruntime/wire/channel.py",
        "            link.acknowledge(received)\n",
        "",
        ("tests/wire/test_channel.py", "tests/cluster/test_cuts.py"),
    ),
    Mutant(
        "a worker may answer for another",
        "distruntime/session/requests.py",
        "request.node is not node:",
        "request.node is None:",
        ("tests/hostile/test_security.py",),
    ),
    Mutant(
        "a node's output goes on in another node's line",
        "distruntime/session/output.py",
        "found = [] if begun in (None, node) else",
        "found = [] if node >= 0 else",
        ("tests/python/test_output.py",),
    ),
    # -- programs and guards ---------------------------------------------------------------------------------
    Mutant(
        "requires_grad may change under a program",
        "distruntime/guards/guards.py",
        '            "list(map(grad, tensors)) == gradients",\n',
        "",
        ("tests/programs/test_states.py", "tests/programs/test_replays.py"),
    ),
    Mutant(
        "somebody may hold what a replay changes",
        "distruntime/guards/guards.py",
        '"    return list(map(count, map(thing, kept))) == counts"',
        '"    return len(kept) == len(counts)"',
        ("tests/programs/test_holders.py",),
    ),
    Mutant(
        "0.0 and -0.0 are one number to a guard",
        "distruntime/guards/seen.py",
        "return repr(one) == repr(other)",
        "return one == other",
        ("tests/programs/test_traps.py", "tests/programs/test_states.py"),
    ),
    Mutant(
        "an argument that a replay changes keeps its version",
        "distruntime/programs/plan.py",
        "        if self._changed_arguments:\n",
        "        if self._changed_arguments and changed:\n",
        ("tests/programs/test_replays.py",),
    ),
    Mutant(
        "a replay counts two steps of an optimizer",
        "distruntime/programs/plan.py",
        "torch._foreach_add_(self._steps, 1)",
        "torch._foreach_add_(self._steps, 2)",
        ("tests/programs/test_traps.py",),
    ),
    Mutant(
        "an argument that the function also finds by itself may be another one",
        "distruntime/programs/plan.py",
        "for k, handle in self._pinned:",
        "for k, handle in self._pinned[1:]:",
        ("tests/programs/test_traps.py", "tests/programs/test_callers.py"),
    ),
    Mutant(
        "a recording in vain too many",
        "distruntime/programs/vain.py",
        "if self.in_vain < _MOST:",
        "if self.in_vain <= _MOST:",
        ("tests/programs/test_in_vain.py",),
    ),
    Mutant(
        "a replay does not show that recordings are worth it",
        "distruntime/programs/program.py",
        "            plan.tries.in_vain = 0\n",
        "",
        ("tests/programs/test_in_vain.py",),
    ),
    Mutant(
        "a gradient that grows in an argument is forgotten",
        "distruntime/programs/attempt.py",
        "if leaf.grad is not gradient:",
        "if gradient is None and leaf.grad is not gradient:",
        ("tests/programs/test_traps.py", "tests/programs/test_replays.py"),
    ),
    Mutant(
        "a part renews what a later part still reads",
        "distruntime/programs/layout.py",
        "needs += self._users.get((HELD, path), ())",
        "needs += ()",
        ("tests/programs/test_parts.py", "tests/programs/test_random.py"),
    ),
    Mutant(
        "what a float has decided is not decided again",
        "distruntime/guards/arithmetic.py",
        "if any(value_of(term, leaves, known) != value for term, value in decided):",
        "if any(value_of(term, leaves, known) is None for term, value in decided):",
        ("tests/programs/test_traps.py", "tests/programs/test_replays.py"),
    ),
    # -- meshes and collectives ------------------------------------------------------------------------------
    Mutant(
        "a layout numbers its groups the other way round",
        "distruntime/mesh/layout.py",
        "        for start in range(stride)\n        for block in range(0, world, size * stride)\n",
        "        for block in range(0, world, size * stride)\n        for start in range(stride)\n",
        ("tests/mesh/test_layout.py",),
    ),
    Mutant(
        "a shift without wrapping leaves out a member too many",
        "distruntime/mesh/lines.py",
        "inside = ranks >= by if by > 0",
        "inside = ranks > by if by > 0",
        ("tests/mesh/test_shift.py",),
    ),
    Mutant(
        "causal attention leaves out one member's keys",
        "distruntime/mesh/attention.py",
        "earlier = self.lines.ranks() >= step",
        "earlier = self.lines.ranks() > step",
        ("tests/mesh/test_attention.py",),
    ),
    Mutant(
        "attention's gradient lacks the scale",
        "distruntime/mesh/attention.py",
        "rows.take(along)) * way.scale",
        "rows.take(along))",
        ("tests/mesh/test_attention.py",),
    ),
    Mutant(
        "a flattened dimension counts the wrong way round",
        "distruntime/mesh/mesh.py",
        "found * sizes[dim] + at[dim], dims, 0)",
        "found * sizes[dim] + at[dim], dims[::-1], 0)",
        ("tests/mesh/test_mesh.py", "tests/mesh/test_dtensor.py"),
    ),
    Mutant(
        "lines run along the other dimensions",
        "distruntime/mesh/mesh.py",
        "enumerate(at) if d not in wanted)",
        "enumerate(at) if d in wanted)",
        ("tests/mesh/test_lines_module.py", "tests/mesh/test_mesh.py"),
    ),
    Mutant(
        "generators go back to their seed behind a DTensor's draw",
        "distruntime/mesh/mesh.py",
        "self._seed(base + len(self.places))",
        "self._seed(base)",
        ("tests/mesh/test_dtensor.py", "tests/mesh/test_tensor_parallel.py"),
    ),
    Mutant(
        "the last parts of a dimension are the longer ones",
        "distruntime/collectives/plans.py",
        "each + (k < longer)",
        "each + (k >= parts - longer)",
        ("tests/collectives/test_partition.py",),
    ),
    Mutant(
        "the gradient of an average is that of a sum",
        "distruntime/collectives/adjoints.py",
        "return 1 / size",
        "return 1",
        ("tests/collectives/test_collective_gradients.py",),
    ),
    Mutant(
        "members that have one maximum get its whole gradient each",
        "distruntime/collectives/adjoints.py",
        "return [g * c / n for",
        "return [g * c for",
        ("tests/collectives/test_collective_gradients.py",),
    ),
    Mutant(
        "an upload takes a memory from the views that look at it",
        "distruntime/collectives/copies.py",
        "and sys.getrefcount(handle.storage) == 2",
        "and sys.getrefcount(handle.storage) <= 3",
        ("tests/collectives/test_copies.py", "tests/backend/test_as_written.py"),
    ),
    Mutant(
        "meshes of the same shape are one mesh",
        "distruntime/mesh/torch_dtensor.py",
        "return mine is theirs and equal(one, other)",
        "return equal(one, other)",
        ("tests/mesh/test_dtensor.py", "tests/mesh/test_mesh_uses.py"),
    ),
    # -- the worker ------------------------------------------------------------------------------------------
    Mutant(
        "a stream steps over a wait",
        f"{_WORKER}/log/waits.py",
        "for target, position in due:",
        "for target, position in due[1:]:",
        ("tests/streams/test_stream_order.py", "tests/streams/test_streams.py"),
    ),
    Mutant(
        "the views of what a failed write has spoilt stay as they are",
        f"{_WORKER}/log/state.py",
        "            if written is not None:\n                self.spread(slots, written, cause)\n",
        "",
        ("tests/session/test_failures.py",),
    ),
    Mutant(
        "a check that fails is swallowed",
        f"{_WORKER}/log/state.py",
        "            self.orphans.append(cause)\n",
        "",
        ("tests/session/test_failures.py",),
    ),
    Mutant(
        "a mesh's member shares its sizes with the mesh's tensor",
        f"{_WORKER}/log/instructions.py",
        "value.detach() if isinstance(value, torch.Tensor) else value",
        "value",
        ("tests/mesh/test_mesh_uses.py", "tests/mesh/test_mesh.py"),
    ),
    Mutant(
        "a segment is missing and nobody sees it",
        f"{_WORKER}/session/session.py",
        "if segment.seq != self.executor.received + 1:",
        "if segment.seq < self.executor.received + 1:",
        ("tests/hostile/test_security.py", "tests/hostile/test_fuzz.py"),
    ),
    Mutant(
        "a segment that comes twice runs twice",
        f"{_WORKER}/session/session.py",
        "if segment.seq <= self.executor.received:\n            return\n"
        "        if segment.seq != self.executor.received + 1:",
        "if segment.seq < self.executor.received:\n            return\n"
        "        if segment.seq > self.executor.received + 1:",
        ("tests/log/test_log.py",),
    ),
    Mutant(
        "who knows a session's name may come back to it",
        f"{_WORKER}/session/admission.py",
        'case "again" if found is not None and compare_digest(found.token, hello.token):',
        'case "again" if found is not None:',
        ("tests/cluster/test_sessions.py",),
    ),
    Mutant(
        "a recorded composite can go backward once",
        f"{_WORKER}/values/functions.py",
        "allow_unused=True, retain_graph=True",
        "allow_unused=True",
        ("tests/operators/test_autograd.py", "tests/python/test_gradients.py"),
    ),
    Mutant(
        "a session that was idle claims the time that it did not use",
        f"{_WORKER}/log/turns.py",
        "turn._account = max(turn._account, self._floor - _CREDIT)",
        "turn._account = min(turn._account, self._floor)",
        ("tests/worker/test_turns.py",),
    ),
    Mutant(
        "members on one device need memory once",
        f"{_WORKER}/log/budget.py",
        "more = nbytes * devices.count(device)",
        "more = nbytes",
        ("tests/worker/test_budget.py",),
    ),
    Mutant(
        "the last reason why a group has ended is told, and not the first",
        f"{_WORKER}/collectives/store.py",
        "self._ended = self._ended or reason",
        "self._ended = reason",
        ("tests/worker/test_store.py",),
    ),
    Mutant(
        "a poisoned value goes through a collective as zeros",
        f"{_WORKER}/collectives/taking_part.py",
        "begun.group.taint(begun.sequence, cause, self.node, self._tell)",
        "begun.group.tainted(begun.sequence, cause)",
        ("tests/collectives/test_groups.py",),
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
    parser.add_argument("--jobs", type=int, default=2, help="so many at the same time")
    parser.add_argument("--all", action="store_true", help="run all of `make test` for those that live on")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or any(word in m.name for word in given.only)]
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
