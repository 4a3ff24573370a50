"""The paper's experiments run, and the clearest of them come out as in the paper."""

from benchmarks.paper import NO_LINKS, Setup, play


def test_frozen_lake_is_faster_on_h800_than_on_h20_of_the_same_price() -> None:
    took = [
        play(
            Setup(
                tasks={"frozen_lake": "auto"},
                pools={"pool": (hardware, count, 1)},
                mode="sync+",
                groups=2,
                steps=2,
                skip=1,
                sim=NO_LINKS,
            )
        )["step_s"]
        for hardware, count in (("h800", 2), ("h20", 6))
    ]
    assert took[0] < 0.75 * took[1]
