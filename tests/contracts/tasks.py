"""What every TaskSet must do: one suite, run against each adapter."""

from abc import ABC, abstractmethod

from rollart.ports import TaskSet

SEVERAL = range(12)


class TaskSetContract(ABC):
    @abstractmethod
    def tasks(self, seed: int = 0) -> TaskSet:
        """Of the domain `a`."""

    def test_the_same_seed_and_index_give_the_same_task(self) -> None:
        for index in SEVERAL:
            assert self.tasks().task(index) == self.tasks().task(index)
            assert self.tasks().held_out(index) == self.tasks().held_out(index)

    def test_another_seed_gives_others(self) -> None:
        assert [self.tasks(1).task(index) for index in SEVERAL] != [self.tasks(2).task(index) for index in SEVERAL]

    def test_every_task_has_its_own_id_and_says_its_domain_and_index(self) -> None:
        tasks = self.tasks()
        every = [draw(index) for draw in (tasks.task, tasks.held_out) for index in SEVERAL]
        assert len({task.id for task in every}) == len(every)
        assert {task.domain for task in every} == {"a"}
        assert [task.index for task in every] == [*SEVERAL, *SEVERAL]

    def test_the_order_of_draws_does_not_matter(self) -> None:
        tasks = self.tasks()
        backwards = [tasks.task(index) for index in reversed(SEVERAL)]
        assert [self.tasks().task(index) for index in SEVERAL] == backwards[::-1]

    def test_there_is_no_last_task(self) -> None:
        assert self.tasks().task(10**6).index == 10**6
