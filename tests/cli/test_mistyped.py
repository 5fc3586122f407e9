# SPDX-License-Identifier: Apache-2.0
"""Mistyped commands: the message suggests a valid name, and no video is made."""

from pathlib import Path

import click
import pytest

from tests.support.commands import Arguments, refused, succeeded, wanjax
from tests.support.words import has_line_with_words
from wanjax.cli import main, stages
from wanjax.cli.arguments import OLD_SCRIPT_OPTIONS, OTHER_OPTION_NAMES


@pytest.fixture(autouse=True)
def parsed(tmp_path, monkeypatch, record_arguments) -> Arguments:
    """The arguments that `generate` gets; it does not run."""
    monkeypatch.chdir(tmp_path)
    return record_arguments({stages: ["generate"]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decod", "--dir", "d0"], "command 'decod' decode"),
        (["modles"], "wanjax models generate modles"),
        (["Plan", "nano"], "wanjax plan"),
        (["genrate", "a red circle"], "wanjax generate"),
        (["warm-up", "--model", "nano", "--help"], "wanjax warmup"),
        (["version"], "wanjax --version"),
        (["--verison"], "option '--verison' wanjax --version"),
        (["--Version"], "option '--Version' wanjax --version"),
        (["--hepl"], "option '--hepl' wanjax --help"),
        (["--sead", "3"], "option '--sead' --seed"),
        (["cat", "--steps", "0"], "--steps 0 1"),
        (["cat", "--guidance_scale", "nan"], "--guidance-scale nan 5"),
        (["batch", "nope.jsonl"], "no file nope.jsonl: prompt on each line"),
        (["a.csv", "--prompts", "nope.csv"], "no file nope.csv: prompt on each line"),
        (["batch", "a red circle"], "no file one prompt wanjax generate 'a red circle'"),
        (["--dir", "d0", "decode"], "'decode' command wanjax decode"),
        (["paint", "--help"], "command 'paint' generate encode denoise decode plan"),
        (["price", "nano", "--chip", "v6e-8"], "--chip plan command 'price'"),
        (["a red circle", "--to", "diffusers"], "--to convert generate"),
        (["help", "decod"], "command 'decod' generate"),
        (["hel"], "command 'hel' wanjax --help"),
        (["a red circle", "--prompt", "a blue square"], "'a red circle' --prompt 'a blue square'"),
        (["a", "red", "circle"], "prompt 3 quotes wanjax generate 'a red circle'"),
        (["encode", "a", "--size", "64x32", "cat"], "prompt 2 wanjax encode 'a cat'"),
        (["generate", "--", "-a", "cat"], "wanjax generate -- '-a cat'"),
        (["generate", "--", "-a cat", "--seed", "1"], "--seed options --"),
        (["a red circle", "--tile", "64"], "--tile no value '64'"),
        (["a red circle", "--offload", "cpu", "--steps", "2"], "--offload none, stages, blocks blocks:N 'cpu'"),
        (["--preview", "yes", "a red circle"], "--preview no value 'yes'"),
        (["gen"], "command 'gen' wanjax generate"),
        (["enc"], "command 'enc' wanjax encode"),
        (["remake"], "command 'remake' wanjax generate --from FILE"),
        (["price"], "command 'price' wanjax plan"),
        (["-"], "- prompt --prompts - standard input"),
        (["encode", "-"], "- prompt"),
        (["generate"], "prompt missing --prompts - standard input --allow-empty-prompt"),
        (["-blue"], "option '-blue' prompt dash wanjax generate [OPTIONS] -- -blue"),
        (["-sead", "3"], "option '-sead' --seed --"),
        (["-a cat"], "prompt dash wanjax generate [OPTIONS] -- '-a cat'"),
        (["generate", "--steps", "2", "--a cat"], "prompt dash wanjax generate -- '--a cat'"),
        (["plan", "-a cat"], "option '-a' wanjax plan --help-all"),
        (["info", "-x.mp4"], "dash `wanjax info -- -x.mp4`"),
        (["info", "--x.mp4"], "dash `wanjax info -- --x.mp4`"),
        (["batch", "-p.txt"], "dash `wanjax batch -- -p.txt`"),
        (["convert", "-x.safetensors", "out"], "dash `wanjax convert -- -x.safetensors ...`"),
        (["info", "--jsn", "a.mp4"], "'--jsn' --json"),
        (["info", "my", "cat.mp4"], "'cat.mp4' wanjax info FILE quotes"),
        (["warmup", "nano"], "nano wanjax warmup --model nano"),
        (["denoise", "./mine"], "./mine wanjax denoise --model ./mine"),
        (["generate", "nano", "a cat"], "nano wanjax generate --model nano"),
        (["cat", "--bqsiz", "3"], "'--bqsiz' --block-q"),
        (["cat", "--cfg", "3"], "'--cfg' --guidance-scale"),
        (["cat", "--cfg_scale", "3"], "--guidance-scale"),
        (["cat", "--seconds", "2"], "'--seconds' give --frames; --fps frames make a second"),
        (["cat", "--duration", "2"], "'--duration' --frames --fps"),
        (["cat", "--lowvram"], "'--lowvram' --offload"),
        (["cat", "--fp16"], "'--fp16' --dtype bfloat16"),
        (["cat", "--gpu"], "'--gpu' JAX JAX_PLATFORMS"),
        (["encode", "cat", "--steps", "2"], "option of `wanjax denoise`"),
        (["encode", "cat", "--count", "2"], "option of `wanjax generate`"),
        (["denoise", "--prompt", "cat"], "argument of `wanjax encode`"),
        (["serve", "--max-upload", "lots"], "--max-upload 'lots' give a whole number of MiB from 1 on"),
        (["cat", "--sampler", "euler"], "'--sampler' --scheduler"),
        (["cat", "--shift", "5"], "'--shift' give --flow-shift"),
        (["cat", "--batch-size", "2"], "'--batch-size' give --count"),
        (["cat", "--length", "17"], "'--length' --frames"),
        (["cat", "--lora-strength", "0.5"], "'--lora-strength' --lora FILE:0.5"),
        (["cat", "--lora", "a.safetensors", "0.5"], "strength LoRA --lora a.safetensors:0.5"),
        (["cat", "--seed", "1..3"], "--seed 1..3 --seeds 1..3"),
        (["cat", "--tiling"], "'--tiling' --tile"),
        (["a red circle", "a blue square"], "2 prompts one video line file --prompts"),
        (["cat", "--workflow", "a.json"], "'--workflow' --from"),
        (["train", "nano", "clips", "--out", "a", "--prompt", "b"], "'--prompt' --sample-prompt"),
        (["cat", "--out", "--seed", "3"], "--out no value --seed"),
        (["cat", "--steps", "--seed", "3"], "--steps no value --seed"),
        (["cat", "--negative-prompt", "-q"], "--negative-prompt no value -q"),
        (["cat", "--batch", "2"], "'--batch' --count"),
        (["train", "nano", "clips", "--lr", "1"], "'--lr' --learning-rate"),
        (["train", "nano", "clips", "--batch", "1"], "'--batch' --batch-size"),
        (["convert", "nano", "--out", "a"], "'--out' convert SOURCE [FOLDER]"),
        (["bench", "--model", "nano"], "'--model' bench [OPTIONS] [MODEL]"),
        (["calibrate", "--model", "nano"], "'--model' calibrate [OPTIONS] [MODEL]"),
        (["train", "clips", "--model", "nano"], "'--model' train [OPTIONS] MODEL DATA"),
        (["models", "--model", "nano"], "'--model' models [OPTIONS] [MODEL]"),
        (["train", "nano"], "DATA train [OPTIONS] MODEL"),
        (["train", "nano", "clips"], "--out FOLDER"),
        (["denoise", "a red circle"], "'a red circle' generate encode prompt"),
        (["denoise", "a.safetensors"], "'a.safetensors' denoise --dir a.safetensors --model"),
        (["decode", "folder"], "'folder' decode --dir folder --model"),
        (["list"], "'list' wanjax models"),
        (["plan", "nano", "--chip", "V6E"], "'V6E' v6e-1 v6e-8"),
        (["plan", "nano", "--chip", "p100"], "'p100' v6e-8 h100 cpu"),
    ],
)
def test_a_mistyped_command_makes_no_video(parsed, arguments, message):
    assert has_line_with_words(refused(*arguments), message)
    assert not parsed
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("generate", "--cfg", "--config --fps"),
        ("generate", "--sampler", "--compiler"),
        ("serve", "--prt", "--ray --dir"),
    ],
)
def test_unrelated_options_are_not_suggested(command, option, names):
    output = refused(command, option, "1")
    assert not any(name in output for name in names.split()), output


