"""How much to draft: what promises to pay, and what can be afforded. Floor 9.

Legend: path_i chance that a draft is right up to its i-th token, e(K) what verifying K tokens costs
beyond a plain step, in plain steps, r tokens per plain step's time so far.

    worth of the first K tokens of a draft:  path_1 + .. + path_K - r e(K)

Chances are what the drafter says of each token (else a half), times what such words of it proved to
be worth in this text: every proposal is held against the text, whether it was verified or not.
Costs are measured (`costs.py`). An account bounds what a text can lose: whatever drafts bring and
cost is booked, and one whose failure would overdraw the account is not verified, nor is a drafter
asked whose guess would. The choice changes the speed only, never the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ggraph.decode.acceptance import Kept
from ggraph.decode.costs import LATE, NEXT, Costs
from ggraph.decode.draft import Draft

# Steps of plain decoding that drafts may lose in all, by the measured means: at once, and more with
# each token. The scatter of single steps comes on top.
DEBT, DEBT_PER_TOKEN = 0.45, 0.01
MARGIN = 1.1  # least r: drafts must promise a little more than they cost
BELIEF = 3.0  # right guesses that a drafter's word is taken to be worth before any was checked
FADING = 0.97  # weight of older proposals at each new one
UNSAID = 0.5  # the chance of a token of which the drafter says nothing
SURE = 0.98  # no chance is taken to be greater
FREE = 0.02  # a drafter whose guess costs less than this share of a step is always asked
HOPES = 10  # observations that the worth of asking in earlier texts counts as
DULL, PAUSE = 8, 4  # so many fruitless rounds, and a cheap drafter is asked in one of four only
FORGET = 0.05  # least weight of the newest worth of asking
SAYING = 0.15  # weight of the newest chance that a drafter gave its guess
BEGUN = 8.0  # tokens at plain speed with which the mean speed begins
HOPELESS = 0.03  # chance of a draft's end at which longer ones are not looked at
SAMPLE = 8  # steps of a kind of which one is looked at closely, once there were as many
SOON = 2  # rounds since it was asked after which a dear drafter's guess is late
PATIENCE = 8  # rounds before a dear drafter that did not pay is asked again; doubles
MOST_PATIENCE = 128


@dataclass(slots=True)
class Trust:
    """What a drafter's words proved to be worth: right guesses, and how many it had promised."""

    right: float = BELIEF
    promised: float = BELIEF

    def chance(self, said: float) -> float:
        """A chance that the drafter stated, corrected."""
        return min(SURE, said * self.right / self.promised)

    def check(self, said: float, right: bool) -> None:
        """Hold one statement against the text; the first belief fades too."""
        self.right = FADING * self.right + right
        self.promised = FADING * self.promised + said


@dataclass(slots=True)
class Habits:
    """What is known of one drafter in this text."""

    name: str
    price: float = FREE  # of a guess, in plain steps, where the drafter is asked round by round
    late_price: float = FREE  # of one behind a pause
    next_price: float = FREE  # of each further one of a draft
    late: bool = False  # whether that is what it is asked for now
    trust: dict[int, Trust] = field(default_factory=dict)  # class of statements -> their worth
    next_said: dict[int, float] = field(default_factory=dict)  # guess number -> mean chance
    asking: float = 0.0  # mean worth of asking, its cost deducted
    asked: int = HOPES
    patience: int = PATIENCE
    waiting: int = 0
    dull: int = 0  # rounds in which nothing of it was worth verifying, one after another
    states: bool = False  # whether it says how sure it is

    def cost(self, guesses: int) -> float:
        """What a draft of so many guesses costs, in plain steps, where it is asked steadily."""
        return self.price + (guesses - 1) * self.next_price


