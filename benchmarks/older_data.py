"""What samples that are exactly so many steps old cost in learning, at equal steps: by age, correction and rate.

    python -m benchmarks.older_data --rates 0.005 0.01

The number game of `rollart.tasks.chat_games` (up to 7 guesses, of two digits each, 12 groups of 16 a step), played by
a small network that was first taught to guess, mostly at random. The loss is rollart's own, and the weights that play
are those of `age` steps before; nothing else differs between rows. A run takes some seconds on a core.
"""

import argparse
import copy
import statistics
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollart.config.settings import TrainSettings
from rollart.tasks.chat_games import HIGHEST, MAX_GUESSES
from rollart.train.losses import LossInputs, Totals, policy_loss

GROUPS, GROUP_SIZE, WIDTH = 12, 16, 128
NO_DIGIT = 10
WARMUP_STEPS, WARMUP_ROWS, WARMUP_INSIDE = 300, 512, 0.2
"""Of the taught guesses so many are within the range that is left; the others are any number."""
TESTED = 2000
"""Games after the last step."""

CANDIDATES: dict[str, tuple[int, dict[str, str]]] = {
    "bypass, age 0": (0, {}),
    "bypass, age 1": (1, {}),
    "bypass, age 2": (2, {}),
    "decoupled, age 1": (1, {"correction": "decoupled"}),
    "decoupled, age 2": (2, {"correction": "decoupled"}),
    "cispo, age 2": (2, {"algorithm": "cispo"}),
    "none, age 2": (2, {"correction": "none"}),
}


class Player(nn.Module):
    """Log-probabilities of the next digit, from the range that is left and the digit said before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5 * 11, WIDTH)
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, low_N: Tensor, high_N: Tensor, before_N: Tensor) -> Tensor:
        digits = (low_N // 10, low_N % 10, high_N // 10, high_N % 10, before_N)
        seen = torch.cat([nn.functional.one_hot(digit, 11).float() for digit in digits], -1)
        hidden = torch.relu(self.first(seen))
        hidden = hidden + torch.relu(self.second(hidden))
        return torch.log_softmax(self.last(hidden + torch.relu(self.third(hidden))), -1)


class Said(NamedTuple):
    """Digits that were said, all (N,)."""

    member: Tensor
    low: Tensor
    high: Tensor
    before: Tensor
    digit: Tensor
    logprob: Tensor


def play(player: Player, groups: int, size: int, draw: torch.Generator) -> tuple[Said, Tensor]:
    """What was said, and the reward of each member."""
    count = groups * size
    secret = torch.randint(1, HIGHEST + 1, (groups,), generator=draw).repeat_interleave(size)
    low, high = torch.ones(count, dtype=torch.long), torch.full((count,), HIGHEST)
    alive, reward, rows = torch.arange(count), torch.zeros(count), []
    for _ in range(MAX_GUESSES):
        below, above = low[alive], high[alive]
        before, guess = torch.full_like(below, NO_DIGIT), torch.zeros_like(below)
        for _ in range(2):
            with torch.no_grad():
                logprobs = player(below, above, before)
            digit = torch.multinomial(logprobs.exp(), 1, generator=draw)[:, 0]
            rows.append(Said(alive, below, above, before, digit, logprobs.gather(1, digit[:, None])[:, 0]))
            guess, before = 10 * guess + digit, digit
        hidden = secret[alive]
        reward[alive[guess == hidden]] = 1.0
        low[alive] = torch.where((below <= guess) & (guess < hidden), guess + 1, below)
        high[alive] = torch.where((hidden < guess) & (guess <= above), guess - 1, above)
        alive = alive[guess != hidden]
    return Said(*(torch.cat(column) for column in zip(*rows, strict=True))), reward


def taught(seed: int) -> Player:
    """One that has learnt to say numbers."""
    torch.manual_seed(seed)
    player, draw = Player(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(player.parameters(), lr=2e-3)
    for _ in range(WARMUP_STEPS):
        ends = torch.randint(1, HIGHEST + 1, (2, WARMUP_ROWS), generator=draw).sort(0).values
        low, high, part = ends[0], ends[1], torch.rand(WARMUP_ROWS, generator=draw)
        inside = torch.rand(WARMUP_ROWS, generator=draw) < WARMUP_INSIDE
        guess = torch.where(inside, low + (part * (high - low + 1)).long(), 1 + (part * HIGHEST).long()).clamp(
            1, HIGHEST
        )
        tens, ones = guess // 10, guess % 10
        said = player(low, high, torch.full_like(low, NO_DIGIT)).gather(1, tens[:, None])
        loss = -(said + player(low, high, tens).gather(1, ones[:, None])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return player


def learn(seed: int, age: int, settings: TrainSettings) -> tuple[float, float]:
    """Success after training, and the mean share of tokens that were clipped."""
    player, draw = taught(seed), torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(player.parameters(), lr=settings.lr, weight_decay=0.0)
    past, clipped = [copy.deepcopy(player)], []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / 5) * (1 - step / settings.steps)
        said, reward = play(past[0], GROUPS, GROUP_SIZE, draw)
        rewards = reward.view(GROUPS, GROUP_SIZE)
        spread = rewards.std(1, keepdim=True, unbiased=False)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-6)).flatten()
        differs = (spread[:, 0] > 0).repeat_interleave(GROUP_SIZE)[said.member]
        if differs.any():
            said = Said(*(column[differs] for column in said))
            names, sequence = said.member.unique(return_inverse=True)
            current = player(said.low, said.high, said.before).gather(1, said.digit[:, None])[:, 0]
            inputs = LossInputs(
                current_N=current,
                proximal_N=current.detach(),
                behaviour_N=said.logprob,
                advantages_N=advantages[said.member],
                sequence_N=sequence,
                num_sequences=len(names),
            )
            loss, report = policy_loss(settings, inputs, Totals(tokens=len(said.digit), sequences=len(names)))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(player.parameters(), 1.0)
            optimizer.step()
            clipped.append(float(report.shares["actor/clipfrac"]))
        past = [*past, copy.deepcopy(player)][-1 - age :]
    _, tested = play(player, TESTED, 1, torch.Generator().manual_seed(7))
    return float(tested.mean()), statistics.fmean(clipped) if clipped else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.01])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for rate in args.rates:
        for name, (age, keys) in CANDIDATES.items():
            settings = TrainSettings.model_validate({"lr": rate, "steps": args.steps, **keys})
            found = [learn(seed, age, settings) for seed in range(args.seeds)]
            success, clips = zip(*found, strict=True)
            spread = f"{100 * min(success):.1f} to {100 * max(success):.1f}"
            print(
                f"rate {rate:g}, {name}: success {100 * statistics.fmean(success):.1f} % ({spread}), "
                f"clipped {100 * statistics.fmean(clips):.1f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
