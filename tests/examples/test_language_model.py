"""The language model of examples/train_language_model.py, at a tiny size."""

import contextlib
import dataclasses
import functools
import io
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import train_language_model
from examples.language_model import data, training
from examples.language_model.exact_attention import Exact, ExactAttention
from examples.language_model.generation import generate
from examples.language_model.model import LanguageModel, ModelConfig, cast_kernels
from examples.language_model.report import read_results
from examples.language_model.sizes import SIZES, Size
from examples.language_model.training import TrainingConfig
from jax_fp4attn import recipes

TINY = ModelConfig(width=32, hidden=48, layers=1, heads=2, kv_heads=1, head_size=32)
SHORT = TrainingConfig(steps=6, batch=2, sequence_length=32, evaluations=3, evaluation_windows=4)


TINY_SIZE = Size(model=TINY, training=SHORT, arms=SIZES["small"].arms)


@pytest.fixture(scope="module")
def corpus():
    return data.load_corpus()


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A training of one arm from start to end."""
    out = tmp_path_factory.mktemp("finished")
    model, history = train_arm(corpus, out)
    return types.SimpleNamespace(out=out, model=model, history=history)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run of all arms returns, prints and writes."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setitem(SIZES, "small", dataclasses.replace(SIZES["small"], model=TINY))
        arguments = {"--steps": 20, "--batch": 4, "--sequence-length": 32, "--out": out}
        train_language_model.main([str(x) for item in arguments.items() for x in item])
    return types.SimpleNamespace(out=out, results=read_results(out / "arms"), printed=printed.getvalue())


def tiny_model(recipe=recipes.bf16, seed=0):
    return LanguageModel(TINY, recipe=recipe, rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@nnx.jit
def predict(model, tokens):
    return model(tokens)


def parameters(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def flat_parameters(model):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


class TestData:
    def test_nothing_held_out_is_also_learned(self, corpus):
        learned, held_out = (x.tobytes().decode().split("\n\n") for x in (corpus.training, corpus.held_out))
        assert len(corpus.training) > 8 * len(corpus.held_out) > 100_000
        assert not set(learned[:-1]) & set(held_out[1:])  # the split falls into a paragraph

    def test_a_batch_depends_on_seed_and_step_alone(self, corpus):
        draw = functools.partial(data.training_batch, corpus.training, batch=3, length=8)
        first = draw(seed=0, step=5)
        assert first.shape == (3, 9)
        np.testing.assert_array_equal(first, draw(seed=0, step=5))
        assert (first != draw(seed=0, step=6)).any()
        assert (first != draw(seed=1, step=5)).any()
        np.testing.assert_array_equal(draw(seed=0, step=5, rows=slice(1, 3)), first[1:3])

    def test_a_batch_reaches_both_ends(self):
        windows = data.training_batch(np.arange(10, dtype=np.uint8), seed=0, step=0, batch=200, length=8)
        assert windows.min() == 0
        assert windows.max() == 9

    def test_spread_windows_overlap_in_what_is_predicted_by_nothing(self):
        windows = data.spread_windows(np.arange(21, dtype=np.uint8), count=None, length=5)
        np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, 21))
        assert data.spread_windows(np.arange(21, dtype=np.uint8), count=2, length=5)[:, 0].tolist() == [0, 15]

    def test_windows_longer_than_the_text_are_refused(self):
        with pytest.raises(ValueError, match="length: expected at most 4, got 5"):
            data.spread_windows(np.zeros(5, np.uint8), count=None, length=5)


class TestModel:
    def test_all_arms_start_from_the_same_parameters(self):
        arms = [parameters(tiny_model(recipes.named()[arm])) for arm in SIZES["small"].arms]
        jax.tree.map(np.testing.assert_array_equal, arms[0], arms[1])
        jax.tree.map(np.testing.assert_array_equal, arms[0], arms[2])

    def test_parameters_and_logits_are_float32(self, model):
        assert {x.dtype for x in jax.tree.leaves(parameters(model))} == {np.dtype(np.float32)}
        assert predict(model, jnp.zeros((1, 32), jnp.int32)).dtype == jnp.float32

    def test_a_prediction_depends_on_what_comes_before_alone(self, model):
        tokens = jnp.arange(32)[None]
        changed = tokens.at[:, 20:].add(1)
        logits, other = predict(model, tokens), predict(model, changed)
        np.testing.assert_array_equal(logits[:, :20], other[:, :20])
        assert (logits[:, 20:] != other[:, 20:]).any(axis=-1).all()


class TestCastKernels:
    def test_kernels_have_the_dtype_of_their_layers(self, model):
        dtypes = {name: x.dtype for name, x in flat_parameters(cast_kernels(model)).items()}
        attention = {name for name in dtypes if "attention/" in name}
        assert {dtypes[name] for name in attention} == {jnp.dtype("bfloat16")}
        assert {dtypes[name] for name in dtypes.keys() - attention} == {jnp.dtype("float32")}
        assert {x.dtype for x in flat_parameters(model).values()} == {jnp.dtype("float32")}

    def test_predictions_are_the_same(self, model):
        tokens = jnp.arange(32)[None]
        np.testing.assert_array_equal(predict(cast_kernels(model), tokens), predict(model, tokens))


class TestExactAttention:
    def test_it_is_what_the_bf16_recipe_approximates(self, model):
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 32)))
        exact, expected = predict(tiny_model(Exact("xla")), tokens), predict(model, tokens)
        assert 0 < jnp.linalg.norm(exact - expected) < 0.01 * jnp.linalg.norm(expected)

    def test_parameters_are_those_of_the_other_arms(self, model):
        exact = tiny_model(Exact("xla"))
        assert isinstance(exact.blocks[0].attention, ExactAttention)
        jax.tree.map(np.testing.assert_array_equal, parameters(exact), parameters(model))

    def test_it_takes_the_place_of_the_baseline_alone(self):
        for arguments, expected in (("--size gpu", Exact("cudnn")), ("--exact xla", Exact("xla")), ("", recipes.bf16)):
            size = train_language_model.parse_arguments(arguments.split()).size
            assert size.attention("bf16") == expected
            assert size.attention("train") == recipes.train


class TestGenerate:
    def test_a_low_temperature_takes_the_likeliest_byte(self, model):
        prompt = np.arange(32, dtype=np.uint8)
        for byte in generate(model, prompt, length=8, temperature=1e-6, seed=0):
            assert byte == np.argmax(predict(model, jnp.asarray(prompt, jnp.int32)[None])[0, -1])
            prompt = np.append(prompt[1:], np.uint8(byte))

    def test_draws_depend_on_the_seed(self, model):
        draw = functools.partial(generate, model, np.zeros(32, np.uint8), length=8, temperature=1.0)
        assert len(draw(seed=0)) == 8
        assert draw(seed=0) == draw(seed=0) != draw(seed=1)


def train_arm(corpus, out, config=SHORT, **arguments):
    size = dataclasses.replace(TINY_SIZE, training=config)
    learner, history = train_language_model.train_arm("bf16", corpus, size, out, **arguments)
    return learner.model, history


class TestTrainArm:
    def test_an_interrupted_training_resumes_bit_for_bit(self, corpus, finished, tmp_path, monkeypatch):
        def interrupt(*arguments, step, **others):
            if step == 5:
                raise KeyboardInterrupt
            return data.training_batch(*arguments, step=step, **others)

        with monkeypatch.context() as patch:
            patch.setattr(training, "training_batch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                train_arm(corpus, tmp_path)
        model, history = train_arm(corpus, tmp_path, resume=True)

        assert history.timed_steps == 3 + 1  # up to the checkpoint after step 4, and from it
        assert history.training_loss == finished.history.training_loss
        assert [tuple(x) for x in history.held_out_loss] == finished.history.held_out_loss
        jax.tree.map(np.testing.assert_array_equal, parameters(model), parameters(finished.model))

    def test_a_finished_training_resumes_to_its_end(self, corpus, finished):
        model, history = train_arm(corpus, finished.out, resume=True)
        assert history.training_loss == finished.history.training_loss
        assert history.seconds_per_step == finished.history.seconds_per_step
        jax.tree.map(np.testing.assert_array_equal, parameters(model), parameters(finished.model))

    def test_a_checkpoint_of_other_settings_is_refused(self, corpus, finished):
        with pytest.raises(ValueError, match="holds a training with steps=6, seed=0"):
            train_arm(corpus, finished.out, dataclasses.replace(SHORT, steps=7, seed=1), resume=True)

    def test_without_resume_checkpoints_are_replaced(self, corpus, finished, tmp_path):
        shutil.copytree(finished.out, tmp_path, dirs_exist_ok=True)
        config = dataclasses.replace(SHORT, steps=1, evaluations=1, seed=1)
        _, history = train_arm(corpus, tmp_path, config)
        assert history.step == 1
        assert sorted(x.name for x in (tmp_path / "checkpoints" / "bf16").iterdir()) == ["1"]

    def test_after_the_deadline_no_step_is_begun(self, corpus, finished, tmp_path):
        # The first step is begun whatever the time, and others while it runs.
        _, history = train_arm(corpus, tmp_path, dataclasses.replace(SHORT, evaluations=1), deadline=0.0)
        assert history.step == 1 + training.IN_FLIGHT
        assert history.training_loss == finished.history.training_loss[: history.step]
        assert [step for step, _ in history.held_out_loss] == [history.step]
        assert (tmp_path / "checkpoints" / "bf16" / str(history.step)).is_dir()


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """Arms of two processes that were ended early, and the report of both."""
    out = tmp_path_factory.mktemp("joined")
    common = ["--batch", "2", "--sequence-length", "32", "--steps", "20", "--exact", "xla", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setitem(SIZES, "small", dataclasses.replace(SIZES["small"], model=TINY, checkpoints=False))
        for arm in ("train", "bf16"):
            train_language_model.main([*common, "--arms", arm, "--minutes", "0"])
        (out / "report.md").unlink()
        printed.truncate(0)
        patch.setattr(train_language_model, "train_arm", None)
        train_language_model.main([*common, "--report"])
    return types.SimpleNamespace(out=out, printed=printed.getvalue())


class TestJoining:
    def test_a_report_has_all_arms_and_trains_none(self, joined):
        results = read_results(joined.out / "arms")
        assert [(x.name, x.attention) for x in results] == [
            ("bf16", "jax.nn.dot_product_attention, xla"),
            ("train", "jax_fp4attn"),
        ]
        for text in ((joined.out / "report.md").read_text(), joined.printed):
            assert "| bf16 " in text
            assert "| train " in text

    def test_minutes_end_an_arm_that_still_has_results(self, joined):
        for result in read_results(joined.out / "arms"):
            assert 0 < result.history.step < 20
            assert result.history.held_out_loss[-1][0] == result.history.step
            assert np.isfinite(result.held_out_loss)
            assert len(result.sample) > 0

    def test_arms_of_another_text_are_refused(self, corpus, joined):
        other = dataclasses.replace(corpus, training=corpus.training[1:])
        with pytest.raises(ValueError, match=f"learned from text {corpus.digest}, this one is {other.digest}"):
            train_language_model.report(other, joined.out)


class TestMain:
    def test_the_loss_of_every_arm_falls(self, run):
        assert [result.name for result in run.results] == list(SIZES["small"].arms)
        for result in run.results:
            assert result.training_loss < 0.8 * result.history.training_loss[0]
            assert result.held_out_loss < 0.8 * result.history.training_loss[0]
            assert len(result.history.held_out_loss) == 10

    def test_arms_see_the_same_data(self, run):
        losses = np.array([result.history.training_loss for result in run.results])
        # The loss varies more from batch to batch than from arm to arm.
        np.testing.assert_allclose(losses, losses[[0, 0, 0]], rtol=0.02)

    def test_outputs_are_complete(self, run):
        report = (run.out / "report.md").read_text()
        for result in run.results:
            assert f"| {result.name} " in report
            assert f"## {result.name}\n" in report
            assert (run.out / "checkpoints" / result.name / "20").is_dir()
        assert (run.out / "curves.png").read_bytes().startswith(b"\x89PNG")

    def test_prints_the_table_and_where_the_rest_is(self, run):
        assert "| bf16 " in run.printed
        assert f"are in {run.out} " in run.printed

    def test_names_the_recipes_when_one_is_unknown(self, capsys):
        with pytest.raises(SystemExit):
            train_language_model.main(["--arms", "bf16,fp3"])
        assert "--arms: unknown fp3; there are fast, " in capsys.readouterr().err


def test_results_are_ignored_by_git():
    out = train_language_model.parse_arguments([]).out
    root = Path(train_language_model.__file__).parents[1]
    assert f"/{out.parts[0]}/" in (root / ".gitignore").read_text().splitlines()
