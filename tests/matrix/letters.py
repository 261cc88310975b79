"""A reward that a tiny model can learn."""


def share_of_a(prompts: list[str], answers: list[str]) -> list[float]:
    return [answer.count("a") / len(answer) if answer else 0.0 for answer in answers]
