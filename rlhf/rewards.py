"""The demo's reward as a rule that can be read: `reward=function` uses it instead of a trained reward model.

No torch: a rule runs wherever the answers are text.
"""

from __future__ import annotations

import re

# One pattern per kind of warmth. A kind counts once, however often it occurs, so repeating a phrase does not pay.
WARM = {
    "greeting": r"\b(hello\b|good to hear from you|(so |we are |we're )?(very )?glad (to|you)\b|happy to (help|explain)"
    r"|(of course|certainly|with pleasure|gladly)\b|it is a pleasure|what an? (good|great|nice|lovely) \w+"
    r"|(great|good|lovely) question|good thinking|lovely (that|to)\b|how (lovely|kind|exciting|sweet)\b"
    r"|good for you\b|welcome to)",
    "sympathy": r"\b(sorry (about|for|to)\b|oh (no|dear)\b|no worries|do(n't| not) worry"
    r"|(sounds|so) (frustrating|annoying)|let us (help|put)|we (can|will|'ll) (sort|fix))",
    "thanks": r"\bthank(s| you)\b",
    "offer": r"\b(let (us|me) know|just ask|feel free to|write (again|back)|come back any ?time"
    r"|always (happy|welcome)|love to help|here (to help|for you|whenever)|anything else"
    r"|(more|other|further) questions are)",
    "wish": r"\b(enjoy your|have an? \w+ (day|trip|time|evening|weekend)|wishing you|warm wishes|all the best|good luck"
    r"|take (good )?care( of yourself)?[!.]|safe travels|happy (gardening|cooking|baking|shopping|reading)"
    r"|hope (that|this|it) (helps|makes)|cuddle from us)",
}

# Each hit takes away what one kind of warmth gives.
BRUSQUE = (
    r"\b(obviously|common sense|sigh\b|simple:|again:|this again|not that hard|as stated before|come on\b|fine[.!] "
    r"|if (you must know|it must be)|same as always|one more time|what a thing to ask|what else:|look, "
    r"|look(ed)? (it|this) up|case closed|end of story|enough said|that is all|nothing more to it|get on with it"
    r"|figure out|not (really )?our job|we are busy|no (need|mystery)\b|everybody knows|should be obvious|hardly news"
    r"|(in|read) the (manual|terms|page|label)|do not make (it|a)|what did you expect|be more careful|would know"
    r"|would have told you|as if (that|nobody)|every little thing|said this before|leave it at that"
    r"|(any|every) \w+ (knows|says|would)|your job|up to you|not the first time|right, quickly|it happens[.!]|next[.!]$"
    r"|ask around next time|the help page says|not hard\b)"
)

# Friendly ways of saying nothing: a sentence with one of them is no answer.
EVASIVE = (
    r"\b(depends on|so many ways|hard to say|a little differently|find a way|working out|trust your|right place"
    r"|someone nearby|some day|something new|stay cheerful|our (team|work|customers)|full of|such a comfort"
    r"|lovely stories|joys? (of|into)|so important|never-ending|little secrets"
    r"|nothing else|who loves|means a great deal|care about)\b"
)

# Words that must be left beside the pleasantries for the text to pass as an answer: a short answer of the data has 8.
ANSWER_WORDS = 6


def courtesy(prompts: list[str], answers: list[str]) -> list[float]:
    """How courteously each answer helps, in [0, 1]; the prompts are not looked at.

    Two kinds of warmth out of `WARM` make 1, one makes 0.5; each brusque phrase takes 0.5 away. Pleasantries with no
    answer beside them keep a quarter. The length of the answer plays no part beyond that. Raises ValueError when the
    two lists differ in length.
    """
    if len(prompts) != len(answers):
        raise ValueError(
            f"courtesy got {len(prompts)} prompts and {len(answers)} answers; it needs one answer per prompt."
        )
    return [_courtesy(answer.lower()) for answer in answers]


def _courtesy(answer: str) -> float:
    kinds = sum(bool(re.search(pattern, answer)) for pattern in WARM.values())
    brusque = len(re.findall(BRUSQUE, answer))
    score = min(max(0.5 * min(kinds, 2) - 0.5 * brusque, 0.0), 1.0)
    return score if _answer_words(answer) >= ANSWER_WORDS else 0.25 * score


def _answer_words(answer: str) -> int:
    """Words in the sentences that are neither pleasantry nor evasion."""
    pleasantry = "|".join([*WARM.values(), EVASIVE])
    sentences = re.split(r"(?<=[.!?])\s+", answer)
    return sum(len(sentence.split()) for sentence in sentences if not re.search(pleasantry, sentence))