def test_training_options_of_other_trainers_suggest_the_options_here():
    """Options of other trainers, and former names of options, on the command line and in a TOML file."""
    options = {name[2:] for option in main.commands["train"].params for name in option.opts if name.startswith("--")}
    replacements = {
        old: new
        for old, new in OTHER_OPTION_NAMES.items()
        if new in options and old not in {*options, *OLD_SCRIPT_OPTIONS}
    }
    assert {"lr", "rate", "average", "gradient-accumulation-steps"} <= replacements.keys()
    for old, new in replacements.items():
        assert has_line_with_words(refused("train", "nano", "clips", "--out", "a", f"--{old}", "1"), f"--{old} --{new}")
        Path("train.toml").write_text(f"[train]\n{old} = 1\n")
        assert has_line_with_words(
            refused("train", "nano", "clips", "--out", "a", "--config", "train.toml"), f"{old} {new}"
        )


def test_hidden_options_are_never_suggested():
    hidden = 0
    for name, command in main.commands.items():
        for option in (x for x in command.params if isinstance(x, click.Option) and x.hidden):
            hidden += 1
            message = refused(name, *(["nano"] if name == "calibrate" else []), f"{option.opts[0]}x").partition(":")[2]
            assert not {*option.opts} & {*message.split()}, (name, message)
    assert hidden > 20


