"""Tests the benchmarks' entry point and the rounds that run variants in alternating order."""


def test_the_entry_point_lists_every_program(module, capsys, monkeypatch):
    entry = module("__main__")
    monkeypatch.setattr(entry.sys, "argv", ["benchmarks"])
    assert entry.main() == 0
    for line, name in zip(capsys.readouterr().out.splitlines()[2:], entry.PROGRAMS, strict=True):
        assert line.split(maxsplit=1)[0] == name and line.endswith("."), line
        assert len(line) <= 140 and entry.path_of(entry.PROGRAMS[name]).is_file()
    monkeypatch.setattr(entry.sys, "argv", ["benchmarks", "unknown"])
    assert entry.main() == 2


def test_rounds_take_turns_and_give_medians(module):
    measure = module("common.measure")
    order, ticks = [], []
    variants = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    rounds = measure.Rounds().run(variants, 3, lambda: ticks.append(1))
    assert "".join(order) == "abbaab" and len(ticks) == 6
    rounds.samples = {"a": [measure.Sample(wall, 10 - wall) for wall in (2, 30, 4)]}
    assert rounds.wall("a") == 4 and rounds.cpu("a") == 6
