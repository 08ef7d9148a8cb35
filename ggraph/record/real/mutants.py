"""Faults that we put into a copy of llama.cpp, each a change of one statement, in our own words.

A mutant names a file, a function, a call (or an expression) in it, and what that becomes: nothing
of upstream's text is kept here. `expect` is what `verify` must say of `where`, the configuration
that reaches the statement; "proved" means that the statement is not needed there, and "nothing new"
that no cause is added to those for which the unmodified version is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ggraph.errors import InputError

SCHEDULER, CONTEXT = "ggml/src/ggml-backend.cpp", "src/llama-context.cpp"
ALLOCATOR = "ggml/src/ggml-alloc.c"
SPLITS = "ggml_backend_sched_compute_splits"
NEW, OLD = "0.3.36", "0.3.16"
NOTHING_NEW = "nothing new"


@dataclass(frozen=True)
class Mutant:
    """One fault. `which` is the occurrence of `call` in the function, per version (-1: the last);
    `{0}`, `{1}` in `becomes` are the call's arguments."""

    name: str
    what: str
    file: str
    function: str
    call: str
    which: Mapping[str, int]
    becomes: str
    where: str
    expect: str = "refused"

    def applied(self, text: str, version: str) -> str:
        """The file's text with the fault in it. InputError where the call is not there."""
        start, stop = _body(text, self.function)
        found = list(re.finditer(rf"\b{re.escape(self.call)}(?!\w)", text[start:stop]))
        try:
            chosen = found[self.which[version]]
        except (IndexError, KeyError):
            what = f"{self.function} of {version} has {len(found)} of {self.call}"
            raise InputError(f"{self.name}: {what}") from None
        at, end = start + chosen.start(), start + chosen.end()
        arguments: list[str] = []
        if text[end] == "(":
            arguments, end = _arguments(text, end + 1)
        return text[:at] + self.becomes.format(*arguments) + text[end:]


def _body(text: str, function: str) -> tuple[int, int]:
    """Where the definition of a function begins and ends."""
    for m in re.finditer(rf"\b{re.escape(function)}\(", text):
        brace = _end(text, m.end(), "(", ")")
        if text[brace : brace + 20].lstrip().startswith(("{", "const {", "noexcept {")):
            opened = text.index("{", brace)
            return opened, _end(text, opened + 1, "{", "}")
    raise InputError(f"no definition of {function}")


def _end(text: str, at: int, opening: str, closing: str) -> int:
    """Past the bracket that closes the one before `at`."""
    depth = 1
    while depth:
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        at += 1
    return at


def _arguments(text: str, at: int) -> tuple[list[str], int]:
    """The arguments of a call whose bracket was opened before `at`, and where the call ends."""
    end = _end(text, at, "(", ")")
    parts, depth = [""], 0
    for ch in text[at : end - 1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(ch, 0)
        if ch == "," and not depth:
            parts.append("")
        else:
            parts[-1] += ch
    return [p.strip() for p in parts], end


def _both(which: int) -> dict[str, int]:
    return {NEW: which, OLD: which}


NOTHING = "(void) 0"
MUTANTS = (
    Mutant(
        "no-synchronize",
        "the context no longer waits before the program reads logits",
        CONTEXT,
        "llama_context::synchronize",
        "ggml_backend_sched_synchronize",
        _both(0),
        NOTHING,
        "one",
    ),
    Mutant(
        "blocking-get",
        "logits are read by the buffer's get, which waits for no stream (PR 18039)",
        CONTEXT,
        "llama_context::decode",
        "ggml_backend_tensor_get_async",
        _both(0),
        "ggml_backend_tensor_get({1}, {2}, {3}, {4})",
        "one",
    ),
    Mutant(
        "no-source-sync",
        "a blocking copy between devices does not wait for its source",
        SCHEDULER,
        SPLITS,
        "ggml_backend_synchronize",
        {NEW: 5, OLD: 2},
        NOTHING,
        "two-no-peer",
    ),
    Mutant(
        "no-input-sync-prompt",
        "inputs are overwritten while an earlier micro-batch may read them",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_synchronize",
        {NEW: 1, OLD: 0},
        NOTHING,
        "prompt-two",
    ),
    Mutant(
        "no-input-sync-decode",
        "the same in decode, where the host has waited for the logits anyway",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_synchronize",
        {NEW: 1, OLD: 0},
        NOTHING,
        "two",
        "proved",
    ),
    Mutant(
        "no-reuse-sync",
        "a graph is reused without waiting for its last run",
        CONTEXT,
        "llama_context::process_ubatch",
        "ggml_backend_sched_synchronize",
        {NEW: 0},
        NOTHING,
        "two",
        "proved",
    ),
    Mutant(
        "no-split-wait",
        "a split without inputs does not wait for the split before it (#26040)",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_synchronize",
        {NEW: 0},
        NOTHING,
        "two",
        "proved",
    ),
    Mutant(
        "no-record",
        "the event that says a split is done is never recorded",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_record",
        _both(0),
        NOTHING,
        "prompt-two",
    ),
    Mutant(
        "record-slot-0",
        "every copy of the inputs shares the event of the first: later records wait for more",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_record",
        _both(0),
        "ggml_backend_event_record(sched->events[split_backend_id][0], {1})",
        "prompt-two",
        NOTHING_NEW,
    ),
    Mutant(
        "no-destination-wait",
        "no wait before a copy between devices: it waits on the stream that is ordered anyway",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_wait",
        _both(0),
        NOTHING,
        "two",
        "proved",
    ),
    Mutant(
        "wait-on-source",
        "the repair of the pipelined prompt: the stream that copies, if any, waits for the readers",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_wait",
        _both(0),
        "ggml_backend_event_wait(input_backend->iface.event_wait ? input_backend : {0}, {1})",
        "prompt-two",
        "proved",
    ),
    Mutant(
        "no-fallback-sync",
        "a blocking copy between devices does not wait for the readers of what it overwrites",
        SCHEDULER,
        SPLITS,
        "ggml_backend_event_synchronize",
        _both(-1),
        NOTHING,
        "prompt-two-vulkan",
    ),
    Mutant(
        "no-realloc-sync",
        "no wait before memory is laid out anew: the worst case was reserved, it never is",
        SCHEDULER,
        "ggml_backend_sched_alloc_splits",
        "ggml_backend_synchronize",
        _both(0),
        NOTHING,
        "prompt-two",
        NOTHING_NEW,
    ),
    Mutant(
        "blocking-get-embedding",
        "embeddings are read by the buffer's get, which waits for no stream",
        CONTEXT,
        "llama_context::decode",
        "ggml_backend_tensor_get_async",
        _both(2),
        "ggml_backend_tensor_get({1}, {2}, {3}, {4})",
        "embedding",
    ),
    Mutant(
        "freed-too-early",
        "the allocator gives a tensor's bytes away while views of it are still to be read",
        ALLOCATOR,
        "ggml_gallocr_alloc_graph_impl",
        "p_hn->n_views == 0",
        _both(0),
        "p_hn->n_views >= 0",
        "one",
    ),
    Mutant(
        "two-buffers",
        "the repair of -sm tensor: reductions take turns with two buffers for what arrives",
        "ggml/src/ggml-backend-meta.cpp",
        "ggml_backend_meta_graph_compute",
        "set_tmp_data",
        {NEW: 1},
        "(backend_ctx->backend_configs[{1}].bufs.resize(2 * backend_ctx->n_reduce_steps), "
        "set_tmp_data({0}, {1}, {2} + (i % 2) * backend_ctx->n_reduce_steps))",
        "sm-tensor",
        "proved",
    ),
)
