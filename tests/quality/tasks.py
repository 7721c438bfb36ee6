# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Retrieval tasks: facts strewn in text, and questions about them in a chat.

Names and values are split by hash: training draws from one part, the cases from the
other, so that no name and no value in a case was ever trained on.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from turbo_seeded.model import SPECIAL_TOKENS  # noqa: E402

END_OF_TEXT, IM_START, IM_END = (256 + i for i in range(len(SPECIAL_TOKENS)))
SEPARATOR = SPECIAL_TOKENS[0]
HELD_OUT_TEXT = Path(__file__).with_name("heldout.txt")

Encode = Callable[[str], list[int]]


def as_bytes(text: str) -> list[int]:
    """Returns the tokens of a text, where a token is a byte."""
    return list(text.encode())


ATTRIBUTES = ("code", "key", "number", "password", "label", "address", "owner", "pin")
# The first of each is the one that evaluation uses.
FACTS = (
    "The {what} of {name} is {value}.",
    "{name}'s {what} is {value}.",
    "For {name}, the {what} is {value}.",
    "Note that the {what} of {name} is {value}.",
    "Remember: {name} has the {what} {value}.",
    "It was agreed that {name} gets the {what} {value}.",
)
QUESTIONS = (
    "What is the {what} of {name}?",
    "What is {name}'s {what}?",
    "Tell me the {what} of {name}.",
    "Which {what} does {name} have?",
    "Give the {what} of {name}.",
)
SEVERAL = (
    "What are the {what}s of {names}?",
    "List the {what}s of {names}.",
)
# Codes of one name, where all of them count, and how deep in the text they lie.
RIVALS = 8
RIVALS_END = 0.9
LOOK_UP = (
    "What is the value of {name}?",
    "Which value does {name} have?",
    "Look up {name}.",
)

# The passkey task of "Landmark Attention" (arXiv:2305.16300): a number in sentences
# that repeat. Models find it that are too weak for facts about several names.
PASSKEY_DIGITS = 5
PASSKEY_HEADING = (
    "There is important information hidden in a lot of irrelevant text. Find it and "
    "memorize it."
)
PASSKEY_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
    "back again."
)
PASSKEY_FACT = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_QUESTION = "What is the pass key?"


def words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = words(
    "amber ancient bold bright broken calm clever cold copper crimson dark distant "
    "early empty faded fallen frozen gentle golden green hidden hollow humble iron "
    "late little lonely lost mellow misty narrow noble northern old pale patient "
    "proud quiet rapid red royal rusty sacred scarlet secret sharp silent silver "
    "simple sleepy slow small solid southern steady stone sunny swift tall velvet "
    "violet wandering warm white wild winter wooden"
)
NOUNS = words(
    "anchor arrow badger barrel beacon bell bridge candle castle cedar chapel cliff "
    "comet cottage crane crown desert dragon eagle engine falcon ferry field flute "
    "forest fountain fox garden gate glacier hammer harbor heron hill island kettle "
    "ladder lantern library lion maple market meadow mill mirror monkey mountain "
    "orchard otter owl palace panther pepper pilot planet rabbit raven river rocket "
    "saddle sailor shadow spider station temple tiger tower train valley wagon whale"
)
ONSETS = words(
    "b br c ch cl d dr f fl g gr h j k kr l m n p pr qu r s sh st t tr v w z"
)
VOWELS = words("a e i o u ai ea ei io ou")
CODAS = ["", "", "l", "m", "n", "nd", "r", "rk", "s", "sk", "t", "th", "x"]


def syllables(random: Random, count: int) -> str:
    """Returns a pronounceable word that no dictionary holds."""
    return "".join(
        random.choice(ONSETS) + random.choice(VOWELS) + random.choice(CODAS)
        for _ in range(count)
    )


def draw_name(random: Random) -> str:
    """Returns the subject of a fact: an invented name, two words, or an identifier."""
    kind = random.random()
    if kind < 0.6:
        return syllables(random, random.choice((2, 2, 3))).capitalize()
    if kind < 0.85:
        return f"the {random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    return f"{random.choice(NOUNS)}-{random.randrange(10, 1000)}"


def draw_code(random: Random) -> str:
    return str(random.randrange(100_000, 1_000_000))


