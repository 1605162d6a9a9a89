"""Tuned configurations: the file, what leads to an entry, and calls that take it."""

import contextlib
import json
import multiprocessing
import os
import warnings
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from support import moe_reference, operator_calls, other_users
from support.other_users import as_root
from support.workloads import workload_of

import mkernel as mk
from mkernel import cache, operators
from mkernel.compiling import PretendedGpu, pretending
from mkernel.runtime import tuned
from mkernel.runtime.tuned import Table, Tunable, bucket
from mkernel.tuning.spaces import families_of

WORKLOADS = {name: workload_of(name) for name in operators.registered("workload")}
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
    with pytest.warns(UserWarning, match=r"tuned.json is ignored, because it cannot be read"):
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


# -- files that others could change


def others_file(file):
    other_users.give_away(file)
    return file


def others_folder(file):
    other_users.give_away(file.parent)
    return file.parent


def file_with_mode(mode):
    def arrange(file):
        file.chmod(mode)
        return file

    return arrange


def folder_with_mode(mode):
    def arrange(file):
        file.parent.chmod(mode)
        return file.parent

    return arrange


def others_link(file):
    file.rename(file.with_name("elsewhere.json"))
    file.symlink_to("elsewhere.json")
    other_users.give_away(file)
    return file


def others_link_to_the_folder(file):
    file.parent.rename(file.parent.with_name("elsewhere"))
    file.parent.symlink_to("elsewhere")
    other_users.give_away(file.parent)
    return file.parent


def own_link_to_anothers_file(file):
    elsewhere = file.with_name("elsewhere.json")
    file.rename(elsewhere)
    file.symlink_to("elsewhere.json")
    other_users.give_away(elsewhere)
    return elsewhere


UNSAFE = {
    "file of another user": (others_file, "belongs to"),
    "folder of another user": (others_folder, "belongs to"),
    "file for the group": (file_with_mode(0o660), "mode 0660.*chmod go-w"),
    "file for others": (file_with_mode(0o606), "mode 0606.*chmod go-w"),
    "folder for the group": (folder_with_mode(0o770), "mode 0770.*chmod go-w"),
    "folder for others": (folder_with_mode(0o777), "mode 0777.*chmod go-w"),
    "another user's link": (others_link, "belongs to"),
    "another user's link to the folder": (others_link_to_the_folder, "belongs to"),
    "own link to another user's file": (own_link_to_anothers_file, "belongs to"),
}


@as_root
@pytest.mark.parametrize("named", ["by the variable", "by default"])
@pytest.mark.parametrize("arrangement", UNSAFE)
def test_a_file_that_others_could_change_is_not_used(tmp_path, monkeypatch, named, arrangement):
    monkeypatch.setattr(tuned, "_reported", set())
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if named == "by the variable":
        monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "mine" / "tuned.json"))
    file = tuned.path()
    tuned.write(file, {"a": ENTRY})
    arrange, wrong = UNSAFE[arrangement]
    bad = arrange(file)
    before = {path.name: path.read_text() for path in file.parent.glob("*")}
    with pytest.warns(UserWarning, match=rf"{file} is ignored.*{bad} .*{wrong}"):
        assert tuned._what_is_known() == {}
    with pytest.raises(mk.MKernelError, match=rf"cannot be kept in {file}.*{bad} .*{wrong}.*{tuned.VARIABLE}"):
        tuned.write(file, {"b": ENTRY})
    assert {path.name: path.read_text() for path in file.parent.glob("*")} == before


