"""Which replica a request goes to: the one that has read most of its prompt, unless it has too much
to do.

Legend: a block is `BLOCK` letters of a prompt; its name hashes it with all blocks before it.

`Routes` keeps the names of the blocks that each replica has read lately, as many as its cache
holds. The longest beginning wins, and of equals the replica with less to do. A replica that is
more than `slack` requests ahead of the least busy one takes no request for its cache's sake: then
the next longest beginning counts, and at last the better of two drawn at random. What belongs
together by name (a session) stays where it was, within the same bound: a beginning that is computed
twice costs less than a queue. What goes on from a response that one replica keeps goes there.
"""

import json
import random
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 128  # letters
MOST_BLOCKS = 2048  # of one prompt; those behind them are not looked at
MOST_NAMES = 1 << 16  # of sessions and responses


@dataclass(frozen=True)
class Wish:
    """What routing looks at: names of a prompt's blocks, of a response that it cannot do without,
    and of what it belongs to."""

    blocks: tuple[int, ...] = ()
    needs: str = ""
    belongs: tuple[str, ...] = ()
    name: str = ""  # under which others may belong to this one
    avoid: frozenset[str] = frozenset()  # replicas that failed it
    tried: list[str] = field(default_factory=list, compare=False)  # where it went, the last last


def blocks_of(text: str) -> tuple[int, ...]:
    """Names of a prompt's whole blocks, the first one first."""
    found, last = [], 0
    for at in range(0, min(len(text), MOST_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        last = hash((last, text[at : at + BLOCK]))
        found.append(last)
    return tuple(found)


def wish_of(asked: Mapping[str, Any], session: str, name: str, avoid: Iterable[str] = ()) -> Wish:
    """The wish of a request's body."""
    before = asked.get("previous_response_id")
    needs = before if isinstance(before, str) else _referred(asked.get("input"))
    belongs = [n for n in (session, asked.get("user")) if isinstance(n, str) and n]
    blocks = blocks_of(prompt_text(asked))
    return Wish(blocks, needs, tuple(belongs), name, frozenset(avoid))


def kept_in(path: str) -> str:
    """The kept response that an address names, "" where it names none."""
    found = re.match("/v1/responses/([^/?]+)", path)
    return found[1] if found else ""


def kept_with(item: str) -> str:
    """The response that an item's id names, of whose output or input it is; "" where it names
    none."""
    found = re.fullmatch(r"(?:msg|fc|item)_([0-9a-f]+)(?:_\d+)?", item)
    return f"resp_{found[1]}" if found else ""


def _referred(given: Any) -> str:
    """The response of the last item that an input names."""
    for item in reversed(given) if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type") == "item_reference":
            return kept_with(str(item.get("id")))
    return ""


def prompt_text(asked: Mapping[str, Any]) -> str:
    """The letters of a prompt, about in the order in which a template puts them."""
    parts = [json.dumps(asked["tools"])] if asked.get("tools") else []
    for key in ("instructions", "system", "messages", "prompt", "input"):
        parts += _words(asked.get(key))
    return "\n".join(parts)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return [" ".join(map(str, value))]
        return [w for v in value for w in _words(v)]
    if isinstance(value, dict):
        return [w for key in ("role", "content", "text") for w in _words(value.get(key))]
    return []


@dataclass(eq=False)
class Routes:
    """Where beginnings and names are. `room` is how many blocks a replica's cache holds."""

    room: int
    slack: int
    chance: random.Random = field(default_factory=random.Random)
    _holders: dict[int, set[str]] = field(default_factory=dict)  # of a block
    _held: dict[str, OrderedDict[int, None]] = field(default_factory=dict)  # by a replica
    _names: OrderedDict[str, str] = field(default_factory=OrderedDict)  # -> replica

    def choose(self, wish: Wish, loads: Mapping[str, int]) -> list[str]:
        """The replicas that may take a request, the best first; `loads` is what each has to do."""
        open_to = {r: n for r, n in loads.items() if r not in wish.avoid} or dict(loads)
        if not open_to:
            return []
        bound = min(open_to.values()) + self.slack
        free = {r for r, n in open_to.items() if n <= bound}
        ranked = [r for r in [self._names.get(wish.needs, "")] if r in open_to]
        ranked += [r for n in wish.belongs if (r := self._names.get(n, "")) in free][:1]
        depths = self.depths(wish.blocks, free)
        ranked += sorted(depths, key=lambda r: (-depths[r], open_to[r], r))
        others = self.chance.sample(sorted(open_to), len(open_to))
        ranked += sorted(others[:2], key=lambda r: open_to[r])
        return list(dict.fromkeys([*ranked, *sorted(others, key=lambda r: open_to[r])]))

    def depths(self, blocks: Sequence[int], among: set[str]) -> dict[str, int]:
        """How many of the first blocks each replica has read; those that have read none lack."""
        found, left = dict[str, int](), among
        for depth, block in enumerate(blocks, 1):
            left = left & self._holders.get(block, set())
            if not left:
                break
            found.update(dict.fromkeys(left, depth))
        return found

    def went(self, wish: Wish, replica: str) -> None:
        """A request has gone to a replica."""
        held = self._held.setdefault(replica, OrderedDict())
        for block in reversed(wish.blocks):  # so that ends are forgotten before beginnings
            held[block] = None
            held.move_to_end(block)
            self._holders.setdefault(block, set()).add(replica)
        while len(held) > self.room:
            self._forget(held.popitem(last=False)[0], replica)
        for name in (*wish.belongs, wish.name):
            if name:
                self._names[name] = replica
                self._names.move_to_end(name)
        while len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all others."""
        for gone in set(self._held) - set(replicas):
            for block in self._held.pop(gone):
                self._forget(block, gone)

    def _forget(self, block: int, replica: str) -> None:
        holders = self._holders[block]
        holders.discard(replica)
        if not holders:
            del self._holders[block]