def draw_value(random: Random) -> str:
    """Returns a value: mostly six digits, else a word, a name or hexadecimal."""
    kind = random.random()
    if kind < 0.6:
        return draw_code(random)
    if kind < 0.75:
        return syllables(random, random.choice((2, 3)))
    if kind < 0.9:
        return f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    return f"{random.getrandbits(32):08x}"


def is_held_out(word: str) -> bool:
    """Whether a name or value belongs to evaluation: one in four does."""
    return zlib.crc32(word.lower().encode()) % 4 == 0


@dataclass
class Pool:
    """Draws names and values, each once, from training's or evaluation's part."""

    random: Random
    held_out: bool

    def __post_init__(self) -> None:
        self._seen: set[str] = set()

    def draw(self, source: Callable[[Random], str]) -> str:
        while True:
            word = source(self.random)
            if is_held_out(word) == self.held_out and word not in self._seen:
                self._seen.add(word)
                return word

    def pairs(self, count: int, value: Callable[[Random], str]) -> dict[str, str]:
        return {self.draw(draw_name): self.draw(value) for _ in range(count)}


@dataclass(frozen=True)
class Case:
    """One chat: the user's message, which ends with a question, and its answer."""

    prompt: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat as the OpenAI API takes it."""
        return [{"role": "user", "content": self.prompt}]

    def prompt_tokens(self, encode: Encode = as_bytes) -> list[int]:
        """Returns the chat template's tokens, up to the assistant's first."""
        return [*user_turn(self.prompt, encode), IM_START, *encode("assistant\n")]

    def answer_tokens(self, encode: Encode = as_bytes) -> list[int]:
        """Returns the expected tokens, with the one that ends the turn."""
        return [*encode(self.answer), IM_END]


def user_turn(content: str, encode: Encode = as_bytes) -> list[int]:
    body = encode(f"user\n{content}")
    return [IM_START, *body, IM_END, *encode("\n")]


# Bytes of a chat of one question beyond the user's message and the answer.
TURN_TOKENS = len(Case("", "").prompt_tokens()) + 1


def held_out_documents() -> list[str]:
    """Returns the committed documents that no training text contains."""
    return HELD_OUT_TEXT.read_text(encoding="utf-8").split(SEPARATOR)


def cut_text(text: str, length: int, random: Random) -> list[str]:
    """Returns lines from a random one on, `length` bytes with their line ends.

    The text is repeated when it is too short, and the last line may be cut.
    """
    lines = text.replace(SEPARATOR, "\n").split("\n")
    index = random.randrange(len(lines))
    chosen: list[str] = []
    while length > 0:
        line = lines[index % len(lines)].encode()[: length - 1]
        # A character that the cut splits is left out.
        chosen.append(line.decode(errors="ignore"))
        length -= len(line) + 1
        index += 1
    return chosen


def strew(
    lines: Sequence[str], facts: Sequence[str], depths: Sequence[float]
) -> list[str]:
    """Puts each fact on a line of its own, at its depth in the lines' bytes."""
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(line) + 1)
    inserted: dict[int, list[str]] = {}
    for fact, depth in zip(facts, depths, strict=True):
        target = depth * ends[-1]
        nearest = min(range(len(ends)), key=lambda i: abs(ends[i] - target))
        inserted.setdefault(nearest, []).append(fact)
    result: list[str] = []
    for index in range(len(ends)):
        result += inserted.get(index, [])
        result += lines[index : index + 1]
    return result


def fact_case(
    length: int,
    depths: Sequence[float],
    asked: int,
    seed: int,
    text: str,
    distractors: int,
) -> Case:
    """Returns facts at `depths` among others; the first `asked` are asked for."""
    random = Random(f"fact {length} {list(depths)} {seed}")
    facts = Pool(random, True).pairs(len(depths) + distractors, draw_code)
    names = list(facts)
    if asked == 1:
        question = QUESTIONS[0].format(what="code", name=names[0])
    else:
        question = SEVERAL[0].format(what="code", names=join_names(names[:asked]))
    sentences = [
        FACTS[0].format(what="code", name=n, value=v) for n, v in facts.items()
    ]
    answer = ", ".join(list(facts.values())[:asked])
    where = [*depths, *(random.random() for _ in range(distractors))]
    return strewn_case(length, sentences, where, question, answer, random, text)


