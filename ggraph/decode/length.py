"""How much to draft: what promises to pay, and what can be afforded.

Legend: path_i chance that a draft is right up to its i-th token, e(K) what verifying K tokens costs
beyond a plain step, in plain steps, r tokens per plain step's time so far.

    worth of the first K tokens of a draft:  path_1 + .. + path_K - r e(K)

Chances are what the drafter says of each token (else a half), times what such words of it proved to
be worth in this text: every proposal is held against the text, whether it was verified or not.
Costs are measured (`costs.py`). An account bounds what a text can lose: whatever drafts bring and
cost is booked, and one whose failure would overdraw the account is not verified, nor is a drafter
asked whose guess would; of a step's cost the share counts that is at stake, for one token pays for
it. Behind a prompt there is next to nothing to lose, so that what decides is the guess that a head
makes when it reads the prompt: a sure one that proves right opens the account. The choice changes
the speed only, never the text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggraph.decode.acceptance import Kept
from ggraph.decode.costs import LATE, NEXT, Costs
from ggraph.decode.draft.tree import Draft
from ggraph.decode.habits import FREE, MOST_PATIENCE, PATIENCE, UNSAID, Habits

# Steps of plain decoding that drafts may lose in all, by the measured means: at once, and more with
# each token. What single steps cost beyond their mean comes on top. At once, it is in any case what
# one sure token of a cheap drafter takes: where that is too dear, nothing would ever be tried.
DEBT, DEBT_PER_TOKEN = 0.1, 0.006
RISK = 0.5  # share of a step's cost that is taken to be at stake, however sure its first token is
MARGIN = 1.1  # least r: drafts must promise a little more than they cost
BEGUN = 8.0  # tokens at plain speed with which the mean speed begins
HOPELESS = 0.03  # chance of a draft's end at which longer ones are not looked at
SAMPLE = 8  # steps of a kind of which one is looked at closely, once there were as many
STALE = 24  # rounds with drafts after which a plain step is made, to know what one costs by now
FEW = 4  # steps of a kind after each of which what they cost is worked out
SOON = 2  # rounds since it was asked after which a dear drafter's guess is late


@dataclass
class Adaptive:
    """The model and the account of this file's head. `most` bounds the length.

    `whole` is for trees, whose depth does not grow by a node: all of `most`, or nothing. `costs`
    may be shared by the policies of many texts, one after another.

    A round without a draft must cost next to nothing, and everything that Python touches is out of
    the processor's caches after a step: hence the rounds in which nobody would be asked are known
    beforehand (`rest`), and what follows from costs is kept ready, and renewed now and then.
    """

    most: int = 8
    least: int = 0
    whole: bool = False
    costs: Costs = field(default_factory=Costs)
    credit: float = DEBT  # steps that drafts may still lose
    _habits: dict[str, Habits] = field(default_factory=dict)
    _offers: list[tuple[Habits, Draft, float]] = field(default_factory=list)  # and their price
    _tokens: float = BEGUN  # so far, with some at plain speed for a beginning
    _steps: float = BEGUN  # what they took
    _questions: int = 0  # so far
    _plain: int = 0  # plain steps
    _drafted: int = 0  # steps with a draft
    _since: int = 0  # rounds in which somebody might be asked, since the last rest
    _read: str = ""  # the drafter whose next guess is there already
    _class: int = -1
    _extra: list[float] = field(default_factory=list)  # by drafted tokens
    _host: tuple[float, float] = 0.0, 0.0  # beside, without a draft and with one
    _asking: bool = False  # whether somebody was asked in this round
    _asked: float = 0.0  # what a plain step costs more where somebody was asked

    @property
    def speed(self) -> float:
        """Tokens per plain step's time so far, by mean costs."""
        steps = self._steps - BEGUN
        return (self._tokens - BEGUN) / steps if steps else 1.0

    def rest(self, drafters: Sequence[str], past: int) -> int:
        """Rounds in which none of them will be asked: their turn has not come, or not even one
        token could be afforded. Now and then two, to know what a plain step costs by now."""
        self._at(past)
        if not self._extra or self._since >= STALE:
            return 2
        return max(0, min((self._wait(self._of(name)) for name in drafters), default=0))

    def rested(self, steps: int, first: float, others: float) -> None:
        """Plain steps cost what they cost; nothing is booked. The first, which finds the caches as
        another round left them, does not tell what one costs, unless nothing else does."""
        self._read = ""
        self.credit += DEBT_PER_TOKEN * steps
        self._tokens += steps
        self._steps += steps
        self._since = 0
        for habits in self._habits.values():
            habits.waiting += steps
        if steps > 1 or not self.costs.plain:
            self.costs.note_step(1, others / (steps - 1) if steps > 1 else first)
        if not self._extra or self._plain // SAMPLE < (self._plain + steps) // SAMPLE:
            self._renew()
        self._plain += steps

    def begin(self, past: int) -> None:
        """Costs are those of a text of this length."""
        self._at(past)
        self._asking = False
        if self._offers:
            self._offers.clear()

    def hopes(self, drafter: str) -> bool:
        """Whether asking it was worth its while in earlier texts, or was never tried."""
        return self._of(drafter).asking > 0

    def was_read(self, drafter: str) -> None:
        """Its first guess belongs to the prompt: in the next round, asking costs nothing. Of a tree
        that would be the least part."""
        self._read = "" if self.whole else drafter

    def length(self, drafter: str, most: int, held: float) -> int:
        """All that may be useful of a drafter that is cheap to ask; of a dear one only where asking
        it has paid so far, or its turn to be tried again has come."""
        most = min(self.most, most)
        if most <= 0 or not self._extra:  # before a plain step was measured, too
            return 0
        habits = self._of(drafter)
        turn = self._wait(habits) <= 0
        habits.waiting += 1
        if habits.is_cheap:
            if turn:
                habits.late, habits.waiting = False, 0
            return most if turn else 0
        if not turn or (0 < habits.asking <= held and drafter != self._read):
            return 0
        habits.late, habits.waiting = habits.waiting > SOON, 0
        hopeful = habits.asking > 0
        habits.patience = PATIENCE if hopeful else min(2 * habits.patience, MOST_PATIENCE)
        return most if habits.states or self.whole else self._ordered(habits, most)

    def goes_on(self, drafter: str, chances: Sequence[float]) -> bool:
        """Whether the next guess promises more than its own step and its row cost."""
        made = len(chances)
        if made == 0:
            return True
        if made >= self.most:
            return False
        habits = self._of(drafter)
        path = habits.next_said.get(made, UNSAID)
        for i, said in enumerate(chances):
            path *= habits.trusted(i, said, True).chance(said)
        price = habits.next_price + self._extra[made + 1] - self._extra[made]
        affordable = habits.cost(made + 1) + self._extra[made + 1] <= self.credit
        return affordable and path > self._rate() * price

    def weigh(self, drafter: str, draft: Draft, seconds: float) -> tuple[Draft, float]:
        """The length of the greatest worth that the account can bear; drafting is booked."""
        habits, self._asking = self._of(drafter), True
        cheap = habits.is_cheap
        guesses = 1 if cheap or self.whole else max(1, len(draft))  # else asking is what costs
        is_read = drafter == self._read
        if is_read:
            self._read = ""
        else:
            self.costs.note_guesses(drafter, guesses, seconds, late=habits.late)
        self._questions += 1
        if self._questions % SAMPLE == 0 or self._questions < 2 * SAMPLE:
            self._price(habits)
        spent = habits.cost(guesses)
        first = 0.0 if is_read else habits.late_price if habits.late else habits.price
        paid = spent - habits.price + first
        self.credit -= paid
        self._steps += paid
        # Asking is judged by what it costs round by round, `spent`. Else a drafter that is hardly
        # ever asked, and has more to read each time, seems too dear to be asked more often.
        habits.dull += 1
        count, worth = 0, 0.0
        if draft:
            self._offers.append((habits, draft, spent))
            habits.states = bool(draft.chances)
            count, worth = self._best(habits, draft)
            if count:
                habits.dull = 0
            if not cheap:
                habits.was_asked(draft.chances, worth - self._rate() * spent)
        habits.settle()
        return draft.first(count), worth

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Book the round, and hold every proposal against the text."""
        gained, self._read = len(kept.tokens), ""
        self.credit += DEBT_PER_TOKEN * gained
        self._tokens += gained
        extra = self._verified(len(draft), seconds) + self._host[bool(draft)]
        self.credit += gained - 1 - extra
        self._steps += 1 + extra
        for habits, offer, spent in self._offers:
            self._check(habits, offer, draft, kept)
            if not habits.is_cheap:
                verified = draft and offer.tokens[: len(draft)] == draft.tokens
                price = spent + self._extra[len(draft)] if verified else spent
                brought = gained - 1 if verified else 0
                self.costs.note_worth(habits.name, brought - self._rate() * price)

    def note_host(self, drafted: bool, seconds: float) -> None:
        """What rounds take beside is booked by the mean."""
        self.costs.note_host(drafted, seconds)

    def _at(self, past: int) -> None:
        """The text has `past` tokens now."""
        if past.bit_length() != self._class:
            self._class = past.bit_length()
            self.costs.settle(past)
            self._renew()

    def _verified(self, count: int, seconds: float) -> float:
        """Note what a step with `count` drafted tokens took; returns what it costs beyond plain
        decoding's. What that says of other lengths can wait, unless little is known yet."""
        self._since += 1
        behind = self._asking and count == 0 and self.costs.plain > 0
        note = self.costs.note_step
        noted = self.costs.note_asked(seconds) if behind else note(count + 1, seconds)
        if count:
            self._drafted += 1
        else:
            self._plain += 1
        if noted <= FEW or (self._plain + self._drafted) % SAMPLE == 0 or not self._extra:
            self._renew()
        return self._asked if behind else self._extra[count]

    def _renew(self) -> None:
        """What follows from costs; nothing is open before a plain step was measured."""
        costs = self.costs
        if costs.plain:
            if not self._extra:
                self.credit = max(self.credit, RISK * costs.extra(2) + FREE)
            self._extra = costs.extras(self.most + 1)
            self._host = costs.host(False), costs.host(True)
            self._asked = costs.asked()
            for habits in self._habits.values():
                self._price(habits)

    def _of(self, drafter: str) -> Habits:
        found = self._habits.get(drafter)
        if found is None:
            found = self._habits[drafter] = Habits(drafter, asking=self.costs.worth(drafter))
            self._price(found)
        return found

    def _price(self, habits: Habits) -> None:
        """What a guess costs by now."""
        guess, name = self.costs.guess, habits.name
        habits.priced(guess(name), guess(name, LATE), guess(name, NEXT))

    def _rate(self) -> float:
        """What a step's time has brought, and must bring."""
        return max(MARGIN, self._tokens / self._steps)

    def _wait(self, habits: Habits) -> int:
        """Rounds before a drafter may be asked; none of a tree whose cost nobody knows."""
        is_read = habits.name == self._read
        wait = 0 if is_read else habits.pause - habits.waiting - 1
        if self.whole and self._unknown(self.most):
            return wait
        is_late = habits.waiting >= SOON and not habits.is_cheap
        price = 0.0 if is_read else habits.late_price if is_late else habits.price
        step = self._extra[self.most if self.whole else min(1, self.most)]
        stake = step * RISK if is_read or habits.is_cheap else step
        short = price + stake - self.credit
        return max(wait, math.ceil(short / DEBT_PER_TOKEN)) if short > 0 else wait

    def _ordered(self, habits: Habits, most: int) -> int:
        """How many guesses to order at once of a dear drafter that does not say how sure it is."""
        best, worth, total, path = 1, 0.0, 0.0, 1.0
        for k in range(1, most + 1):
            price = habits.cost(k) + self._extra[k]
            if price > self.credit:
                break
            path *= habits.trusted(k - 1, UNSAID, False).chance(UNSAID)
            total += path
            if total - self._rate() * price > worth:
                best, worth = k, total - self._rate() * price
        return best

    def _best(self, habits: Habits, draft: Draft) -> tuple[int, float]:
        """How many of the draft's tokens are worth most, and how much; (0, 0.0) where none are."""
        rate = self._rate()
        if self.whole:
            return self._all_of(habits, draft, rate)
        extra, chances, total, path = self._extra, draft.chances, 0.0, 1.0
        best, worth, at_stake = 0, 0.0, 1.0
        longest = max(1, self.costs.longest)  # unknown lengths are tried one after another
        for n in range(1, min(len(draft), self.most, longest) + 1):
            said = chances[n - 1] if chances else UNSAID
            path *= habits.trusted(n - 1, said, bool(chances)).chance(said)
            total += path
            if n == 1:  # a token pays for any step
                at_stake = max(RISK, 1 - path)
            value = total - rate * extra[n]
            if at_stake * extra[n] > self.credit or path < HOPELESS:
                break
            if value > worth or n == self.least:
                best, worth = n, value
        return (best, worth) if worth > 0 else (0, 0.0)

    def _all_of(self, habits: Habits, draft: Draft, rate: float) -> tuple[int, float]:
        """The same for a tree, whose depths are the tokens that it may bring."""
        total, path = 0.0, 1.0
        for depth in range(max(draft.depths(), default=0)):
            path *= habits.trusted(depth, UNSAID, False).chance(UNSAID)
            total += path
        if self._unknown(len(draft)):
            return len(draft), total
        worth = total - rate * self._extra[min(len(draft), self.most)]
        return (len(draft), worth) if worth > 0 else (0, 0.0)

    def _unknown(self, nodes: int) -> bool:
        """Whether no step as large as a tree's was measured: one is tried then, since a tree may be
        dear by what is assumed and cheap in truth."""
        return self.costs.longest <= nodes

    def _check(self, habits: Habits, offer: Draft, draft: Draft, kept: Kept) -> None:
        """Hold a proposal against what the text became, as far as that is known."""
        stated = bool(offer.chances) and not self.whole
        if offer.is_chain:
            pairs = zip(offer.tokens, kept.tokens, strict=False)
            results = [guess == token for guess, token in pairs]
        elif offer is not draft:
            return  # how far a tree would have been right is known of the verified one only
        else:
            results = [d < len(kept.nodes) for d in range(max(offer.depths(), default=0))]
        for depth, right in enumerate(results):
            said = offer.chances[depth] if stated else UNSAID
            habits.trusted(depth, said, stated).check(said, right)
            if not right:
                return
            if habits.patience > PATIENCE:
                habits.patience = PATIENCE
                habits.settle()
