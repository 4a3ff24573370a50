"""Find the word that is in the bag, in at most six guesses: a whole task file."""

from rollart.tasks.api import Environment, Episode, TaskSet, observe

LETTERS = "abcde"
MAX_GUESSES = 6


class Bag(Environment):
    """Says how many letters of a guess stand where they should."""

    def __init__(self, word):
        self.word = word
        self.guesses = 0
        self.over = False

    def reset(self):
        return f"Guess my word of three letters, each one of {LETTERS}.\n"

    def step(self, action):
        if self.over:
            return observe(done=True)
        guess = action.strip()
        self.guesses += 1
        self.over = guess == self.word or self.guesses == MAX_GUESSES
        if self.over:
            return observe(reward=float(guess == self.word), done=True)
        right = sum(mine == yours for mine, yours in zip(self.word, guess, strict=False))
        return observe(f"{right} right\n")


class BagTasks(TaskSet):
    def draw(self, rng):  # one problem, as JSON values
        return {"word": "".join(rng.choice(LETTERS) for _ in range(3))}

    def environment(self, task):  # a new environment for it
        return Bag(task.payload["word"])

    def scripted(self, task, observations, rng):  # the right answer, for `rollart task check`
        return task.payload["word"]


def score(episode: Episode):  # optional; without it, the sum of what the steps gave
    return {"found": episode.reward, "brevity": 0.1 * episode.reward * (MAX_GUESSES - len(episode.turns))}
