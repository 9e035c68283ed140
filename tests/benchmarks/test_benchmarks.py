"""What the benchmarks share."""


def test_rounds_take_turns_and_give_medians(module):
    measure = module("common.measure")
    order, ticks = [], []
    variants = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    rounds = measure.Rounds().run(variants, 3, lambda: ticks.append(1))
    assert "".join(order) == "abbaab" and len(ticks) == 6
    rounds.samples = {"a": [measure.Sample(wall, 10 - wall) for wall in (2, 30, 4)]}
    assert rounds.wall("a") == 4 and rounds.cpu("a") == 6