@dataclass
class Adaptive:
    """The model and the account of this file's head. `most` bounds the length.

    `whole` is for trees, whose depth does not grow by a node: all of `most`, or nothing. `costs`
    may be shared by the policies of many texts, one after another.

    A round without a draft must cost next to nothing, and everything that Python touches is out of
    the processor's caches after a step: hence what follows from costs is kept ready, and renewed
    when a draft was verified or several plain steps were made.
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
    _plain: int = 0  # plain steps so far
    _drafted: int = 0  # steps with a draft
    _class: int = -1
    _extra: list[float] = field(default_factory=list)  # by drafted tokens
    _open: bool = False  # whether a draft of one token can be afforded

    @property
    def speed(self) -> float:
        """Tokens per plain step's time so far, by mean costs."""
        steps = self._steps - BEGUN
        return (self._tokens - BEGUN) / steps if steps else 1.0

    def begin(self, past: int) -> None:
        """Costs are those of a text of this length."""
        if past.bit_length() != self._class:
            self._class = past.bit_length()
            self.costs.settle(past)
            self._renew()
        if self._offers:
            self._offers.clear()

    def hopes(self, drafter: str) -> bool:
        """Whether asking it was worth its while in earlier texts, or was never tried."""
        return self._of(drafter).asking > 0

    def length(self, drafter: str, most: int, held: float) -> int:
        """All that may be useful of a drafter that is cheap to ask; of a dear one only where asking
        it has paid so far, or its turn to be tried again has come."""
        most = min(self.most, most)
        if most <= 0 or not self._open:  # before a plain step was measured, too
            return 0
        habits = self._of(drafter)
        if self.whole:
            whole = habits.price + self._extra[most]
            return most if self._unknown(most) or self._asks(habits, held, whole) else 0
        if habits.price < FREE:
            return most if self._hears(habits) else 0
        if not self._asks(habits, held, habits.price + self._extra[1]):
            return 0
        return most if habits.states else self._ordered(habits, most)

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
            path *= self._trust(habits, i, said, True).chance(said)
        price = habits.next_price + self._extra[made + 1] - self._extra[made]
        affordable = habits.cost(made + 1) + self._extra[made + 1] <= self.credit
        return affordable and path > self._rate() * price

    def weigh(self, drafter: str, draft: Draft, seconds: float) -> tuple[Draft, float]:
        """The length of the greatest worth that the account can bear; drafting is booked."""
        habits = self._of(drafter)
        dear = habits.price >= FREE
        guesses = max(1, len(draft)) if dear and not self.whole else 1  # else asking is what costs
        if dear or self._plain % SAMPLE == 0:
            self.costs.note_guesses(drafter, guesses, seconds, late=habits.late)
            self._price(habits)
        spent = habits.cost(guesses)
        paid = spent + (habits.late_price - habits.price if habits.late else 0.0)
        self.credit -= paid
        self._steps += paid
        # Asking is judged by what it costs round by round, `spent`. Else a drafter that is hardly
        # ever asked, and has more to read each time, seems too dear to be asked more often.
        habits.dull += 1
        if not draft:
            return draft, 0.0
        self._offers.append((habits, draft, spent))
        habits.states = bool(draft.chances)
        count, worth = self._best(habits, draft)
        if spent >= FREE:
            self._asked(habits, draft, worth - self._rate() * spent)
        if count:
            habits.dull = 0
        return draft.first(count), worth

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Book the round, and hold every proposal against the text."""
        gained = len(kept.tokens)
        self.credit += DEBT_PER_TOKEN * gained
        self._tokens += gained
        if draft:
            extra = self._verified(len(draft), seconds)
            self.credit += gained - 1 - extra
            self._steps += 1 + extra
        else:
            self._steps += 1
            self._plain += 1
            if self._plain % SAMPLE == 0 or self._plain < SAMPLE:
                self.costs.note_step(1, seconds)
                self._renew()
        self._open = bool(self._extra) and self._extra[1] <= self.credit
        for habits, offer, spent in self._offers:
            self._check(habits, offer, draft, kept)
            if spent >= FREE:
                verified = draft and offer.tokens[: len(draft)] == draft.tokens
                price = spent + self._extra[len(draft)] if verified else spent
                brought = gained - 1 if verified else 0
                self.costs.note_worth(habits.name, brought - self._rate() * price)

    def _verified(self, count: int, seconds: float) -> float:
        """Note what verifying `count` tokens took; returns what it costs beyond a plain step. What
        that says of other lengths can wait, unless little is known yet."""
        self.costs.note_step(count + 1, seconds)
        self._drafted += 1
        if self._drafted % SAMPLE == 0 or self._drafted < SAMPLE or not self._extra:
            self._renew()
        else:
            self._extra[count] = self.costs.extra(count + 1)
        return self._extra[count]

    def _renew(self) -> None:
        """What follows from costs; nothing is open before a plain step was measured."""
        costs = self.costs
        if costs.plain:
            self._extra = [costs.extra(n + 1) for n in range(self.most + 1)]
            self._open = self.most > 0 and self._extra[1] <= self.credit
            for habits in self._habits.values():
                self._price(habits)

    def _asked(self, habits: Habits, draft: Draft, gain: float) -> None:
        """Note what asking a dear drafter was worth."""
        for i, said in enumerate(draft.chances):
            mean = habits.next_said.get(i, UNSAID)
            habits.next_said[i] = mean + SAYING * (said - mean)
        habits.asked += 1
        habits.asking += max(FORGET, 1 / habits.asked) * (gain - habits.asking)

    def _of(self, drafter: str) -> Habits:
        found = self._habits.get(drafter)
        if found is None:
            found = self._habits[drafter] = Habits(drafter, asking=self.costs.worth(drafter))
            self._price(found)
        return found

    def _price(self, habits: Habits) -> None:
        """What a guess costs by now."""
        habits.price = self.costs.guess(habits.name)
        habits.late_price = self.costs.guess(habits.name, LATE)
        habits.next_price = self.costs.guess(habits.name, NEXT)

    def _rate(self) -> float:
        """What a step's time has brought, and must bring."""
        return max(MARGIN, self._tokens / self._steps)

    def _hears(self, habits: Habits) -> bool:
        """Whether to ask a cheap drafter: its price is small, but text that nobody foresees would
        pay it in every round."""
        habits.waiting += 1
        pausing = habits.dull >= DULL and habits.waiting % PAUSE != 0
        return not pausing and habits.price + self._extra[1] <= self.credit

    def _asks(self, habits: Habits, held: float, price: float) -> bool:
        """Whether to ask a drafter whose guess costs something."""
        habits.waiting += 1
        late = habits.waiting > SOON
        if late:
            price += habits.late_price - habits.price
        if price > self.credit:
            return False
        if habits.asking > 0:
            if habits.asking <= held:
                return False
            habits.patience = PATIENCE
        elif habits.waiting < habits.patience:
            return False
        else:
            habits.patience = min(2 * habits.patience, MOST_PATIENCE)
        habits.waiting, habits.late = 0, late
        return True

    def _ordered(self, habits: Habits, most: int) -> int:
        """How many guesses to order at once of a dear drafter that does not say how sure it is."""
        best, worth, total, path = 1, 0.0, 0.0, 1.0
        for k in range(1, most + 1):
            price = habits.cost(k) + self._extra[k]
            if price > self.credit:
                break
            path *= self._trust(habits, k - 1, UNSAID, False).chance(UNSAID)
            total += path
            if total - self._rate() * price > worth:
                best, worth = k, total - self._rate() * price
        return best

    def _trust(self, habits: Habits, depth: int, said: float, states: bool) -> Trust:
        """Statements of about the same chance are trusted alike; without any, those of a depth."""
        key = int(4 * said) if states else -1 - depth
        found = habits.trust.get(key)
        if found is None:
            found = habits.trust[key] = Trust()
        return found

    def _best(self, habits: Habits, draft: Draft) -> tuple[int, float]:
        """How many of the draft's tokens are worth most, and how much; (0, 0.0) where none are."""
        rate = self._rate()
        if self.whole:
            return self._all_of(habits, draft, rate)
        extra, chances, total, path = self._extra, draft.chances, 0.0, 1.0
        best, worth = 0, 0.0
        longest = max(1, self.costs.longest)  # unknown lengths are tried one after another
        for n in range(1, min(len(draft), self.most, longest) + 1):
            said = chances[n - 1] if chances else UNSAID
            path *= self._trust(habits, n - 1, said, bool(chances)).chance(said)
            total += path
            if extra[n] > self.credit or path < HOPELESS:
                break
            if total - rate * extra[n] > worth or n == self.least:
                best, worth = n, total - rate * extra[n]
        return (best, worth) if worth > 0 else (0, 0.0)

    def _all_of(self, habits: Habits, draft: Draft, rate: float) -> tuple[int, float]:
        """The same for a tree, whose depths are the tokens that it may bring."""
        total, path = 0.0, 1.0
        for depth in range(max(draft.depths(), default=0)):
            path *= self._trust(habits, depth, UNSAID, False).chance(UNSAID)
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
            self._trust(habits, depth, said, stated).check(said, right)
            if not right:
                return
            habits.patience = PATIENCE
