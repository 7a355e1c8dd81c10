"""Reading recipes: what extends what, what replaces what, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from factorized.experiments.cli.arguments import recipe_fields
from factorized.experiments.recipes.find import check_recipe, load_recipe, merge
from factorized.experiments.recipes.recipe import BUDGETS, COMPRESSING, USED_BY, Factorize

MODEL = '[model]\nname = "resnet8"\n'


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


def test_a_recipe_extends_another_table_by_table(tmp_path: Path) -> None:
    write(tmp_path, "base", MODEL + "[optimizer]\nlr = 0.3\nmomentum = 0.5\n")
    recipe = load_recipe(write(tmp_path, "own", 'extends = "base.toml"\n[optimizer]\nlr = 0.2\n'))
    assert (recipe.model.name, recipe.optimizer.lr, recipe.optimizer.momentum) == ("resnet8", 0.2, 0.5)


def test_a_recipe_of_ones_own_extends_a_shipped_one_without_its_figure(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "own", 'extends = "cifar10/resnet32x2"\n[schedule]\nepochs = 3\n'))
    assert recipe.paper is None
    assert (recipe.name, recipe.schedule.epochs, recipe.data.name) == ("own", 3, "cifar10")


def test_a_recipe_does_not_take_the_name_of_the_one_it_extends(tmp_path: Path) -> None:
    write(tmp_path, "base", 'name = "mine/base"\nextends = "digits/resnet8"\n')
    assert load_recipe(write(tmp_path, "own", 'extends = "base.toml"\n')).name == "own"
    assert load_recipe(write(tmp_path, "own", 'name = "mine/own"\nextends = "base.toml"\n')).name == "mine/own"


def test_a_recipe_of_ones_own_extends_a_cell_of_a_table(tmp_path: Path) -> None:
    text = 'extends = "cifar10/resnet32x2-lowrank-0.1-si-fd"\n[factorize]\nrank_scale = 0.5\n'
    recipe = load_recipe(write(tmp_path, "own", text))
    assert (recipe.name, recipe.paper, recipe.decay.kind) == ("own", None, "frobenius")
    assert recipe.factorize.budget == {"rank_scale": 0.5}
    assert recipe.factorize.init == "spectral"
    assert load_recipe("cifar10/resnet32x2-lowrank-0.1-si-fd").factorize.budget == {"ratio": 0.1}


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", 'extends = "b.toml"\n')
    with pytest.raises(ValueError, match="extends itself, by way of a -> b"):
        load_recipe(write(tmp_path, "b", 'extends = "a.toml"\n').replace("b.toml", "a.toml"))


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_replaces_a_budget_of_another_name(budget: str) -> None:
    value = 3 if budget == "rank" else 0.5
    recipe = load_recipe("digits/resnet8-lowrank-0.1", [f"factorize.{budget}={value}"])
    assert recipe.factorize.budget == {budget: value}


def test_another_scheme_drops_the_fields_that_it_does_not_use() -> None:
    wide = ["factorize.scheme=overcomplete", "factorize.variant=wide", "factorize.width=2"]
    recipe = load_recipe("digits/resnet8", [*wide, "factorize.scheme=monarch", "factorize.ratio=0.3"])
    assert recipe.factorize == Factorize(scheme="monarch", ratio=0.3)
    assert load_recipe("digits/resnet8", [*wide, "factorize.scheme=none"]).factorize == Factorize()
    kept = load_recipe("digits/resnet8-lowrank-0.1-si", ["factorize.kind=channel", "factorize.scheme=low_rank"])
    assert (kept.factorize.kind, kept.factorize.init, kept.factorize.ratio) == ("channel", "spectral", 0.1)


def test_a_field_of_another_scheme_beside_the_new_one_is_still_refused() -> None:
    below = {"model": {"name": "resnet8"}, "factorize": {"scheme": "low_rank", "ratio": 0.1}}
    with pytest.raises(ValueError, match="variant = 'wide' is for overcomplete, and scheme is tucker"):
        check_recipe(merge(below, {"factorize": {"scheme": "tucker", "variant": "wide"}}), "own")


def test_merging_leaves_what_it_was_given_alone() -> None:
    below, above = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merge(below, above) == {"a": {"b": 3, "c": 2}}
    assert below == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("schedule.epochs=7", ("schedule", "epochs"), 7),
        ("data.flip=true", ("data", "flip"), True),
        ("schedule.milestones=[3, 6]", ("schedule", "milestones"), [3, 6]),
        ("model.name=resnet20", ("model", "name"), "resnet20"),
        ('model.name="resnet20"', ("model", "name"), "resnet20"),
        ("model.name = mine:build", ("model", "name"), "mine:build"),
    ],
)
def test_a_change_is_read_as_toml_and_a_word_needs_no_quotes(
    change: str, field: tuple[str, str], value: object
) -> None:
    recipe = load_recipe("digits/resnet8", [change])
    assert recipe.to_dict()[field[0]][field[1]] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnam = 'a'\n", "there is no field 'model.nam' \\(did you mean 'name'\\?\\); fields here: name"),
        (MODEL + "[optimiser]\nlr = 1\n", "there is no field 'optimiser' \\(did you mean 'optimizer'\\?\\)"),
        (MODEL + "papr = {table = 1}\n", "there is no field 'model.papr'"),
        (MODEL + "[decay]\nkind = 'l2'\n", "decay.kind: .*'weight'.*, got 'l2'"),
        (MODEL + "[schedule]\nepochs = 0\n", "schedule.epochs: .*greater than 0, got 0"),
        (MODEL + "[schedule]\nepochs = true\n", "schedule.epochs: .*valid integer, got True"),
        (MODEL + "[run]\nbatch = '64'\n", "run.batch: .*valid integer, got '64'"),
        (MODEL + "[data]\nflip = 'no'\n", "data.flip: .*valid boolean, got 'no'"),
        (MODEL + "[optimizer]\nlr = inf\n", "optimizer.lr: .*finite number, got inf"),
        (MODEL + "[decay]\nstrength = nan\n", "decay.strength: .*finite number, got nan"),
        ("name = '../../home'\n" + MODEL, "name: runs are written to OUT/NAME: .*got '../../home'"),
        ("name = '/home'\n" + MODEL, "name: runs are written to OUT/NAME: .*got '/home'"),
        ("name = ''\n" + MODEL, "name: runs are written to OUT/NAME: .*got ''"),
        (MODEL + "[factorize]\nscheme = 'low_rank'\n", "low_rank needs a budget"),
        (MODEL + "[factorize]\nratio = 0.1\n", "needs a scheme"),
        (MODEL + "[factorize]\nscheme = 'low_rank'\nratio = 0.1\nrank = 3\n", "give one of"),
        (MODEL + "[decay]\nkind = 'frobenius'\n", "acts on products"),
        (MODEL + "[decay]\nkind = 'normalized'\n", "norms of another run"),
        ("title = 'x'\n", 'model is missing: a recipe names its network, as \\[model\\] name = "resnet8"'),
        ("[model]\n", "model.name is missing"),
        ("[model]\nname = ' '\n", "model.name: expected a word, got ' '"),
        ('title = "a\\nb"\n' + MODEL, "title: expected text without line breaks"),
        (f"name = '{300 * 'x'}'\n" + MODEL, "name: .*at most 200 bytes a folder"),
        (MODEL + "[data]\nworkers = 2\n", 'workers = 2 read ahead for place = "loader"'),
        (
            MODEL + "[data]\ncrop_padding = 100000000\n",
            "data.crop_padding: .*less than or equal to 1000, got 100000000",
        ),
        (MODEL + "[optimizer]\nmomentum = 0.0\nnesterov = true\n", "nesterov = true needs a momentum above 0"),
        (MODEL + "[schedule]\nepochs = 100000000000000000000\n", "schedule.epochs: "),
        (MODEL + "[schedule]\nfactor = 1e308\n", "schedule.factor: .*less than or equal to 1"),
        (MODEL + "[decay]\nstrength = 1e308\n", "decay.strength: .*less than or equal to 100"),
        ("title = \n", "not valid TOML"),
        ("extends = 3\n", "extends must be the name of a recipe, got 3"),
        ("extends = 'cifar10/resnet33'\n", "did you mean 'cifar10/resnet32'\\?"),
    ],
)
def test_a_wrong_recipe_says_where_and_what_there_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(write(tmp_path, "own", text))
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"nmae.*scedule") as caught:
        check_recipe({"model": {"name": "resnet8", "nmae": 1}, "scedule": {}}, "own")
    assert str(caught.value).startswith("own: ")


VALUES = {
    "kind": "channel",
    "variant": "wide",
    "width": 2,
    "dims": [4, 4],
    "order": 3,
    "separable": True,
    "core": "train",
    "refinements": 2,
    "energy": 0.5,
    "macs": 0.5,
    "allocate": "spectrum",
    "execution": "composed",
    "blocks": 4,
    "outer": [2, 4],
    "multiple_of": 8,
}
SCHEMES = get_args(Factorize.model_fields["scheme"].annotation)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("field", USED_BY)
def test_a_field_that_the_scheme_does_not_use_is_refused(scheme: str, field: str) -> None:
    fields = {"scheme": scheme, field: VALUES[field]}
    if scheme in COMPRESSING and field not in BUDGETS:
        fields["ratio"] = 0.1
    if field == "width":
        fields["variant"] = "wide"
    table = {"model": {"name": "resnet8"}, "factorize": fields}
    if scheme in USED_BY[field]:
        assert check_recipe(table, "own").to_dict()["factorize"][field] == VALUES[field]
        return
    with pytest.raises(ValueError, match="needs a scheme" if scheme == "none" else "is for .*, and scheme is"):
        check_recipe(table, "own")


@pytest.mark.parametrize("change", [{}, {"variant": "deep"}, {"variant": "wide", "rank_scale": 2.0}])
def test_a_width_is_of_the_wide_variant_without_a_budget(change: dict[str, object]) -> None:
    fields = {"scheme": "overcomplete", "width": 2, **change}
    with pytest.raises(ValueError, match="width = 2 is the rank scale of variant wide without a budget"):
        check_recipe({"model": {"name": "resnet8"}, "factorize": fields}, "own")


HOSTILE = ["", " ", "a\0b", "a\nb", -1, 0.5, 1e308, -1e308, 10**20, True, [], [[]], {}, ["", "a"], [-1], 5000 * "x"]


UNBOUNDED = ("optimizer.lr", "optimizer.clip")  # what is too large shows in the first steps


def refusal(table: dict[str, Any]) -> str | None:
    """Return what is wrong with a recipe; None for nothing."""
    try:
        check_recipe(table, "own")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("field", recipe_fields())
def test_a_hostile_value_is_refused_in_one_line_or_is_what_the_field_may_hold(field: str) -> None:
    section, name = field.split(".")
    for value in HOSTILE:
        message = refusal(merge({"model": {"name": "resnet8"}}, {section: {name: value}}))
        if message is None:
            assert value in (0.5, True, []) or (field in UNBOUNDED and value in (1e308, 10**20)), value
        else:
            assert message.startswith("own: "), value
            assert "\n" not in message, value
            assert len(message) < 1000, value


def test_a_path_of_the_user_s_is_recorded_from_the_working_folder_or_from_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    expected = {
        tmp_path / "here/models/vit": "models/vit",
        tmp_path / "home/vit": "~/vit",
        Path("/srv/vit"): "/srv/vit",
        Path("../vit"): "../vit",
    }
    for path, recorded in expected.items():
        table = {"model": {"name": f"hf:{path}"}, "factorize": {"scheme": "low_rank", "ratio": 0.1}}
        recipe = check_recipe({**table, "decay": {"kind": "normalized", "norms": f"{path}/seed-{{seed}}"}}, "mine")
        assert recipe.to_dict()["model"]["name"] == f"hf:{recorded}"
        assert recipe.to_dict()["decay"]["norms"] == f"{recorded}/seed-{{seed}}"


@pytest.mark.parametrize("attention", ["layers", "heads", False, ["qk", "ov"], ["ov"]])
def test_attention_is_said_as_to_a_plan(attention: object) -> None:
    fields = {"scheme": "low_rank", "ratio": 0.5, "attention": attention}
    recipe = check_recipe({"model": {"name": "resnet8"}, "factorize": fields}, "own")
    assert recipe.to_dict()["factorize"]["attention"] == attention
    assert check_recipe({"model": {"name": "resnet8"}}, "own").factorize.attention == "layers"


@pytest.mark.parametrize("attention", [True, "qk", [], ["kq"], 1])
def test_another_word_about_attention_is_refused(attention: object) -> None:
    fields = {"scheme": "low_rank", "ratio": 0.5, "attention": attention}
    with pytest.raises(ValueError, match=r"factorize\.attention"):
        check_recipe({"model": {"name": "resnet8"}, "factorize": fields}, "own")
