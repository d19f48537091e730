"""What the bundled model learns from: stories, lists of pairs to recall, and the tokenizer for both. All of it is made here."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tiny_stories import PEOPLE, story
from scripts.tiny_tokenizer import BOS, EOS, ROLES, TASKS

VOCAB_SIZE = 1824
BOS_ID, EOS_ID = 0, 1
ADDED = (*ROLES, *TASKS)
KEY_WORDS = """
acorn agate alder amber anise apron arrow aspen aster atlas badge bagel barge baron basil baton beach beacon beryl birch bison
bloom board brass briar brick brook broom brush cabin cable camel canal candle canoe cargo carol cedar chalk charm cheese
cherry cider clay cliff cloak clock cloud clover coast comet coral cotton couch crane crown curry daisy delta denim diary dome
dove dragon drum dune eagle easel elbow elder elm ember emerald fable fern ferry fiddle finch flint flute foam fossil frost
galaxy garnet gate ginger glass globe glove grape gravel grove guitar gull hammer harp hawk hazel heron holly honey hornet
indigo iron island ivory ivy jacket jade jasmine jelly jewel kettle knot ladder lagoon lantern larch lark lava lemon lilac
linen lion lotus magnet mango
"""
KEYS = KEY_WORDS.split()
VALUE_WORDS = """
marble meadow melon mint mirror mocha moose moss moth mural myrtle needle nettle nickel north nutmeg oasis ocean olive onion
opal orbit orchid otter oval oyster paddle palm panda paper pearl pebble pepper petal piano pigeon pillow pilot planet plum
polar poppy porch prism puffin pulley pumpkin quail quartz quill quilt rabbit radar raven reef ribbon ridge robin rocket rose
ruby saddle sage salmon salt sand satin shell shovel silk silver skate slate smoke snail snow socket sofa solar sonar spade
spark spice spider spoon spruce squid star steam steel stone storm straw sugar summit swan syrup table tango teapot temple
thistle thunder ticket tiger timber toast topaz torch tower trout trumpet tulip tunnel turtle turnip valley vanilla velvet
violet violin walnut whale wheat yarn zebra zephyr zinc
"""
VALUES = VALUE_WORDS.split()
QUESTIONS = ("What is {key}?", "What is the value of {key}?", "Tell me {key}.")
TOPIC = "Tell me a story about {name}."
CONTINUE = "Continue: "
HELD_OUT_SEED = 1_000_003  # stories and prompts of this seed and above are never trained on

Ids = NDArray[np.int64]


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE with BOS 0, EOS 1 and the released names as the last ids. Raises ValueError when a key or value is not
    one token, both at the start of a line and after a space."""
    rng = random.Random(seed)
    texts = [" ".join(story(rng)) + "\n" for _ in range(4000)]
    for _ in range(40):
        texts += [f"{key} = {value}\n{value} {key}" for key, value in zip(KEYS, rng.sample(VALUES, len(VALUES)), strict=True)]
    texts += [pattern.format(key=key, name=name) for pattern in (*QUESTIONS, TOPIC) for key in KEYS for name in PEOPLE]
    texts += [CONTINUE] * 200
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in (BOS, EOS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    broken = [w for word in (*KEYS, *VALUES) for w in (word, f" {word}") if len(bpe.encode(w).ids) != 1]
    if broken or bpe.get_vocab_size() > VOCAB_SIZE:
        raise ValueError(f"vocabulary of {bpe.get_vocab_size()}; words of several tokens: {broken}")
    return bpe


@dataclass(frozen=True)
class Sequence:
    """ids [T]; learn [T]: whether the token is to be predicted and not a free choice (a pair of a list, a question's key);
    source [T]: for a recalled value where it stands in the list, else -1."""

    ids: Ids
    learn: NDArray[np.bool_]
    source: Ids


@dataclass(frozen=True)
class RecallPrompt:
    """A chat prompt that ends before the answer, what must come (value, EOS), and where its pair stands."""

    ids: list[int]
    answer: list[int]
    key: str
    value: str
    pair_at: int


@dataclass
class Piece:
    """Tokens that are joined to others. free: those that cannot be known. key: of a pair whose value is token `value`, in a
    list, or recalled from it."""

    ids: Ids
    free: tuple[int, ...] = ()
    key: int = -1
    value: int = -1
    recalled: bool = False

    def without_first(self) -> Piece:
        return Piece(self.ids[1:], tuple(i - 1 for i in self.free), self.key, self.value - 1, self.recalled)


def join(pieces: list[Piece], length: int) -> Sequence:
    """The first `length` tokens; there must be as many."""
    ids = np.concatenate([piece.ids for piece in pieces])
    if len(ids) < length:
        raise ValueError(f"{len(ids)} tokens, {length} wanted")
    learn, source = np.ones(len(ids), dtype=np.bool_), np.full(len(ids), -1)
    at = 0
    listed: dict[int, int] = {}  # key -> where its value stands
    for piece in pieces:
        learn[[at + i for i in piece.free]] = False
        if piece.recalled:
            source[at + piece.value] = listed[piece.key]
        elif piece.key >= 0:
            listed[piece.key] = at + piece.value
        at += len(piece.ids)
    return Sequence(ids[:length], learn[:length], source[:length])


class World:
    """A tokenizer, a pool of stories as tokens, and everything that is made of them."""

    def __init__(self, tokenizer: Tokenizer, seed: int, stories: int) -> None:
        self.tokenizer = tokenizer
        rng = random.Random(seed)
        texts = [" ".join(story(rng)) + "\n" for _ in range(stories)]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        self.starts = np.cumsum([0, *map(len, encoded)])
        self.pool: Ids = np.fromiter((i for ids in encoded for i in ids), dtype=np.int64, count=int(self.starts[-1]))
        self.user, self.assistant, self.no_think = (self._one(name) for name in ("<｜User｜>", "<｜Assistant｜>", "</think>"))
        self.newline, self.equals, self.full_stop = (self._one(text) for text in ("\n", " =", "."))
        self.key_at_start, self.key = [self._one(k) for k in KEYS], [self._one(f" {k}") for k in KEYS]
        self.value_at_start, self.value = [self._one(v) for v in VALUES], [self._one(f" {v}") for v in VALUES]
        self.questions = [self._split_question(pattern) for pattern in QUESTIONS]
        self.topics = {name: self.encode(TOPIC.format(name=name)) for name in PEOPLE}
        self.people = {i: name for name in PEOPLE for i in (self._one(name), self._one(f" {name}"))}
        self.continue_ = self.encode(CONTINUE.rstrip())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def same_word(self) -> list[tuple[int, int]]:
        """Pairs of tokens that are one word, without and with a space before it."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=False)
        return sorted((plain, vocabulary[f"Ġ{word}"]) for word, plain in vocabulary.items() if f"Ġ{word}" in vocabulary)

    def recall_words(self) -> list[int]:
        """Tokens of all keys and values."""
        return [*self.key_at_start, *self.key, *self.value_at_start, *self.value]

    # ---- recall

    def recall_sequence(self, rng: random.Random, length: int, pairs: int, questions: int) -> Sequence:
        """A list in stories, then questions about it, as chat (three of four) or as further lines of the list."""
        table = self._table(rng, pairs)
        asked = rng.sample(table, min(questions, pairs))
        chat = rng.random() < 0.75
        turns = [self._turn(rng, pair) if chat else self._line(pair, recalled=True) for pair in asked]
        room = length - sum(len(p.ids) for p in turns) - 4 * pairs - 3
        body = self._body(rng, table, room)
        opening = [Piece(np.array([BOS_ID]))]
        if chat and rng.random() < 0.75:  # one user message holds the list and the first question; else a system message
            opening, turns[0] = [Piece(np.array([BOS_ID, self.user]))], turns[0].without_first()
        return join([*opening, *body, *turns, *self._stories(rng, room // 8 + 300)], length)

    def recall_prompt(self, rng: random.Random, length: int, pairs: int) -> RecallPrompt:
        """A chat prompt of about `length` tokens with one question; the asked pair may stand anywhere."""
        table = self._table(rng, pairs)
        key, value = rng.choice(table)
        body = self._body(rng, table, length - 4 * pairs - 10)
        ids = np.concatenate([np.array([BOS_ID, self.user]), *(p.ids for p in body)])
        before, after = self.questions[0]
        prompt = [*ids.tolist(), *before, self.key[key], *after, self.assistant, self.no_think]
        pair_at = int(np.flatnonzero((ids[:-1] == self.key_at_start[key]) & (ids[1:] == self.equals))[0])
        return RecallPrompt(prompt, [self.value_at_start[value], EOS_ID], KEYS[key], VALUES[value], pair_at)

    def _table(self, rng: random.Random, pairs: int) -> list[tuple[int, int]]:
        """Distinct keys, free values."""
        return [(key, rng.randrange(len(VALUES))) for key in rng.sample(range(len(KEYS)), pairs)]

    def _body(self, rng: random.Random, table: list[tuple[int, int]], room: int) -> list[Piece]:
        """The lines of `table` in one to six groups, among at least one story and about `room` tokens of them."""
        stories = self._whole_stories(rng, room)
        groups: list[list[tuple[int, int]]] = [[] for _ in range(rng.randint(1, min(6, len(table))))]
        for index, pair in enumerate(table):
            groups[index * len(groups) // len(table)].append(pair)
        places = sorted(rng.randint(0, len(stories)) for _ in groups)
        pieces: list[Piece] = []
        for at, text in enumerate([*stories, None]):
            for place, group in zip(places, groups, strict=True):
                if place == at:
                    pieces += [self._line(pair, recalled=False) for pair in group]
            if text is not None:
                pieces.append(text)
        return pieces

    def _line(self, pair: tuple[int, int], recalled: bool) -> Piece:
        key, value = pair
        ids = [self.key_at_start[key], self.equals, self.value[value], self.newline]
        return Piece(np.array(ids), (0,) if recalled else (0, 2), key, 2, recalled)

    def _turn(self, rng: random.Random, pair: tuple[int, int]) -> Piece:
        key, value = pair
        before, after = rng.choice(self.questions)
        ids = [self.user, *before, self.key[key], *after, self.assistant, self.no_think, self.value_at_start[value], EOS_ID]
        return Piece(np.array(ids), (len(before) + 1,), key, len(ids) - 2, recalled=True)

    # ---- stories

    def story_sequence(self, rng: random.Random, length: int) -> Sequence:
        """Documents end to end: plain stories, stories on request, and stories continued."""
        pieces: list[Piece] = []
        while sum(len(p.ids) for p in pieces) < length:
            ids = self._whole_stories(rng, 1)[0].ids
            kind = rng.random()
            if kind < 0.4:
                more = [p.ids for p in self._whole_stories(rng, rng.choice((1, 200, 400)))]
                pieces.append(Piece(np.concatenate([np.array([BOS_ID]), ids, *more, np.array([EOS_ID])])))
                continue
            if kind < 0.7:
                hero = next(self.people[i] for i in ids.tolist() if i in self.people)
                pieces.append(self._answered(self.topics[hero], ids[:-1]))
                continue
            cut = rng.choice(np.flatnonzero(ids == self.full_stop)[:4].tolist()) + 1
            pieces.append(self._answered([*self.continue_, *self._spaced(ids[:cut])], ids[cut:-1]))
        return join(pieces, length)

    def _answered(self, asked: list[int], told: Ids) -> Piece:
        prompt = [BOS_ID, self.user, *asked, self.assistant, self.no_think]
        return Piece(np.concatenate([np.array(prompt), told, np.array([EOS_ID])]))

    def _spaced(self, ids: Ids) -> list[int]:
        """The same text after a space."""
        return self.encode(" " + self.decode(ids.tolist()))

    def _whole_stories(self, rng: random.Random, room: int) -> list[Piece]:
        """Neighbours in the pool, at least one, as many as fit in `room` tokens."""
        first = rng.randrange(len(self.starts) - 2 - room // 40)
        last = max(int(np.searchsorted(self.starts, self.starts[first] + room, side="right")) - 1, first + 1)
        return [Piece(self.pool[self.starts[i] : self.starts[i + 1]]) for i in range(first, last)]

    def _stories(self, rng: random.Random, room: int) -> list[Piece]:
        return [Piece(np.array([EOS_ID, BOS_ID])), *self._whole_stories(rng, room + 300)]

    # ---- tokens

    def _one(self, text: str) -> int:
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]

    def _split_question(self, pattern: str) -> tuple[list[int], list[int]]:
        before, after = pattern.split(" {key}")
        return self.encode(before), self.encode(after)
