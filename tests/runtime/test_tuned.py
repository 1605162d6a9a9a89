"""Tuned configurations: the file, what leads to an entry, and calls that take it."""

import json
import multiprocessing
import os
import warnings

import helpers
import pytest
import torch

import mkernel as mk
from mkernel.runtime import cache, tuned
from mkernel.runtime.tuned import Table, Tunable, bucket
from mkernel.tuning.spaces import families_of
from mkernel.workloads import WORKLOADS, tunable, workload_of

PLACE = "some GPU, 1 x 2 ranks of 6 CTAs"
ENTRY = {"config": {"group_m": 4}}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "here" / "tuned.json"))
    monkeypatch.setattr(tuned, "_reported", set())
    return tuned.path()


# -- the file


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuned.path() == tmp_path / ".cache" / "mkernel" / "tuned.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the rules say to ignore
    assert tuned.path() == tmp_path / ".cache" / "mkernel" / "tuned.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.path() == tmp_path / "xdg" / "mkernel" / "tuned.json"
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "mine.json"))
    assert tuned.path() == tmp_path / "mine.json"


def test_nothing_is_tuned_for_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", without_a_home)
    with pytest.raises(mk.MKernelError, match="no home folder: set XDG_CACHE_HOME"):
        tuned.path()
    assert tuned._what_is_known() == {}


def without_a_home():
    raise RuntimeError("Could not determine home directory.")


def test_what_is_written_is_read(file):
    assert tuned.read(file) == {}
    tuned.write(file, {"a": ENTRY})
    tuned.write(file, {"b": ENTRY})
    tuned.write(file, {"a": {"config": {}}})
    assert tuned.read(file) == {"a": {"config": {}}, "b": ENTRY}
    assert sorted(os.listdir(file.parent)) == ["tuned.json", "tuned.json.lock"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 2, "entries": {}}',
        '{"format": 1, "entries": {"a": {}}}',
        "\x00\xff",
        "[" * 10**5,
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_file_is_reported_once_and_ignored(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=r"tuned.json is ignored, because it can not be read"):
        assert tuned.read(file) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.read(file) == {}
    tuned.write(file, {"a": ENTRY})
    assert tuned.read(file) == {"a": ENTRY}
    assert file.with_name("tuned.json.damaged").read_text() == text


def _write_many(path, writer):
    for i in range(20):
        tuned.write(path, {f"{writer}.{i}": ENTRY})


