"""``kvpass calibrate``: what it writes serves ``kvpass eval``; bad input is one line."""

from typer.testing import CliRunner

from kvpass.calibration.texts import generated_texts
from kvpass.cli.main import app


def test_a_file_of_the_command_is_an_option_of_the_policy(tmp_path):
    folder, output = tmp_path / "texts", tmp_path / "made" / "kvzap.safetensors"
    folder.mkdir()
    for number, text in enumerate(generated_texts(words=40, rounds=1)):
        (folder / f"{number}.txt").write_text(text)
    call = ["calibrate", "builtin", "--output", str(output), "--texts", str(folder), "--tokens", "48"]
    made = CliRunner().invoke(app, call)
    assert made.exit_code == 0, made.output
    assert "R2 " in made.output and f"written: {output}, {output.stat().st_size} bytes" in made.output.replace("\n", "")
    spec = f"kvzap:weights={output},window=8"
    run = ["eval", "builtin", "--policies", spec, "--budgets", "64", "--samples", "1", "--scope", "context"]
    run += ["--length", "256", "--backend", "eager", "--output", str(tmp_path / "eval")]
    scored = CliRunner().invoke(app, run)
    assert scored.exit_code == 0 and "kvzap" in scored.output, scored.output
    (folder / "0.txt").write_bytes(b"\xff")
    refused = CliRunner().invoke(app, call)
    assert refused.exit_code == 2 and refused.output.startswith("error: document=")
