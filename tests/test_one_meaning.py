"""The same schedule and the same costs give the same numbers in every verb, first or second."""

import json
from fractions import Fraction

import pytest

from hocket import Bytes, Costs, build, dumps, simulate
from hocket.cli import main
from hocket.comparison import compare, competitor
from hocket.costs import costs_from, fitted_together, load_costs
from hocket.errors import CostError
from hocket.explanation import explain
from hocket.page.api import Given, answer, shown
from hocket.planner import Request, plan
from hocket.simulator.samples import simulate_jitter

SIZE = ["-p", "8", "-m", "16"]
SCALARS = 'unit = "ms"\nF = 100\nI = 120\nW = 80\nlatency = 2\n'
SIZES = "[bytes]\nstatic = 10e9\nactivation = 2e9\n"


def run(capsys, *words):
    status = main(list(map(str, words)))
    out, err = capsys.readouterr()
    return status, out, err


def of_json(capsys, *words):
    status, out, err = run(capsys, *words, "--json")
    assert status == 0, err
    return json.loads(out)


@pytest.fixture
def costs(tmp_path, monkeypatch):
    """Writes costs.toml where the test runs."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="costs.toml"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_zb_v_p8_m16_takes_51_5_and_8_in_flight_in_every_verb(capsys, tmp_path):
    simulated = of_json(capsys, "simulate", "zb-v", *SIZE)
    assert simulated["makespan"] == 51.5 and simulated["per"] == "rank"
    assert {r["peak_in_flight"] for r in simulated["ranks"]} == {8}
    row = of_json(capsys, "compare", *SIZE, "zb-v")["rows"][0]
    assert (row["makespan"], row["in_flight"]) == (51.5, 8)
    explained = of_json(capsys, "explain", "zb-v", *SIZE, "--alone")
    assert (explained["makespan"], explained["memory_limit"]) == (51.5, 8)
    drawn = run(capsys, "show", "zb-v", *SIZE, "--width", 100)[1]
    assert "makespan 51.5 " in drawn and "│ 7% 8\n" in drawn
    view = answer(Given(build("zb-v", p=8, m=16)), {"schedule": "zb-v", "p": "8", "m": "16"})
    assert view["views"][0]["makespan"] == 51.5 and view["views"][0]["peaks"] == [8] * 8
    for words in (("simulate", "zb-v", *SIZE), ("explain", "zb-v", *SIZE, "--alone")):
        assert "51.5" in run(capsys, *words)[1]


@pytest.mark.parametrize(("first", "second"), [("1f1b", "zb-v"), ("zb-v", "1f1b")])
def test_two_schedules_on_one_page_take_the_same_time_whichever_is_first(first, second):
    given = Given(build(first, p=8, m=16), beside=build(second, p=8, m=16))
    times = {label: t.makespan for label, t in shown(given).items()}
    assert times == {"1f1b": 69, "zb-v": 51.5}


def test_a_change_between_equal_peaks_is_not_told_as_half(capsys):
    changed = of_json(capsys, "compare", *SIZE, "zb-v", "1f1b")["change"]
    peaks = changed["peak_in_flight"]
    assert max(p["before"] for p in peaks) == max(p["after"] for p in peaks) == 8
    assert (
        "peak in flight, fullest rank: 8, as before"
        in run(capsys, "compare", *SIZE, "zb-v", "1f1b")[1]
    )


def test_plan_and_explain_agree_on_time_and_bytes_of_the_planned_schedule(capsys, costs):
    file = costs(f'per = "rank"\n{SCALARS}{SIZES}')
    words = ["plan", "-p", 4, "-m", 8, "--costs", file, "--shapes", "v", "-v", 2, "--no-search"]
    planned = of_json(capsys, *words, "--output", "best.sched")
    mine = next(e for e in planned["competitors"] if e["makespan"] == planned["makespan"])
    for verb, extra in (("explain", ["--alone"]), ("simulate", [])):
        seen = of_json(capsys, verb, "best.sched", "--costs", file, *extra)
        assert seen["makespan"] == planned["makespan"]
    assert explain(
        simulate(build("zb-v", p=4, m=8), load_costs(file)), load_costs(file), others=False
    ).limit == max(
        r["peak_bytes"]
        for r in of_json(capsys, "simulate", "zb-v", "-p", 4, "-m", 8, "--costs", file)["ranks"]
    )
    assert mine["peak_bytes"] == max(r["peak_bytes"] for r in seen["ranks"])


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "zb-v", *SIZE), ("show", "zb-v", *SIZE), ("explain", "zb-v", *SIZE),
        ("compare", *SIZE, "1f1b", "zb-v"), ("plan", *SIZE),
        ("view", "zb-v", *SIZE, "--output", "page.html"),
        ("simulate", "seq1f1b", *SIZE, "-o", "slices=2"),
    ],
)  # fmt: skip
def test_costs_that_do_not_say_what_they_are_per_are_refused_where_it_matters(words, capsys, costs):
    status, out, err = run(capsys, *words, "--costs", costs(SCALARS))
    assert (status, out) == (2, "")
    assert err.startswith("hocket: the costs do not say what they are per, but ")
    assert 'add per = "rank" (one rank\'s share of the model) or per = "stage"' in err


@pytest.mark.parametrize("verb", ["simulate", "explain"])
def test_old_files_read_as_before_where_each_rank_has_one_stage(verb, capsys, costs):
    words = [verb, "1f1b", *SIZE, "--costs"]
    assert of_json(capsys, *words, costs(SCALARS))["makespan"] == 6980
    assert of_json(capsys, *words, costs(f'per = "rank"\n{SCALARS}'))["makespan"] == 6980


@pytest.mark.parametrize(("n", "per"), [(4, "rank"), (8, "stage")])
def test_the_length_of_lists_tells_what_they_are_per(n, per, capsys, costs):
    file = costs(f"F = {[1.0] * n}\n")
    seen = of_json(capsys, "simulate", "zb-v", "-p", 4, "-m", 8, "--costs", file)
    assert seen["per"] == per
    # a rank's F takes 1 in two stages, or 1 in each of them
    assert seen["makespan"] == simulate(
        build("zb-v", p=4, m=8), Costs(F=(1.0 if per == "stage" else 0.5,) * 8,
        I=1 if per == "stage" else Fraction(1, 2), W=1 if per == "stage" else Fraction(1, 2))
    ).makespan  # fmt: skip


def test_costs_per_stage_are_refused_for_schedules_that_would_be_different_models(capsys, costs):
    status, _, err = run(
        capsys, "compare", *SIZE, "1f1b", "zb-v", "--costs", costs(f'per = "stage"\n{SCALARS}')
    )
    assert (status, err) == (
        2,
        "hocket: the costs are per stage, but these schedules have 8 and 16 stages, so they would "
        'be different models; use per = "rank"\n',
    )
    with pytest.raises(CostError, match="the number of stages is not fixed"):
        plan(Request(p=4, m=8, costs=Costs(F=2)))


def test_lists_per_stage_are_those_of_one_model_whichever_schedule_is_first():
    one, two = build("1f1b", p=4, m=8).placement, build("zb-v", p=4, m=8).placement
    costs = Costs(F=(1, 2, 3, 4), bytes=Bytes(static=8, message=(5, 6, 7, 8)))
    first, second = fitted_together(costs, [one, two])
    assert fitted_together(costs, [two, one]) == [second, first]
    assert first == costs
    assert tuple(Fraction(x, 2) for x in (1, 1, 2, 2, 3, 3, 4, 4)) == second.F
    assert second.bytes.message == (5, 5, 6, 6, 7, 7, 8, 8)
    back = fitted_together(second, [one])[0]
    assert back.F == costs.F and back.bytes.message == costs.bytes.message


def test_costs_of_layers_are_joined_to_even_stages_in_every_verb(capsys, costs):
    file = costs('per = "layer"\nF = [1, 1, 1, 1, 1, 3]\nI = 1\nW = 1\n')
    seen = of_json(capsys, "simulate", "1f1b", "-p", 2, "-m", 4, "--costs", file)
    words = ["-p", 2, "-m", 4, "--costs", file, "--shapes", "linear", "-v", 1]
    planned = of_json(capsys, "plan", *words, "--no-search", "--backward", "full")
    assert sum(planned["layers"]) == 6
    row = of_json(capsys, "compare", "-p", 2, "-m", 4, "1f1b", "--costs", file)["rows"][0]
    assert seen["makespan"] == row["makespan"] >= planned["makespan"]
    assert seen["per"] == "layer"


def test_costs_in_python_are_per_stage_unless_they_say_per_rank():
    s = build("interleaved", p=4, m=8, v=2)
    assert simulate(s, Costs()).makespan == 57
    assert simulate(s, Costs(per="rank")).makespan == 28.5
    assert max(r.peak_in_flight for r in simulate(s).ranks) == 11
    assert max(simulate(s).in_flight) == 5.5
    assert simulate_jitter(s, Costs(per="rank"), samples=1, spread=0.0).makespan[0] == 28.5


def test_comparing_sums_up_the_same_work_however_a_model_is_cut():
    names = ("1f1b", "zb-v", "dualpipe", "seq1f1b")
    rows = compare(
        [competitor(n, n, p=4, m=8) for n in names], Costs(F=8, I=8, W=8, per="rank")
    ).rows
    for row in rows:
        assert (1 - row.bubble_ratio) * float(row.makespan) == pytest.approx(8 * 24)


# --- slices, faults, units -------------------------------------------------------------------


def test_factors_of_slices_are_refused_for_a_schedule_without_slices(capsys, costs):
    status, _, err = run(
        capsys, "simulate", "1f1b", *SIZE, "--costs", costs("slice = [0.8, 1.2]\n")
    )
    assert (status, err) == (
        2,
        "hocket: slice has 2 factors, but 1f1b does not cut sequences into slices; leave slice "
        "out of the costs\n",
    )
    words = ["1f1b", "seq1f1b:slices=2", "--costs", "costs.toml"]
    assert run(capsys, "compare", *SIZE, *words)[0] == 0


def test_all_faults_of_a_costs_file_are_told_in_one_run(costs):
    text = 'F = -1\nG = 2\nslowdown = 0.5\nper = "node"\n[bytes]\nstatic = "x"\nsize = 1\n'
    with pytest.raises(CostError) as caught:
        load_costs(costs(text))
    assert [line.partition(";")[0] for line in str(caught.value).splitlines()] == [
        "costs.toml: unknown key 'G'",
        "costs.toml: unknown key of bytes 'size'",
        "costs.toml: bytes.static is 'x'",
        "costs.toml: F is -1",
        "costs.toml: slowdown is 0.5",
        "costs.toml: per is 'node'",
    ]


def test_times_and_bytes_are_for_people_and_exact_in_json(capsys, costs):
    file = costs(f'per = "rank"\n{SCALARS}{SIZES}')
    _, out, _ = run(capsys, "simulate", "1f1b", *SIZE, "--costs", file)
    assert "makespan 6.98 s, span 6.98 s" in out and "26 GB" in out
    assert of_json(capsys, "simulate", "1f1b", *SIZE, "--costs", file)["makespan"] == 6980


@pytest.mark.parametrize("limit", ["22GB", "22e9", "22000 MB", "20.489GiB"])
def test_a_memory_limit_is_read_with_its_unit(limit, capsys, costs):
    file = costs(f'per = "rank"\n{SCALARS}{SIZES}')
    words = ["plan", "-p", 2, "-m", 4, "--shapes", "linear", "-v", 1, "--no-search", "--no-named"]
    seen = of_json(capsys, *words, "--costs", file, "--memory", limit)
    assert max(e["peak_bytes"] for e in seen["competitors"] if e["value"] is not None) <= 22e9


def test_memory_in_another_unit_is_said_in_the_costs():
    costs = costs_from({"bytes": {"unit": "MB", "static": 512}})
    assert costs.bytes.unit == "MB"
    assert dumps(build("1f1b", p=2, m=2))
    with pytest.raises(CostError, match=r"^bytes.unit is 'pounds'; it must be one of B, kB, MB,"):
        costs_from({"bytes": {"unit": "pounds"}})