@pytest.mark.parametrize("prompt", ["cat", "sunset", "decode the message", "help me", "a", "bat", "war", "ge"])
def test_other_words_are_prompts(parsed, prompt):
    for words in ((prompt, "--seed", "3"), ("--seed", "3", prompt)):
        succeeded(wanjax(*words))
        assert parsed.pop("prompt") == prompt


def test_a_word_before_a_file_is_not_a_prompt(parsed):
    Path("x y.mp4").write_bytes(b"film")
    output = refused("show", "x y.mp4")
    assert has_line_with_words(output, "command 'show' --from 'x y.mp4' info quotes")
    assert not parsed
    assert has_line_with_words(refused("show", "the", "film"), "prompt 3 quotes wanjax generate 'show the film'")


def test_a_prompt_may_begin_with_a_dash(parsed):
    for words in (("generate", "--seed", "1", "--", "-a cat"), ("--", "-a cat")):
        succeeded(wanjax(*words))
        assert parsed.pop("prompt") == "-a cat"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cat", "-o", "a.mp4", "--out=b.mp4"], "--out a.mp4 b.mp4 once"),
        (["cat", "--image", "a.png", "--image", "b.png"], "--image a.png b.png once"),
        (["cat", "--num-inference-steps", "3", "--steps", "5"], "--steps 3 5 once"),
        (["cat", "--offload", "--no-offload"], "--offload --no-offload one"),
        (["plan", "nano", "--chip", "v6e-8", "--chip", "cpu"], "--chip v6e-8 cpu once"),
        (["bench", "nano", "--no-keep", "--keep"], "--keep --no-keep one"),
    ],
)
def test_a_repeated_option_with_two_values_is_refused(parsed, arguments, message):
    assert has_line_with_words(refused(*arguments), message)
    assert not parsed


def test_an_option_may_be_repeated_with_the_same_value_or_if_it_takes_several(parsed):
    succeeded(wanjax("cat", "--steps", "3", "--num_inference_steps", "3", "--preview", "--preview"))
    assert parsed["steps"] == 3
    for name in ("a.safetensors", "b.safetensors"):
        Path(name).write_bytes(b"")
    succeeded(wanjax("cat", "--lora", "a.safetensors", "--lora", "b.safetensors"))
    assert parsed["lora"] == ("a.safetensors", "b.safetensors")