def test_writers_do_not_lose_what_others_write(file):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(file, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a reader never sees half a file
            tuned.read(file)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(tuned.read(file)) == 80


def test_a_lock_that_is_never_released_is_named(file, monkeypatch):
    monkeypatch.setattr(tuned, "LOCK_SECONDS", 0.1)
    tuned.write(file, {"a": ENTRY})
    with (
        tuned._locked(file.with_name("tuned.json.lock")),
        pytest.raises(mk.MKernelError, match="another process has held"),
    ):
        tuned.write(file, {"b": ENTRY})
    assert tuned.read(file) == {"a": ENTRY}


# -- keys


def test_buckets():
    assert bucket(4096) == bucket(5120) == "4096"
    assert bucket(8192) == bucket(6144) == "8192"
    assert bucket(4100) == "4096 ragged"
    assert bucket(1) == "1 ragged"
    assert bucket(0) == "0"


def test_keys_differ_in_everything_that_matters():
    given = (PLACE, "op", torch.bfloat16, dict(m=128, n=256))
    others = [
        ("other", "op", torch.bfloat16, dict(m=128, n=256)),
        (PLACE, "po", torch.bfloat16, dict(m=128, n=256)),
        (PLACE, "op", torch.float16, dict(m=128, n=256)),
        (PLACE, "op", torch.bfloat16, dict(m=256, n=256)),
        (PLACE, "op", torch.bfloat16, dict(m=128)),
    ]
    keys = {tuned.key_of(*arguments) for arguments in (given, *others)}
    assert len(keys) == 6
    assert mk.__version__ in tuned.key_of(*given)


def test_entries_of_another_version_are_not_taken(monkeypatch):
    sizes = dict(m=32, n=32, k=32)
    entries = workload_of("matmul_all_reduce").tunable.entries(
        PLACE, torch.float32, mk.Config(group_m=4), {}, **sizes
    )  # fmt: skip
    monkeypatch.setattr(tuned, "__version__", "0.0.0")
    assert Table(PLACE, entries).find("matmul_all_reduce", torch.float32, sizes) is None


# -- calls


def with_table(group, entries):
    group.tuned = Table(PLACE, entries)


def entries_for(op, config, dtype=torch.float32, **sizes):
    return WORKLOADS[op].tunable.entries(PLACE, dtype, config, {"milliseconds": 1.0}, **sizes)


CASE = helpers.Case(32, 48, 64)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_call_takes_what_was_tuned_and_explain_says_so(op):
    config = {
        "all_gather_matmul": mk.Config(tile_m=16, tile_n=16, chunk_rows=4, group_m=3),
        "matmul_reduce_scatter": mk.Config(tile_m=16, tile_n=16, ctas=3, group_m=3),
        "matmul_all_reduce": mk.Config(tile_m=16, tile_n=16, ctas=3, group_m=3),
    }[op]
    function = getattr(mk, op)

    def on_rank(group):
        a, b = CASE.rows(group.rank), CASE.weights(0)
        plain = mk.explain(op, a, b)
        assert str(plain).endswith("configuration: default")
        before = function(a, b)
        with_table(group, entries_for(op, config, m=32, n=48, k=64))
        after = function(a, b)
        assert torch.allclose(before, after, atol=1e-4)
        plan = mk.explain(op, a, b)
        assert str(plan).endswith("configuration: tuned")
        assert (plan.config.tile_m, plan.config.tile_n, plan.config.group_m) == (16, 16, 3)
        if op == "all_gather_matmul":
            assert plan.config.chunk_rows == 4
            assert any(key[0] == op and dict(key[1]).get("chunk_rows") == 4 for key in group._agreed)
        else:
            assert plan.config.ctas == 3
        # what was given comes first; another dtype and another bucket were not tuned
        given = mk.explain(op, a, b, config=mk.Config(group_m=5))
        assert "configuration: as given" in str(given)
        assert given.config.group_m == 5
        assert "configuration: default" in str(mk.explain(op, a.half(), b.half()))
        assert "configuration: default" in str(mk.explain(op, torch.ones(200, 64), b))

    helpers.run(on_rank, cluster=(1, 2))


def test_ranks_with_other_columns_take_the_same_chunks():
    """Only rank 0's columns were tuned: chunks follow from what is the same on every rank."""
    case = helpers.Case(32, (48, 9), 64)

    def on_rank(group):
        with_table(group, entries_for("all_gather_matmul", mk.Config(chunk_rows=4, group_m=3), m=32, n=48, k=64))
        y = helpers.call(group, case)
        plan = mk.explain("all_gather_matmul", case.rows(group.rank), case.weights(group.rank))
        return y.shape[1], plan.config.chunk_rows, plan.config.group_m

    assert helpers.run(on_rank, cluster=(1, 2)) == [(48, 4, 3), (9, 4, 2)]


def test_what_was_tuned_with_other_shared_fields_is_left_alone():
    first = entries_for("matmul_all_reduce", mk.Config(tile_n=16, group_m=3), m=32, n=48, k=64)
    second = entries_for("matmul_all_reduce", mk.Config(tile_n=64, group_m=5), m=32, n=48, k=1024)

    def on_rank(group):
        with_table(group, first | second)
        tunable = WORKLOADS["matmul_all_reduce"].tunable
        return [tunable.choose(group, torch.float32, None, m=32, n=48, k=k) for k in (64, 1024)]

    assert helpers.run(on_rank, cluster=(1, 1))[0] == [mk.Config(tile_n=64), mk.Config(tile_n=64, group_m=5)]


def test_an_entry_that_is_no_configuration_is_reported_and_ignored(file):
    tunable = Tunable("matmul_all_reduce", ("m", "n"), ("k",), ("tile_m",))
    entries = tunable.entries(PLACE, torch.float32, mk.Config(), {}, m=32, n=48, k=64)
    for entry in entries.values():
        entry["config"] = {"tile_m": 17}

    def on_rank(group):
        with_table(group, entries)
        with pytest.warns(UserWarning, match=r"an entry of .*tuned.json is ignored: config.tile_m must be a power"):
            assert tunable.choose(group, torch.float32, None, m=32, n=48, k=64) is None

    helpers.run(on_rank, cluster=(1, 1))


def test_nothing_is_tuned_in_the_simulator(file):
    """And the file is not even looked for."""
    file.parent.mkdir()
    file.write_text("damaged")

    def on_rank(group):
        return group.tuned.entries

    assert helpers.run(on_rank, cluster=(1, 2)) == [{}, {}]


# -- what is searched


@pytest.mark.parametrize("op", tunable())
@pytest.mark.parametrize("hopper", [False, True])
def test_families(op, hopper):
    """Every value of every field is one that the default does not have, and the shared ones are known."""

    def on_rank(group):
        call = workload_of(op).make(group, workload_of(op).smallest(group.size), torch.float32)
        plan = call.tried.explain(None)
        object.__setattr__(plan, "hopper", hopper)
        families = families_of(op, group, plan)
        assert len(families) == 1 + hopper
        assert families[0].start == mk.Config()
        for name, values in families[0].axes.items():
            assert getattr(plan.config, name) not in values
        assert {"ctas", "group_m"} <= set(families[0].axes)
        assert hopper == ("stages" not in families[0].axes)
        assert set(workload_of(op).tunable.shared) <= set(families[-1].axes)

    helpers.run(on_rank, cluster=(1, 2))


def test_the_file_is_json_for_people(file):
    tuned.write(file, entries_for("all_gather_matmul", mk.Config(chunk_rows=64, group_m=4), m=4096, n=2048, k=8192))
    told = json.loads(file.read_text())
    assert told["format"] == tuned.FORMAT
    own = next(entry for key, entry in told["entries"].items() if key.endswith("k 8192, m 4096, n 2048"))
    assert own["config"] == {"group_m": 4}
    common = next(entry for key, entry in told["entries"].items() if key.endswith("k 8192, m 4096"))
    assert common["config"] == {"chunk_rows": 64}
