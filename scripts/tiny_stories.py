"""Small stories from a grammar: the readable half of the bundled model's world. Original text, made for this project.

A story is a plot of steps; a step is one of a few sentences; a sentence has slots that keep their filling through the story.
Choices are skewed, so that the likeliest continuation is a clear one.
"""

from __future__ import annotations

import random

PEOPLE = {
    "Anna": "she", "Ben": "he", "Clara": "she", "Daniel": "he", "Ella": "she", "Felix": "he", "Greta": "she", "Hugo": "he",
    "Ida": "she", "Jonas": "he", "Lucy": "she", "Martin": "he", "Nora": "she", "Oscar": "he", "Rosa": "she", "Tom": "he",
}  # fmt: skip
POSSESSIVE = {"she": "her", "he": "his"}
OBJECTIVE = {"she": "her", "he": "him"}
PLACES = ["village", "river", "old mill", "harbour", "forest", "town square", "bridge", "railway station", "lake", "school"]
WEATHERS = ["sunny", "rainy", "windy", "cold", "quiet", "foggy"]
TIMES = ["morning", "afternoon", "evening"]
COLOURS = ["red", "blue", "green", "yellow", "brown", "white"]
THINGS = ["hat", "kite", "book", "key", "scarf", "lamp", "basket", "coat", "ball", "map"]
RELATIVES = {"she": ["sister", "friend", "grandmother", "neighbour"], "he": ["brother", "friend", "uncle", "neighbour"]}
ANIMALS = ["dog", "cat", "goat", "duck", "horse", "donkey"]
ADJECTIVES = ["small", "tired", "hungry", "friendly", "grey", "clever"]
DISHES = ["apple cake", "bread", "vegetable soup", "plum jam", "pancakes", "honey biscuits"]
TREES = ["willow", "lime tree", "pine", "chestnut tree"]
FEELINGS = ["happy", "proud", "glad", "surprised"]
WORKS = ["fisherman", "baker", "teacher", "farmer", "gardener", "postman"]