@pytest.mark.parametrize(
    ("arguments", "outputs"),
    [
        (["batch", "a.csv", "--out"], "folder machine gs://BUCKET/NAME s3://BUCKET/NAME"),
        (["cat", "--out"], "file machine gs://BUCKET/NAME s3://BUCKET/NAME"),
        (["serve", "--dir"], "folder machine gs://BUCKET/NAME s3://BUCKET/NAME"),
        (["convert", "nano"], "folder machine gs://BUCKET/NAME s3://BUCKET/NAME"),
        (["cat", "--compile-cache"], "folder machine gs://BUCKET/NAME s3://BUCKET/NAME"),
        (["batch", "a.csv", "--database"], "file machine postgresql://USER:PASSWORD@HOST/NAME"),
        (["cat", "--dir"], "folder machine"),
        (["train", "nano", "clips", "--out"], "folder machine"),
        (["selftest", "--out"], "folder machine"),
    ],
)
def test_the_message_for_a_web_address_as_output_lists_valid_outputs(arguments, outputs):
    output = refused(*arguments, "http://foo/x")
    assert has_line_with_words(output, f"http://foo/x {outputs}")
    assert "curl" not in output
    assert ("s3://" in output) == ("s3://" in outputs)
    assert list(Path().iterdir()) == []


def test_help_ignores_extra_words():
    assert "--seed" in succeeded(wanjax("generate", "a", "red", "circle", "--help")).stdout


def test_a_prompt_may_be_a_command_s_name(parsed):
    succeeded(wanjax("generate", "decode"))
    assert parsed["prompt"] == "decode"


def test_help_is_a_command():
    assert succeeded(wanjax("help")).stdout == succeeded(wanjax("--help")).stdout
    for command in ("plan", "decode", "help"):
        assert succeeded(wanjax("help", command)).stdout == succeeded(wanjax(command, "--help")).stdout


def test_a_file_is_not_a_prompt(tmp_path):
    """A shell's pattern matches two videos instead of one: the second would be the prompt."""
    for name in ("one.mp4", "two.mp4"):
        (tmp_path / name).write_bytes(b"film")
    output = refused("--image", "one.mp4", "two.mp4")
    assert has_line_with_words(output, "two.mp4 file prompt --from --image --video")


@pytest.mark.parametrize(
    ("arguments", "offload"),
    [
        (["cat"], None),
        (["--offload", "cat"], "stages"),
        (["cat", "--offload"], "stages"),
        (["--offload", "--", "cat"], "stages"),
        (["--offload", "blocks", "cat"], "blocks"),
        (["cat", "--offload=blocks:3"], "blocks:3"),
        (["cat", "--offload", "none"], "none"),
        (["cat", "--no-offload"], "none"),
    ],
)
def test_an_offload_may_have_a_value(parsed, arguments, offload):
    succeeded(wanjax(*arguments))
    assert parsed["prompt"] == "cat"
    assert (parsed["offload"] and str(parsed["offload"])) == offload


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cat", "--offload=block"], "offload none stages blocks:N 'block'"),
        (["cat", "--offload", "blocks:0"], "offload blocks:N 'blocks:0'"),
        (["cat", "--offload", "blocks", "--mesh", "tp=2"], "offload blocks one device 2 mesh"),
        (["cat", "--offload", "blocks", "--no-offload"], "--offload --no-offload blocks one"),
    ],
)
def test_invalid_offloads_are_refused(parsed, arguments, message):
    assert has_line_with_words(refused(*arguments), message)
    assert not parsed


def test_the_message_for_a_clip_as_a_picture_suggests_video():
    Path("circle.mp4").write_bytes(b"")
    advice = "--image circle.mp4 is a clip: give a picture, or the clip as --video\n"
    assert advice in wanjax("cat", "--image", "circle.mp4").stderr


def test_a_prompt_in_quotes_needs_no_others():
    assert "quotes" not in refused("a red circle", "--offload", "disk")


def test_a_file_of_settings_without_a_model_says_to_add_one(tmp_path):
    (tmp_path / "settings.json").write_text('{"prompt": "a red circle"}')
    assert has_line_with_words(refused("--from", str(tmp_path / "settings.json")), "settings.json add model")
