"""What does the shopping cost? The model looks prices up with a tool, as often as it likes: a task with tools."""

from rollart.tasks.api import TaskSet, observe
from rollart.tasks.tools import ToolEnvironment, written

PRICES = {"apple": 3, "bread": 5, "cheese": 8, "dates": 6, "eggs": 4, "figs": 7, "grapes": 9, "honey": 2}


def price(item: str) -> int:
    """The price of one item in the shop.

    Args:
        item: its name, such as apple
    """
    return PRICES[item]  # a KeyError is said to the model


class Shopping(ToolEnvironment):
    def __init__(self, items):
        self.items = items

    def tools(self):  # functions, or McpServer(...).tools()
        return [price]

    def start(self):
        return f"What do {', '.join(self.items)} cost together? Say the number only.\n"

    def answer(self, text):  # the model spoke without a call
        return observe(reward=float(text.strip() == str(sum(PRICES[item] for item in self.items))), done=True)


class ShoppingTasks(TaskSet):
    def draw(self, rng):
        return {"items": rng.sample(sorted(PRICES), 4)}

    def environment(self, task):
        return Shopping(task.payload["items"])

    def scripted(self, task, observations, rng):  # first all calls at once, then the sum
        items = task.payload["items"]
        if len(observations) == 1:
            return "".join(written("price", item=item) for item in items)
        return str(sum(int(line) for line in observations[-1].split()))