PLOTS: list[list[list[str]]] = [
    [  # something is lost
        [
            "{Name} lived in a small house near the {place}.",
            "There once was a child called {Name}, who lived near the {place}.",
        ],
        ["One {weather} {time}, {name} could not find {poss} {colour} {thing}."],
        [
            "{Pron} looked under the bed and behind the door, but the {thing} was not there.",
            "{Pron} looked in every room of the house, but the {thing} was gone.",
        ],
        ["Then {poss} {relative} {other} came to help.", "So {pron} asked {poss} {relative} {other} for help."],
        ['"Where did you see it last?" asked {other}.', '"When did you have it last?" asked {other}.'],
        ['"I had it at the {place2}," said {name}.', '"I think I left it at the {place2}," said {name}.'],
        ["They walked to the {place2} together.", "Together they went to the {place2}, step by step."],
        [
            "There, under a big {tree}, lay the {colour} {thing}.",
            "And there it was: the {colour} {thing} lay under a big {tree}.",
        ],
        ["{Name} was very {feeling} and thanked {other}.", "{Name} smiled and thanked {other}."],
        ["They were home before dark.", "On the way home they sang a song."],
    ],
    [  # an animal
        [
            "{Name} was walking along the {place} on a {weather} {time}.",
            "On a {weather} {time}, {name} went for a walk near the {place}.",
        ],
        ["Suddenly {pron} heard a strange sound behind a {tree}.", "Behind a {tree}, {pron} heard a strange sound."],
        ["It was a {adjective} {animal} with a {colour} ribbon.", "A {adjective} {animal} sat there and looked at {obj}."],
        [
            "{Name} gave the {animal} some water and a piece of bread.",
            "{Name} sat down and gave the {animal} something to eat.",
        ],
        [
            "From that day on, the {animal} followed {obj} everywhere.",
            "After that the {animal} followed {obj} all the way home.",
        ],
        ['"Whose {animal} is this?" asked {poss} {relative} {other}.'],
        ['"It is my friend now," said {name}.', '"I found it near the {place}," said {name}.'],
        [
            "They asked the {work}, but nobody had lost a {animal}.",
            "They asked everybody in the village, but nobody missed a {animal}.",
        ],
        [
            "So the {animal} stayed, and {name} was very {feeling}.",
            "So {name} could keep the {animal}, and everybody was {feeling}.",
        ],
    ],
    [  # cooking
        [
            "It was a {weather} {time}, and {name} wanted to make {dish}.",
            "{Name} wanted to make {dish} for {poss} {relative} {other}.",
        ],
        ["{Pron} put on a {colour} apron and looked into the cupboard.", "First {pron} put everything on the kitchen table."],
        ["But there was no flour left, and no sugar.", "But the sugar was gone, and there was only a little flour."],
        ["So {pron} took {poss} {colour2} {thing} and walked to the {place}.", "So {pron} ran to the {place} to ask for some."],
        ["There {pron} met the {work}, who was always kind.", "At the {place} {pron} met a friendly {work}."],
        ['"You can have some of mine," said the {work}.', '"Take what you need," said the {work}.'],
        ["{Name} thanked the {work} and hurried home.", "{Name} said thank you and hurried back to the kitchen."],
        ["Soon the whole house smelled of {dish}.", "An hour later the {dish} was ready."],
        ["{Other} said that it was the best {dish} in the world.", "{Other} ate two plates and laughed."],
    ],
    [  # a journey
        [
            "Early one {time}, {name} and {poss} {relative} {other} left for the {place}.",
            "{Name} and {poss} {relative} {other} had planned a trip to the {place}.",
        ],
        [
            "They had a {colour} {thing}, a bottle of water and some {dish}.",
            "In their bag were a {colour} {thing} and some {dish}.",
        ],
        ["The way was long, but the day was {weather}.", "The day was {weather}, and the way was long."],
        ["After an hour they rested under a {tree}.", "They stopped at the {place2} and rested for an hour."],
        ['"Are we lost?" asked {other}.', '"How far is it?" asked {other}.'],
        ['"No," said {name}, "I can already see the {place}."', '"Not far," said {name}, "it is just behind the {place2}."'],
        [
            "A {work} showed them the last part of the way.",
            "A {adjective} {animal} ran in front of them as if it knew the way.",
        ],
        ["When they arrived, the sun was going down.", "At last they arrived, and everything was quiet."],
        ["{Name} never forgot that {time} at the {place}.", "They came back the next day, tired and {feeling}."],
    ],
    [  # a letter
        [
            "One {weather} {time}, the postman brought a {colour} letter for {name}.",
            "A {colour} letter lay on the table when {name} came home.",
        ],
        [
            "It came from {poss} {relative} {other}, who lived far away.",
            "It was from {poss} {relative} {other}, who lived near the {place}.",
        ],
        [
            '"Dear {name}," it said, "please come and visit me soon."',
            '"Dear {name}," wrote {other}, "come to the {place} as soon as you can."',
        ],
        ["{Name} read the letter twice and packed {poss} {colour2} {thing}.", "{Name} packed {poss} {thing} the same day."],
        ["The train left in the {time2} and went along the {place2}.", "In the {time2} {pron} took the train."],
        ["{Other} was waiting with a {adjective} {animal}.", "At the station stood {other} with a {adjective} {animal}."],
        ["They ate {dish} and talked until late at night.", "In the evening there was {dish}, and they talked for hours."],
        ["{Name} was {feeling} to be there.", "It was the best week of the year."],
    ],
    [  # work
        ["The {work} of the village was called {name}.", "{Name} was a {work} and lived near the {place}."],
        [
            "Every {time} {pron} walked to the {place2} with {poss} {adjective} {animal}.",
            "Every day {pron} went to the {place2}, and {poss} {adjective} {animal} went too.",
        ],
        ["One day the {animal} stopped and would not move.", "One {weather} day the {animal} would not go on."],
        ["The bridge had broken in the night.", "A big {tree} had fallen on the road."],
        ['"We need help," said {name} to {poss} {relative} {other}.', "{Name} ran back and called {poss} {relative} {other}."],
        ["Everybody in the village came with wood and nails.", "Soon all the neighbours came to help."],
        ["They worked until the {time2}, and then it was done.", "They worked the whole day and did not rest."],
        ["{Other} brought {dish} for everyone.", "In the end there was {dish} for everyone."],
        ["That night {name} slept very well.", "{Name} was {feeling}, and so was the {animal}."],
    ],
]


def skewed(rng: random.Random, items: list[str]) -> str:
    """Earlier items more often: the place in the list is a uniform number squared."""
    return items[int(len(items) * rng.random() ** 2)]


def filling(rng: random.Random) -> dict[str, str]:
    """One filling of all slots: two people, two places, two colours, two times, and one of everything else."""
    name, other = rng.sample(sorted(PEOPLE), 2)
    place, place2 = rng.sample(PLACES, 2)
    colour, colour2 = rng.sample(COLOURS, 2)
    time, time2 = rng.sample(TIMES, 2)
    pron = PEOPLE[name]
    return {
        "name": name, "Name": name, "other": other, "Other": other, "pron": pron, "Pron": pron.capitalize(),
        "poss": POSSESSIVE[pron], "obj": OBJECTIVE[pron], "place": place, "place2": place2, "colour": colour,
        "colour2": colour2, "time": time, "time2": time2, "weather": skewed(rng, WEATHERS), "thing": skewed(rng, THINGS),
        "relative": skewed(rng, RELATIVES[PEOPLE[other]]), "animal": skewed(rng, ANIMALS), "adjective": skewed(rng, ADJECTIVES),
        "dish": skewed(rng, DISHES), "tree": skewed(rng, TREES), "feeling": skewed(rng, FEELINGS), "work": skewed(rng, WORKS),
    }  # fmt: skip


def story(rng: random.Random) -> list[str]:
    """The sentences of one story."""
    slots = filling(rng)
    return [skewed(rng, step).format_map(slots) for step in rng.choice(PLOTS)]