@as_root
def test_nothing_is_written_where_others_could_change_it(tmp_path):
    (tmp_path / "anybodys").mkdir()
    (tmp_path / "anybodys").chmod(0o777)
    file = tmp_path / "anybodys" / "mkernel" / "tuned.json"
    with pytest.raises(mk.MKernelError, match=r"anybodys has mode 0777.*chmod go-w"):
        tuned.write(file, {"a": ENTRY})
    assert list((tmp_path / "anybodys").iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.read(file) == {}  # no file, nothing to warn of


@pytest.mark.parametrize("name", ["tuned.json", "tuned.json.lock", "tuned.json.damaged"])
def test_no_file_is_overwritten_through_a_link(file, tmp_path, name):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    file.parent.mkdir(mode=0o700)
    file.with_name(name).symlink_to(precious)
    with contextlib.suppress(mk.MKernelError):
        tuned.write(file, {"a": ENTRY})
    if name == "tuned.json.lock":
        with pytest.raises(mk.MKernelError, match=r"tuned.json.lock is a symbolic link. Remove it"):
            tuned.write(file, {"a": ENTRY})
    else:
        assert tuned.read(file) == {"a": ENTRY}
    assert precious.read_text() == "precious"


def test_a_file_that_this_user_has_linked_is_read(file, tmp_path):
    tuned.write(tmp_path / "shared" / "tuned.json", {"a": ENTRY})
    file.parent.symlink_to("shared")
    assert tuned.read(file) == {"a": ENTRY}
    tuned.write(file, {"b": ENTRY})
    assert tuned.read(tmp_path / "shared" / "tuned.json") == {"a": ENTRY, "b": ENTRY}


def test_a_file_of_this_user_in_a_folder_for_all_users(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    file = tmp_path / "tmp" / "mine.json"
    tuned.write(file, {"a": ENTRY})
    assert tuned.read(file) == {"a": ENTRY}


@as_root
def test_a_file_of_root_that_can_only_be_read():
    with other_users.open_folder() as shared:
        file = shared / "tuned.json"
        tuned.write(file, {"a": ENTRY})
        file.chmod(0o644)

        def use():
            warnings.simplefilter("error")
            return tuned.read(file)

        assert other_users.run_as(other_users.VICTIM, use) == {"a": ENTRY}


def test_folders_and_files_are_this_users_alone_whatever_the_umask(tmp_path):
    file = tmp_path / "a" / "b" / "tuned.json"
    before = os.umask(0)
    try:
        tuned.write(file, {"a": ENTRY})
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o7777 == 0o700
    assert [path.stat().st_mode & 0o7777 for path in file.parent.iterdir()] == [0o600, 0o600]


def test_a_pipe_is_not_waited_for(file):
    file.parent.mkdir(mode=0o700)
    os.mkfifo(file, 0o600)
    with pytest.warns(UserWarning, match="is not a regular file. Remove it"):
        assert tuned.read(file) == {}


def test_names_in_a_file_are_shown_escaped(file, monkeypatch):
    """Of fields that are none, and of anything else that a warning repeats."""
    monkeypatch.setattr(tuned, "_reported", set())
    with pytest.warns(UserWarning, match="an entry of") as warned:
        assert tuned._config({"\x1b[31mfield\x9b\u202e": 1}) is None
    (one,) = warned
    assert str(one.message).isprintable()
    assert r"\x1b[31mfield\x9b\u202e" in str(one.message)


# -- keys


def test_buckets():
    assert bucket(4096) == bucket(5120) == "4096"
    assert bucket(8192) == bucket(6144) == "8192"
    assert bucket(4100) == "4096 ragged"
    assert bucket(1) == "1 ragged"
    assert bucket(0) == "0"
    assert (bucket(True), bucket(False)) == ("yes", "no")


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


CASE = operator_calls.Case(32, 48, 64)


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

    operator_calls.run(on_rank, cluster=(1, 2))


@pytest.mark.parametrize("holder", [0, 1])
def test_all_ranks_have_the_file_of_rank_0(monkeypatch, holder):
    """Whether only that rank has one, or all ranks but that."""
    asked = []
    monkeypatch.setattr(tuned, "place_of", lambda group: PLACE)

    def on_rank(group):
        def read(file):
            asked.append(group.rank)
            return {"an": ENTRY} if holder == 0 else {}

        monkeypatch.setattr(tuned, "read", read)
        on_gpu = SimpleNamespace(device=torch.device("cuda"), rank=group.rank, exchange=group.exchange)
        return tuned.table_of(on_gpu).entries

    assert operator_calls.run(on_rank, cluster=(1, 3)) == [{"an": ENTRY} if holder == 0 else {}] * 3
    assert asked == [0]


def attention(config, length=64, **sizes):
    given = dict(batch=1, heads=2, kv_heads=2, length=length, dim=64, causal=True, zigzag=False) | sizes
    return entries_for("ring_attention", config, **given)


def test_attention_takes_what_was_tuned_for_such_a_call():
    config = mk.Config(tile_m=16, tile_n=16, chunk_rows=16, ctas=5)

    def on_rank(group):
        q = torch.randn(3, 1, 2, 64, 64, generator=torch.Generator().manual_seed(group.rank))
        before = mk.ring_attention(*q, is_causal=True)
        with_table(group, attention(config))
        after = mk.ring_attention(*q, is_causal=True)
        assert torch.allclose(before, after, atol=1e-5)
        assert any(dict(key[1]).get("chunk_rows") == 16 for key in group._agreed)
        plan = mk.explain("ring_attention", *q, is_causal=True)
        assert str(plan).endswith("configuration: tuned")
        assert (plan.config.tile_n, plan.config.chunk_rows, plan.config.ctas) == (16, 16, 5)
        for other in (
            dict(), dict(is_causal=True, layout="zigzag"), dict(is_causal=True, cu_seqlens=[0, 50, 128]),
        ):  # fmt: skip
            assert str(mk.explain("ring_attention", *q, **other)).endswith("configuration: default")
        given = mk.explain("ring_attention", *q, is_causal=True, config=mk.Config(tile_m=32))
        assert (given.config.tile_m, given.config.tile_n) == (32, 32)

    operator_calls.run(on_rank, cluster=(1, 2))


LAYER = moe_reference.Layer((9, 5), (2, 3), out=32, hidden=32)
TUNED = mk.Config(tile_m=16, tile_n=64, chunk_rows=4, ctas=5)


def mixture(op, config, experts=2):
    """What was tuned for LAYER, for ranks with so many experts."""
    sizes = dict(
        moe_dispatch_matmul=dict(hidden=32, out=32), moe_ffn=dict(hidden=32, inter=32), moe_combine=dict(columns=32)
    )
    return entries_for(op, config, torch.bfloat16, tokens=9, k=2, experts=experts, **sizes[op])


@pytest.mark.parametrize(("op", "most"), [("moe_dispatch_matmul", None), ("moe_ffn", 9)])
def test_experts_are_tuned_for_each_rank_and_chunks_for_all(op, most):
    """Rank 1 has more experts, for which nothing was tuned, and fewer tokens: its chunks are rank 0's all the same."""
    call = moe_reference.dispatch if op == "moe_dispatch_matmul" else moe_reference.ffn

    def on_rank(group):
        with_table(group, mixture(op, TUNED))
        call(group, LAYER, max_tokens=most)
        rank = group.rank
        given = [LAYER.x(rank), LAYER.ids(rank)]
        given += [LAYER.w(rank)] if "dispatch" in op else [LAYER.weights(rank), LAYER.gate_up(rank), LAYER.down(rank)]
        plan = mk.explain(op, *given, max_tokens=9)
        assert str(plan).endswith("configuration: tuned")
        assert any(dict(key[1]).get("chunk_rows") == (4 if most else "tuned") for key in group._agreed)
        assert "configuration: default" in str(mk.explain(op, *given, max_tokens=1000))
        # what was given comes first
        assert mk.explain(op, *given, max_tokens=9, config=mk.Config(group_m=5)).config.chunk_rows == 8
        return plan.config.chunk_rows, plan.config.ctas, plan.config.tile_m

    assert operator_calls.run(on_rank, cluster=(1, 2)) == [(4, 5, 16), (4, 6, 32)]


def test_ranks_that_disagree_on_chunks_are_told():
    """One was given a configuration, the other one takes what was tuned."""

    def on_rank(group):
        with_table(group, mixture("moe_ffn", TUNED))
        with pytest.raises(
            mk.ArgumentError, match=r"all ranks .* must pass the same values; .*chunk_rows=(tuned|default)"
        ):
            moe_reference.ffn(group, LAYER, config=mk.Config(group_m=2) if group.rank else None)

    operator_calls.run(on_rank, cluster=(1, 2))


def test_a_combine_takes_what_was_tuned():
    def on_rank(group):
        with_table(group, mixture("moe_combine", mk.Config(ctas=3, copy_bytes=2048)))
        y, handle = moe_reference.dispatch(group, LAYER)
        z = mk.moe_combine(y, handle, LAYER.weights(group.rank))
        moe_reference.assert_sum(z, *LAYER.combined(group.rank), LAYER.hidden)
        plan = mk.explain("moe_combine", y, handle, LAYER.weights(group.rank))
        return plan.ctas, plan.copy_bytes, str(plan).splitlines()[-1]

    assert operator_calls.run(on_rank, cluster=(1, 2)) == [
        (3, 2048, "- configuration: tuned"),
        (6, 1024, "- configuration: default"),  # more experts
    ]


def test_ranks_with_other_columns_take_the_same_chunks():
    """Only rank 0's columns were tuned: chunks follow from what is the same on every rank."""
    case = operator_calls.Case(32, (48, 9), 64)

    def on_rank(group):
        with_table(group, entries_for("all_gather_matmul", mk.Config(chunk_rows=4, group_m=3), m=32, n=48, k=64))
        y = operator_calls.call(group, case)
        plan = mk.explain("all_gather_matmul", case.rows(group.rank), case.weights(group.rank))
        return y.shape[1], plan.config.chunk_rows, plan.config.group_m

    assert operator_calls.run(on_rank, cluster=(1, 2)) == [(48, 4, 3), (9, 4, 2)]


def test_what_was_tuned_with_other_shared_fields_is_left_alone():
    first = entries_for("matmul_all_reduce", mk.Config(tile_n=16, warps=2), m=32, n=48, k=64)
    second = entries_for("matmul_all_reduce", mk.Config(tile_n=64, warps=8), m=32, n=48, k=1024)

    def on_rank(group):
        with_table(group, first | second)
        tunable = WORKLOADS["matmul_all_reduce"].tunable
        return [tunable.choose(group, torch.float32, None, m=32, n=48, k=k) for k in (64, 1024)]

    assert operator_calls.run(on_rank, cluster=(1, 1))[0] == [mk.Config(tile_n=64), mk.Config(tile_n=64, warps=8)]


def test_an_entry_that_is_no_configuration_is_reported_and_ignored(file):
    tunable = Tunable("matmul_all_reduce", ("m", "n"), ("k",), ("tile_m",))
    entries = tunable.entries(PLACE, torch.float32, mk.Config(), {}, m=32, n=48, k=64)
    for entry in entries.values():
        entry["config"] = {"tile_m": 17}

    def on_rank(group):
        with_table(group, entries)
        with pytest.warns(UserWarning, match=r"an entry of .*tuned.json is ignored: config.tile_m must be a power"):
            assert tunable.choose(group, torch.float32, None, m=32, n=48, k=64) is None

    operator_calls.run(on_rank, cluster=(1, 1))


def test_nothing_is_tuned_in_the_simulator(file):
    """And the file is not even looked for."""
    file.parent.mkdir()
    file.write_text("damaged")

    def on_rank(group):
        return group.tuned.entries

    assert operator_calls.run(on_rank, cluster=(1, 2)) == [{}, {}]


# -- what is searched


# on four ranks of a Hopper GPU: those with a kernel for it take it
ON_HOPPER = {
    "all_gather_matmul": (512, 256, 64),
    "all_gather_matmul_weight_grad": (1024, 256, 512),
    "matmul_reduce_scatter": (4096, 8192, 64),
    "matmul_all_reduce": (512, 256, 64),
    "all_gather_scaled_matmul": (512, 256, 128),
    "scaled_matmul_reduce_scatter": (512, 512, 512),
    "scaled_matmul_all_reduce": (512, 512, 512),
    "ring_attention": (1, 4, 8192, 64),
    "ring_attention_backward": (1, 4, 1024, 64),
    "moe_dispatch_matmul": (1024, 256, 64),
    "moe_dispatch_scaled_matmul": (1024, 256, 128),
    "moe_dispatch": (1024, 64),
    "moe_combine": (64, 64),
    "moe_ffn": (1024, 256, 64),
    "scaled_moe_ffn": (1024, 256, 128),
}
# for these shapes, and chosen without being asked for
WITH_A_KERNEL_FOR_HOPPER = (
    "all_gather_matmul", "all_gather_matmul_weight_grad", "matmul_reduce_scatter", "ring_attention",
    "ring_attention_backward",
)  # fmt: skip


@pytest.mark.parametrize("op", WORKLOADS)
def test_everything_that_is_searched_can_be_prepared(op):
    """Every value of every field, whichever numbers of CTAs are combined; and the fields of a kernel for Hopper lead to
    that kernel. The default has none of the values, and what ranks share is searched."""

    def on_rank(group):
        call = workload_of(op).make(group, ON_HOPPER[op], torch.bfloat16)
        if group.rank:
            return
        with pretending(90):
            group.device = group.target = PretendedGpu(90)
            group.world.simulator.options = replace(group.world.options, ctas=33)
            default = call.tried.explain(mk.Config())
            families = families_of(operators.find(op), group, default)
            hopper = getattr(default, "hopper", False)
            assert hopper == (op in WITH_A_KERNEL_FOR_HOPPER)
            assert len(families) == 1 + hopper
            assert families[0].start == mk.Config()
            for name, values in families[0].axes.items():
                assert getattr(getattr(default, "config", default), name) not in values
            assert set(workload_of(op).tunable.shared) <= set(families[-1].axes)
            for family in families:
                roles = [family.axes.get(name) or [None] for name in ("ctas", "send_ctas", "intra_ctas")]
                configs = [
                    mk.Config(ctas=ctas, send_ctas=send, intra_ctas=intra) for ctas, send, intra in product(*roles)
                ]
                configs += [mk.Config(**{name: value}) for name, values in family.axes.items() for value in values]
                for config in configs:
                    given = {name: value for name, value in vars(config).items() if value is not None}
                    plan = call.tried.explain(replace(family.start, **given))
                    assert getattr(plan, "hopper", False) == (hopper and family is families[0])

    operator_calls.run(on_rank, cluster=(1, 4))


def test_the_file_is_json_for_people(file):
    tuned.write(file, entries_for("all_gather_matmul", mk.Config(chunk_rows=64, group_m=4), m=4096, n=2048, k=8192))
    told = json.loads(file.read_text())
    assert told["format"] == tuned.FORMAT
    own = next(entry for key, entry in told["entries"].items() if key.endswith("k 8192, m 4096, n 2048"))
    assert own["config"] == {"group_m": 4}
    common = next(entry for key, entry in told["entries"].items() if key.endswith("k 8192, m 4096"))
    assert common["config"] == {"chunk_rows": 64}