def strewn_case(
    length: int,
    sentences: Sequence[str],
    depths: Sequence[float],
    question: str,
    answer: str,
    random: Random,
    text: str,
) -> Case:
    """Returns facts at their depths in text that fills `length`, and a question."""
    fixed = sum(len(sentence) + 1 for sentence in sentences) + len(question) + 1
    room = length - TURN_TOKENS - len(answer) - fixed
    if room < 0:
        raise ValueError(f"{length} tokens are too few for {len(sentences)} facts")
    context = strew(cut_text(text, room, random), sentences, depths)
    return Case("\n".join([*context, "", question]), answer)


def needle_case(
    length: int, depth: float, seed: int, text: str, distractors: int = 4
) -> Case:
    """Returns one fact in text, with a question about it.

    Args:
        length: tokens of prompt and answer together, at most; at least 512.
        depth: the fact's place, from 0 (first line) to 1 (last line before the
            question).
        seed: decides name, value, stretch of text and distractors.
        text: the text around the facts; documents may be split by SEPARATOR.
        distractors: facts of the same form about other names, anywhere in the text.
    """
    return fact_case(length, [depth], 1, seed, text, distractors)


def passkey_case(length: int, depth: float, seed: int) -> Case:
    """Returns a pass key in sentences that repeat, with a question about it.

    Args:
        length: bytes of the prompt, at most.
        depth: the key's place, from 0 (first line) to 1 (last line before the
            question).
        seed: decides the key, with length and depth.

    Raises:
        ValueError: If not even one line of other text has room.

    """
    random = Random(f"passkey {length} {depth} {seed}")
    key = "".join(random.choices("123456789", k=PASSKEY_DIGITS))
    fact = PASSKEY_FACT.format(key=key)
    case = Case("\n".join([PASSKEY_HEADING, "", fact, "", PASSKEY_QUESTION]), key)
    count = (length - len(case.prompt)) // (len(PASSKEY_FILLER) + 1)
    if count < 1:
        raise ValueError(f"{length} bytes are too few for a pass key in text")
    lines = strew([PASSKEY_FILLER] * count, [fact], [depth])
    return Case("\n".join([PASSKEY_HEADING, "", *lines, "", PASSKEY_QUESTION]), key)


def multi_needle_case(
    length: int, needles: int, seed: int, text: str, asked: int = 1
) -> Case:
    """Returns facts about `needles` names at even depths; `asked` are asked for.

    The answer lists the values in the order of the question, split by commas.
    """
    random = Random(f"depths {seed}")
    depths = [(i + 0.5) / needles for i in range(needles)]
    random.shuffle(depths)
    return fact_case(length, depths, asked, seed, text, 0)


def rival_case(length: int, seed: int, text: str, rivals: int = RIVALS) -> Case:
    """Returns facts that give one name different codes, and asks for its code.

    A model's answer weighs all codes. These begin with different digits, so that the
    distribution of the answer's first digit is one over `rivals` places in the text.
    The places have even depths, and none is in the last tenth. No answer is right; the
    case has the first fact's.
    """
    random = Random(f"rivals {length} {seed}")
    pool = Pool(random, True)
    name = pool.draw(draw_name)
    digits = random.sample("123456789", rivals)
    codes = [
        pool.draw(lambda random, digit=digit: f"{digit}{random.randrange(10**5):05}")
        for digit in digits
    ]
    sentences = [FACTS[0].format(what="code", name=name, value=c) for c in codes]
    depths = [RIVALS_END * (i + 0.5) / rivals for i in range(rivals)]
    question = QUESTIONS[0].format(what="code", name=name)
    return strewn_case(length, sentences, depths, question, codes[0], random, text)


def key_value_case(length: int, seed: int) -> Case:
    """Returns a list of `name: value` lines that fills `length`, and one look-up."""
    random = Random(f"key-value {length} {seed}")
    pool = Pool(random, True)
    pairs: dict[str, str] = {}
    room = length - TURN_TOKENS - 80
    while True:
        name, value = pool.draw(draw_name), pool.draw(draw_code)
        room -= len(name) + len(value) + 3
        if room < 0:
            break
        pairs[name] = value
    asked = random.choice(list(pairs))
    lines = [f"{name}: {value}" for name, value in pairs.items()]
    question = LOOK_UP[0].format(name=asked)
    return Case("\n".join([*lines, "", question]), pairs[asked])


def join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]
