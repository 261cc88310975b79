"""total_batch = micro_batch x ranks x accumulation: one derived from the others, contradictions refused."""

from __future__ import annotations

from rlhf.config import AllConfig, AnyStage, ConfigError, RewardConfig, stages_with_paths


def fill(stage: AnyStage | AllConfig, reward: RewardConfig, ranks: int) -> tuple[AnyStage | AllConfig, list[str]]:
    """`stage` with the batch of each stage that will run filled in, and a sentence for each that contradicts itself."""
    problems = list[str]()
    for path, part in stages_with_paths(stage, reward).items():
        try:
            filled = derive(part, path, ranks)
        except ConfigError as error:
            problems += error.problems
            continue
        name = path.removeprefix("stage").removeprefix(".")
        stage = stage.model_copy(update={name: filled} if name else dict(filled))
    return stage, problems


def derive(stage: AnyStage, path: str, ranks: int) -> AnyStage:
    """`stage` with total_batch, micro_batch and accumulation. `path` is where the user sets them: stage, stage.rm.

    Raises ConfigError with the arithmetic when the two or three given do not fit, or fewer are given.
    """
    total, micro, accumulation = stage.total_batch, stage.micro_batch, stage.accumulation
    over = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if micro is not None and accumulation is not None:
        product = micro * ranks * accumulation
        if total is not None and total != product:
            raise ConfigError([_contradiction(path, total, micro, accumulation, ranks, over)])
        return stage.model_copy(update={"total_batch": product})
    name, size = ("micro_batch", micro) if micro is not None else ("accumulation", accumulation)
    if total is None or size is None:
        given = [key for key in ("total_batch", "micro_batch", "accumulation") if getattr(stage, key) is not None]
        raise ConfigError(
            [
                f"{path} gives {f'only {given[0]}' if given else 'none'} of total_batch, micro_batch and accumulation, "
                f"and total_batch = micro_batch x {over} x accumulation needs two; "
                f"write e.g. {path}.total_batch={total or 8 * ranks} {path}.micro_batch={micro or 4}"
            ]
        )
    if total % (size * ranks):
        below, above = total // (size * ranks) * size * ranks, -(-total // (size * ranks)) * size * ranks
        nearest = f"{path}.total_batch={above}" + (f" or {path}.total_batch={below}" if below else "")
        raise ConfigError(
            [
                f"{path}.total_batch={total} is not a multiple of {path}.{name}={size} x {over} = {size * ranks}; "
                f"write {nearest}, or another {path}.{name}"
            ]
        )
    other = "accumulation" if name == "micro_batch" else "micro_batch"
    return stage.model_copy(update={other: total // (size * ranks)})


def _contradiction(path: str, total: int, micro: int, accumulation: int, ranks: int, over: str) -> str:
    product = micro * ranks * accumulation
    cures = [f"{path}.total_batch={product}"]
    if total % (micro * ranks) == 0:
        cures.append(f"{path}.accumulation={total // (micro * ranks)}")
    if total % (accumulation * ranks) == 0:
        cures.append(f"{path}.micro_batch={total // (accumulation * ranks)}")
    return (
        f"{path}.total_batch={total} contradicts {path}.micro_batch={micro} x {over} x "
        f"{path}.accumulation={accumulation}: {micro} x {ranks} x {accumulation} = {product}; "
        f"write {', or '.join(cures)}"
    )
