"""The demo's workload: 32 chat prompts as they arrive in practice, short and long, wanting short and long answers."""

from __future__ import annotations

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    """A user's message, and the most tokens that its answer may have."""

    text: str
    max_new_tokens: int


_TIDES = """\
Summarise this passage in one sentence.

The tides are the regular rise and fall of the sea. They are caused mainly by the pull of the Moon, which draws the \
water nearest to it into a bulge. A second bulge forms on the far side of the Earth, where the pull is weakest. As \
the Earth turns, each place on a coast passes through both bulges in a day, so most coasts see two high tides and two \
low tides. The Sun pulls as well, with a little less than half of the Moon's strength. When Sun and Moon are in line, \
at new and full moon, their pulls add up and the range is largest: these are spring tides. When they are at right \
angles, the range is smallest: these are neap tides. The shape of a bay can make tides far larger. In the Bay of \
Fundy, the water may rise by sixteen metres."""

_MINUTES = """\
Here are the notes of a meeting. List the three decisions, one a line.

Present: Ana, Bernd, Chiara, Dele. The meeting began at ten. Ana reported that the new warehouse will be ready in \
March, two weeks late, because of the roof. There was a long talk about the vans: two are old, and repairs cost more \
each month. It was decided to replace both vans by electric ones before summer. Bernd asked whether the shop should \
open on Sundays. Most were against it, as nobody wants to work then, and it was decided to stay closed on Sundays. \
Chiara showed the new label for the apple juice. All liked it, but the print is too small to read for older people. \
It was decided to print the label again with larger letters. The next meeting is on the second of February, at the \
mill. Dele will bring the figures for last year."""

_LETTER = """\
Rewrite this message so that it is polite and short.

Hey, I've been waiting for my parcel for three weeks now and nobody tells me anything, this is really the worst shop \
I have ever bought from. I called twice and the first time nobody picked up the phone, and the second time someone \
said it would come on Monday, and of course it did not come on Monday. I need the lamp for my daughter's birthday on \
Friday. Either you send it today or I want my money back."""

_BREAD = """\
Which step in this recipe takes the longest, and how long is it?

Mix 500 g of flour, 350 g of water, 10 g of salt and 3 g of dry yeast in a bowl until no dry flour is left. Cover the \
bowl and let it stand for 12 hours at room temperature. Fold the dough four times, shape it into a ball, and let it \
rest for 1 hour on a floured cloth. Heat the oven to 240 degrees with a heavy pot in it. Bake the bread in the covered \
pot for 30 minutes, then for 15 minutes without the lid. Let it cool for 40 minutes before you cut it."""

_OWL = """\
Give this story a title.

Every night, when the miller had gone to bed, the old owl came down from the beam and walked along the sacks. She did \
not care for flour. She cared for the mice, and the mice knew it. So they had dug a tunnel under the floor, from the \
corner by the stove to the sack of barley, and they came and went as they pleased. The owl heard them under her feet, \
and waited. One winter the stream froze, the wheel stood still, and there was no more barley. The mice came out, thin \
and slow. The owl looked at them for a long time. Then she flew out into the snow, and came back with nothing, and \
sat on her beam, and let them sleep by the stove."""

_BICYCLE = """\
Explain to a child what this paragraph says.

A bicycle stays upright for two reasons. The rider steers it, all the time and mostly without noticing, so that the \
wheels come back under the weight when it begins to fall to one side. And the bicycle helps: when it leans, its front \
wheel turns by itself towards the side to which it leans, because of how the fork is angled and where the weight of \
the handlebar lies. That is why a bicycle that rolls on its own at a fair speed can go a long way before it falls, \
and why it is so hard to balance on one that stands still."""

_REVIEW = """\
Is this review positive or negative? Answer with one word.

I did not expect much from a kettle at this price. After half a year of daily use I must say that I was wrong. It is \
quiet, the handle stays cool, and the water boils faster than in the one that cost me three times as much. The lid is \
a little stiff, but one gets used to it. I have bought a second one for my mother."""

_LIGHTHOUSE = """\
Continue this story.

The lighthouse had been dark for eleven years when Mara rowed out to it with a toolbox, a loaf of bread, and a letter \
that was addressed to the keeper. The door was not locked. Inside, the stairs went up and up, and on each step lay a \
small white stone."""

_SPARROWS = """\
Find the mistake in this text and correct it.

Sparrows are small birds that live near people in most parts of the world. They eat seeds and insects. Sparrows build \
their nests under roofs, in holes and in hedges. The female lays four to five eggs, and both parents feed the young. \
Like all mammals, sparrows have feathers, and they can fly soon after they leave the nest."""

DEMO_PROMPTS: tuple[DemoPrompt, ...] = (
    DemoPrompt("What is the capital of Japan?", 16),
    DemoPrompt("Write a short story about a robot that learns to paint.", 160),
    DemoPrompt("Name three fruits that are red.", 24),
    DemoPrompt(_TIDES, 64),
    DemoPrompt("How many days are there in a leap year?", 16),
    DemoPrompt("What is 7 times 8?", 12),
    DemoPrompt("Translate to French: Good morning, my friend.", 20),
    DemoPrompt(_REVIEW, 8),
    DemoPrompt("Why is the sky blue?", 80),
    DemoPrompt("Give me a name for a grey cat.", 12),
    DemoPrompt("Write a Python function that returns the largest number in a list.", 96),
    DemoPrompt(_BREAD, 40),
    DemoPrompt("What is the opposite of 'ancient'?", 12),
    DemoPrompt("Who wrote Romeo and Juliet?", 16),
    DemoPrompt(_OWL, 16),
    DemoPrompt("What sound does a cow make?", 12),
    DemoPrompt("List five things to pack for a day in the mountains.", 72),
    DemoPrompt("What colour do you get when you mix blue and yellow?", 20),
    DemoPrompt(_MINUTES, 72),
    DemoPrompt("Is a tomato a fruit or a vegetable?", 32),
    DemoPrompt("Which planet is the largest?", 16),
    DemoPrompt("What does a librarian do?", 48),
    DemoPrompt("Spell the word 'necessary'.", 12),
    DemoPrompt(_LETTER, 64),
    DemoPrompt("Finish the sentence: The early bird", 16),
    DemoPrompt("Write a poem about the sea in eight lines.", 112),
    DemoPrompt("What is water made of?", 24),
    DemoPrompt(_SPARROWS, 48),
    DemoPrompt("How do I boil an egg?", 64),
    DemoPrompt(_BICYCLE, 96),
    DemoPrompt("Say hello in Spanish.", 8),
    DemoPrompt(_LIGHTHOUSE, 160),
)
