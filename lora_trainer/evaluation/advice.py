"""What a comparison of strengths and steps means for the user, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.evaluation.part_words import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_trainer.evaluation.lora_choice import Candidate, CandidateScore, LoraChoice


def advice_on(choice: LoraChoice) -> str:
    """Sentences: what to use and why, or that nothing passes; what ties with it, and where strengths or steps begin to fail."""
    usual = choice.usual.candidate
    strengths = [each for each in choice.scores if each.candidate.step == usual.step]
    steps = [each for each in choice.scores if each.candidate.strength == usual.strength]
    sentences = [what_to_use(choice)]
    if len(strengths) > 1:
        sentences += on_strengths(strengths, choice)
    if len(steps) > 1:
        sentences += on_steps(steps, choice)
    open_ones = [each.candidate for each in choice.scores if each.standing == "unclear" and each.gain.value > 0]
    if open_ones and choice.chosen == usual:
        named = listed([each.name for each in open_ones])
        sentences.append(f"Not decided: {named} may be better; more images of the subject would decide it.")
    return " ".join(sentences)


def what_to_use(choice: LoraChoice) -> str:
    """The chosen candidate, where it passes; else which ones pass, or that none does."""
    usual, found = choice.usual, choice.of(choice.chosen)
    strengths, steps = ({getattr(each.candidate, what) for each in choice.scores} for what in ("strength", "step"))
    outcome, named = choice.outcome, name_of(found.candidate, usual.candidate)
    if found is usual and len(strengths) == 1:
        named = f"step {found.candidate.step}, as exported"
    why = "" if found is usual else f": {gain_of(found, usual)}"
    if outcome == "passed":
        return f"Use {'it at ' if found is usual and len(strengths) > 1 else ''}{named}{why}."
    if passing := [
        name_of(each.candidate, usual.candidate) for each in choice.scores if each.outcome(choice.minimum) == "passed"
    ]:
        state, verb = "refused" if outcome == "refused" else "not decided", "passes" if len(passing) == 1 else "pass"
        return f"{named[0].upper()}{named[1:]} is {state}; {listed(passing)} {verb}."
    compared = " or ".join(what for what, found in (("step", steps), ("strength", strengths)) if len(found) > 1)
    if outcome == "refused":
        return f"No {compared} passes; the least bad is {named}{why}."
    return f"No {compared} surely passes with so few samples; the best is {named}{why}."


def gain_of(found: CandidateScore, usual: CandidateScore) -> str:
    """`it scores 0.90 in place of 0.36 (+0.54, 95 % interval …; shows it: 0.36 to 0.92)`."""
    why = f"{WORDS[usual.least].title.lower()}: {usual.parts[usual.least].scores[0]:.2f} to {found.parts[usual.least].scores[0]:.2f}"
    gain = f"{found.gain.value:+.2f}, 95 % interval {found.gain.low:+.2f} to {found.gain.high:+.2f}"
    return f"it scores {found.score.value:.2f} in place of {usual.score.value:.2f} ({gain}; {why})"


def name_of(candidate: Candidate, usual: Candidate) -> str:
    """By what it differs from the usual one in."""
    return f"strength {candidate.strength:g}" if candidate.step == usual.step else f"step {candidate.step}"


def on_strengths(scores: Sequence[CandidateScore], choice: LoraChoice) -> list[str]:
    """Which strengths tie with strength 1 where that is chosen, and which ones fail."""
    ordered = sorted(scores, key=lambda each: each.candidate.strength)
    tied = [f"{each.candidate.strength:g}" for each in ordered if each.standing == "tie"]
    sentences = []
    if choice.chosen == scores[0].candidate and len(tied) > 1:
        sentences.append(f"Strengths {listed(tied)} tie.")
    for part, failing in failing_parts(ordered, choice.minimum).items():
        values = [f"{each.candidate.strength:g}" for each in failing]
        sentences.append(f"At {listed(values)} {WORDS[part].fault}.")
    return sentences


def on_steps(scores: Sequence[CandidateScore], choice: LoraChoice) -> list[str]:
    """Which steps tie with the exported one where that is chosen, and from or up to which one they fail."""
    ordered = sorted(scores, key=lambda each: each.candidate.step or 0)
    chosen, usual, sentences = choice.chosen, scores[0], []
    tied = [each.candidate.step for each in ordered if each.standing == "tie"]
    if chosen == usual.candidate and len(tied) > 1:
        reason = (
            "no reason to choose an earlier one" if tied[-1] == chosen.step else f"no reason to leave {chosen.step}"
        )
        sentences.append(f"Steps {listed([str(step) for step in tied])} tie: {reason}.")
    elif chosen == usual.candidate:
        sentences.append(f"No other step is as good as {chosen.step}.")
    for part, failing in failing_parts(ordered, choice.minimum).items():
        first, last = failing[0].candidate.step, failing[-1].candidate.step
        if failing == list(ordered[-len(failing) :]) and len(failing) < len(ordered):
            sentences.append(f"From step {first} on {WORDS[part].fault}.")
        elif failing == list(ordered[: len(failing)]) and len(failing) < len(ordered):
            sentences.append(f"Up to step {last} {WORDS[part].fault}.")
        else:
            sentences.append(f"At step {listed([str(each.candidate.step) for each in failing])} {WORDS[part].fault}.")
    return sentences


def failing_parts(scores: Sequence[CandidateScore], minimum: float) -> dict[str, list[CandidateScore]]:
    """The candidates that a part surely refuses at the minimum, by part."""
    failing = {
        name: [each for each in scores if name in each.parts and each.parts[name].outcome(minimum) == "refused"]
        for name in WORDS
    }
    return {name: found for name, found in failing.items() if found}


def listed(values: Sequence[str]) -> str:
    """`0.8`, `0.8 and 1`, `0.6, 0.8 and 1`."""
    return " and ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
